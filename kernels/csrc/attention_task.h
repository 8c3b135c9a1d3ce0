// What the scheduler (attention.cpp) hands to the kernels of an instruction set.
#pragma once

#include "headway_cpu.h"

namespace headway {

constexpr int64_t TILE_ROWS = 64;   // score rows (query, head of the group) that are worked on together
constexpr int64_t KEY_BLOCK = 64;   // keys a step: scores, queries and the block's keys and values stay in L1/L2
constexpr int64_t DOT_KEYS = 256;   // keys a step where there are too few rows to fill a vector with them
constexpr int64_t MAX_HEAD_DIM = 512;

// Rows row_start .. row_start + num_rows - 1 of a run (row = query * group size + head of the group), at tile_row of
// the tile.
struct Segment {
    int64_t run;
    int64_t row_start;
    int32_t num_rows;
    int32_t tile_row;
};

// Segments of runs that have the same full ranges (those of range_run): their rows see those keys as one matrix.
struct Tile {
    int64_t range_run;
    int32_t first_segment;
    int32_t num_segments;
    int32_t num_rows;  // a multiple of the vector length
    int32_t transposed;  // whether some span of the tile needs the transposed queries
};

struct AttentionTask {
    HeadwayPlan plan;
    HeadwayView query, key, value, out;
    float* lse;  // [num_queries, num_heads], or null in a forward without gradients
    HeadwayView d_out, d_query, d_key, d_value;
    int64_t num_heads, group, head_dim, padded_dim;
    float scale;
    const Segment* segments;
};

struct SampleTask {
    const float* logits;
    int64_t vocab_size;
    float inv_temperature;
    double uniform;
};

// Floats of scratch that either tile function needs.
inline int64_t scratch_floats(int64_t padded_dim) {
    const int64_t tile = TILE_ROWS * padded_dim;
    return 5 * tile + 2 * KEY_BLOCK * TILE_ROWS + 4 * DOT_KEYS * padded_dim + 16 * (DOT_KEYS + 64) + 8 * TILE_ROWS;
}

}  // namespace headway
