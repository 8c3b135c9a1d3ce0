"""The GPU script: `python -m headway_bench.gpu`. Complete in under 8 minutes on one GPU; correctness first.

    run             arguments, the time budget, the order of the sections
    context         device, sizes, timer and measured limits, as every section sees them
    report          rows, table and files
    checks          policy_loss, segment_scan, weight_delta and pack_cast against their references
    head_checks     head_logp, head_loss_step and head_masked against fp64
    limits          the copy rate and the matrix rate of this GPU, measured
    head_times      the head against its rivals, interleaved
    rivals          torch in three ways, Liger, cut-cross-entropy, flash-attn: those that are installed
    memory_times    weight_delta, pack_cast, segment_scan and policy_loss against the copy rate
    sanitize        compute-sanitizer over the checks on small shapes
    loop, coin_env  with --loop, instead of the others: the whole loop, real processes, random models of two shapes

The kernels' part needs torch, triton and headway_kernels; none of the engine's other dependencies, which a GPU
machine may lack. Without a GPU it says so and returns 3; `--rehearse` then goes through every section at tiny sizes on
the CPU, in Triton's interpreter and on the emulated CUDA kernels, as far as they are there (`make rehearse-gpu`).
"""
