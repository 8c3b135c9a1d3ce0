"""The CUDA back-end: host code of the kernels in kernels/csrc/cuda, called through ctypes; no torch headers.

Nothing here is imported before a call chooses this back-end (cuda_backend.py): the package works without a GPU.

    library       libheadway_kernels_cuda.so: found once, its interface checked; devices and streams of a call
    build         compiles the library with nvcc; `python -m headway_kernels.cuda.build`
    weight_delta  cast, compare, encode and apply on the GPU
    host_delta    the same behind weight_delta's public functions, deltas in host memory
    pack_cast     gather, scatter and cast of many tensors in one launch
    segment_scan  GAE, V-trace and discounted returns
    policy_loss   loss, dL/dlogp and statistics of packed tokens

The same sources run on the CPU as libheadway_kernels_cuda_emulated.so (csrc/cuda/emulator.h), which proves them
without a GPU; HEADWAY_CUDA=/path/to/it loads it, and it then takes CPU tensors and only calls that name "cuda".
"""
