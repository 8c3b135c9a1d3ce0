"""What proves kernels without a GPU: Triton's interpreter, mended, and a gate over compiled kernels.

    interpreter  repairs of Triton's interpreter; import it before any kernel
    cubin        what a compiled kernel uses: registers, stack, shared memory, instructions
    bounds       what a kernel may use, and its occupancy
    page         the generated table of docs/kernels.md
    gate         `python -m headway_kernels.proof.gate`: every kernel in its production configurations

Needs triton (extra `triton-proof`), no GPU and no driver. Nothing at run time imports it.
"""
