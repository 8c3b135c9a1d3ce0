// The C interface of libheadway_kernels_cuda: what kernels/headway_kernels/cuda/ calls.
//
// Plain pointers into the memory of `device`, sizes and strides in elements unless a name says bytes, and a stream
// (a cudaStream_t; null: the default one). No torch, no CUDA headers. Every function only enqueues kernels and
// returns at once with 0, a positive cudaError_t, or a negative code; headway_cuda_message explains it. The caller
// has checked every index: nothing here checks bounds. Results do not depend on the device's size or timing.
// Any change of a signature or a struct raises HEADWAY_CUDA_ABI, here and in headway_kernels/cuda/library.py.
#pragma once

#include <cstdint>

#define HEADWAY_CUDA_ABI 1

#if defined(_WIN32)
#define HEADWAY_CUDA_EXPORT extern "C" __declspec(dllexport)
#else
#define HEADWAY_CUDA_EXPORT extern "C" __attribute__((visibility("default")))
#endif

HEADWAY_CUDA_EXPORT int headway_cuda_abi(void);

// Whether the kernels run on the CPU, under emulator.h; pointers are then host pointers and device is 0.
HEADWAY_CUDA_EXPORT int headway_cuda_is_emulated(void);

// Devices that can run the kernels; a negative number is the negated cudaError_t that says why there are none.
HEADWAY_CUDA_EXPORT int headway_cuda_num_devices(void);

// What a return code means; valid until this thread's next call.
HEADWAY_CUDA_EXPORT const char* headway_cuda_message(int code);

// ---- weight_delta.cu: the blocks and bytes of headway_kernels/delta_format.py ----

// Compares a flat tensor with its next value and marks what changed, for blocks [first_block, first_block + num_blocks).
//   pieces[num_pieces]: device array of pointers to the new values, whose elements follow each other;
//   starts[num_pieces + 1]: device array, first element of each piece, and num_elements;
//   source_dtype, dtype: 2 -> 0, 1 or 2 casts fp32; equal codes compare bits. update: leave the new bits in `old`;
//   marks: uint8 [num_blocks * 8192], bit i of byte j is element 8 j + i of a block; counts: int32 [num_blocks].
// marks and counts are those of these blocks; pieces, starts and old are those of the whole tensor.
HEADWAY_CUDA_EXPORT int headway_cuda_delta_compare(const void* const* pieces, const int64_t* starts, int64_t num_pieces,
                                                   int source_dtype, void* old, int dtype, int64_t num_elements,
                                                   int update, int64_t first_block, int64_t num_blocks, uint8_t* marks,
                                                   int32_t* counts, int device, void* stream);

// Chooses the formats from the counts: formats[num_blocks]; offsets[num_blocks + 1], bytes; num_changed[1].
HEADWAY_CUDA_EXPORT int headway_cuda_delta_layout(const int32_t* counts, int64_t num_elements, int dtype, uint8_t* formats,
                                                  int64_t* offsets, int64_t* num_changed, int device, void* stream);

// Writes the payload; values: the whole tensor with its new bits.
HEADWAY_CUDA_EXPORT int headway_cuda_delta_encode(const void* values, int dtype, int64_t num_elements,
                                                  const uint8_t* marks, const uint8_t* formats, const int64_t* offsets,
                                                  int64_t first_block, int64_t num_blocks, uint8_t* payload, int device,
                                                  void* stream);

// Writes the changed elements of a valid delta into a tensor of its size and dtype.
HEADWAY_CUDA_EXPORT int headway_cuda_delta_apply(const uint8_t* formats, const int64_t* offsets, const uint8_t* payload,
                                                 int dtype, int64_t num_elements, int64_t first_block,
                                                 int64_t num_blocks, void* destination, int device, void* stream);

// Writes the changed elements of a valid delta along a SliceTable (slice_table.py): runs[num_runs, 8], block_offsets,
// block_runs as there; reciprocals[num_runs]: 1 / source_stride; destinations, destination_dtypes: device arrays, one
// entry a destination.
HEADWAY_CUDA_EXPORT int headway_cuda_delta_apply_slices(const uint8_t* formats, const int64_t* offsets,
                                                        const uint8_t* payload, int dtype, int64_t num_elements,
                                                        const int64_t* runs, const double* reciprocals,
                                                        const int64_t* block_offsets, const int64_t* block_runs,
                                                        void* const* destinations, const int32_t* destination_dtypes,
                                                        int64_t first_block, int64_t num_blocks, int device,
                                                        void* stream);

// ---- segment_scan.cu: formulas and meaning in headway_kernels/segment_scan.py ----

// kind: 0 return, 1 gae, 2 vtrace. values, log_ratio, mask, bootstrap may be null where the kind does not need them.
// segments[num_segments + 1] rises from 0 to the number of tokens; advantage and target are written completely.
HEADWAY_CUDA_EXPORT int headway_cuda_segment_scan(int kind, const float* rewards, const int64_t* segments,
                                                  const float* values, const float* log_ratio, const uint8_t* mask,
                                                  const float* bootstrap, int64_t num_segments, float gamma, float lam,
                                                  float rho_cap, float c_cap, float* advantage, float* target, int device,
                                                  void* stream);

// ---- policy_loss.cu: formulas and statistics in headway_kernels/{policy_token,policy_stats}.py ----

extern "C" {
// An Objective; the codes are those of objective.py. dual_clip is infinity where there is none.
struct HeadwayPolicyOptions {
    int32_t family, correction, kl, ratio_level, rho_level;
    float clip_lower, clip_upper, dual_clip, cap, correction_cap, correction_floor, gate_positive, gate_negative, tv_bound,
        kl_coef, entropy_coef;
};
}

// Rows and columns of the partials that a call needs.
HEADWAY_CUDA_EXPORT int64_t headway_cuda_policy_rows(const HeadwayPolicyOptions* options, int64_t num_tokens,
                                                     int64_t num_segments);
HEADWAY_CUDA_EXPORT int headway_cuda_policy_columns(void);

// coefficient: fp32 [num_tokens]; NaN on a weighted token whose input is not finite, which is counted and makes the
// loss NaN. partials: fp32 [columns, rows], scratch. results: fp64 [columns]: loss, sums, peaks, buckets.
// options is read before the call returns. proximal, reference, entropy, m2_limit (fp64 scalar), segments may be null.
HEADWAY_CUDA_EXPORT int headway_cuda_policy_loss(const HeadwayPolicyOptions* options, const float* logp,
                                                 const float* behaviour, const float* advantage,
                                                 const float* token_weight, const float* proximal,
                                                 const float* reference, const float* entropy, const double* m2_limit,
                                                 const int64_t* segments, int64_t num_tokens, int64_t num_segments,
                                                 float* coefficient, float* partials, double* results, int device,
                                                 void* stream);

// ---- pack_cast.cu ----

extern "C" {
// A matrix that is moved: element (r, c) from source[r * source_stride + c] to target[r * target_stride + c].
// format 0 casts between dtypes 0, 1, 2 (equal dtypes: bits are copied). format 1 writes fp8 e4m3 codes and
// scales[r / 128 * scale_stride + c / 128], fp32: value = code * scale. format 2 writes fp8 e4m3 codes and
// scales[r * scale_stride + c / 32], uint8: value = code * 2^(scale - 127), 255 where an input is not finite.
// Parts must not overlap in their targets.
struct HeadwayPackPart {
    const void* source;
    void* target;
    void* scales;
    int64_t rows, columns, source_stride, target_stride, scale_stride;
    int32_t source_dtype, target_dtype, format, reserved;
    int64_t groups_per_row;  // this and the next are filled by headway_cuda_pack_tiles
    double reciprocal;
};
}

// Completes a part (in host memory) and returns its number of tiles, or -1.
HEADWAY_CUDA_EXPORT int64_t headway_cuda_pack_tiles(HeadwayPackPart* part);

// parts[num_parts] and first_tiles[num_parts + 1], the running sum of the tiles, are in device memory.
HEADWAY_CUDA_EXPORT int headway_cuda_pack_cast(const HeadwayPackPart* parts, const int64_t* first_tiles,
                                               int64_t num_parts, int64_t first_tile, int64_t num_tiles, int device,
                                               void* stream);
