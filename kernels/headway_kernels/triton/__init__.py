"""The Triton back-end: kernels for CUDA GPUs of compute capability 8.0 and later, and the host code around them.

Nothing here is imported before a call chooses this back-end (triton_backend.py): the package works without triton.

    numerics        exponentials, tanh and the logit chain as device functions
    policy_token    the formula of one token, policy_token.py of the parent line by line; inlined by two kernels
    policy_loss     policy_loss over tokens or whole segments, statistics without atomics
    head_rows       the rows of a chunk of logits: scores, policy loss and dL/dlogits in place
    head_step       head_loss_step: chunks, products by the vendor's GEMM, row kernels between them
    head_logp       head_logp: streams over the vocabulary and owns its matrix product
    head_masked     head_masked: gathers the kept rows of the weight
    segment_scan    GAE, V-trace and discounted returns
    products        the matrix products that are the vendor's
    launch          the device a kernel runs on; what the interpreter may run
    catalog         the configurations that run in production, for headway_kernels.proof.gate

Numerics, in every kernel: values are converted to fp32 when loaded; offsets of rows are int64; masked lanes are
selected away, never multiplied; sums run in an order that depends on sizes alone, with no atomics.
"""
