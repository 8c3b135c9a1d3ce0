// The kernels of one instruction set, and the choice among them. dispatch.cpp chooses; kernels_*.cpp fill the tables.
#pragma once

#include "attention_task.h"
#include "delta_task.h"
#include "head_task.h"
#include "pack_task.h"

namespace headway {

struct Kernels {
    const char* name;
    int lanes;
    int max_dot_rows;  // up to this many rows a span's scores are dot products, not columns of a matrix product
    void (*forward_tile)(const AttentionTask&, const Tile&, int64_t kv_head, float* scratch);
    void (*backward_tile)(const AttentionTask&, const Tile&, int64_t kv_head, float* scratch);
    bool (*sample_row)(const SampleTask&, int64_t* token, float* logprob);
    DeltaKernels delta;
    HeadKernels head;
    PackKernels pack;
};

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

// The widest usable set whose vectors divide head_dim; the narrowest if none does (0: the widest).
const Kernels& pick_kernels(int64_t head_dim);

}  // namespace headway
