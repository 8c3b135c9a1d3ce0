// The C interface of libheadway_kernels_cpu: what native.py and the modules of kernels/headway_kernels that use it
// call.
//
// Plain pointers, sizes and strides; no torch. Strides count elements, never bytes. The caller owns every buffer and
// has validated every index: nothing here checks bounds. Functions are thread-safe; num_threads <= 1 starts no thread.
// Any change of a struct or of a signature raises HEADWAY_CPU_ABI here, in CMakeLists.txt and in native.py.
#pragma once

#include <cstdint>

#define HEADWAY_CPU_ABI 4

#if defined(_WIN32)
#define HEADWAY_EXPORT extern "C" __declspec(dllexport)
#else
#define HEADWAY_EXPORT extern "C" __attribute__((visibility("default")))
#endif

extern "C" {

// Which keys each run of consecutive queries sees; see AttentionPlan in attention.py.
struct HeadwayPlan {
    const int64_t* query_start;
    const int64_t* query_len;
    const int64_t* causal_start;
    const int64_t* causal_base;
    const int64_t* range_offsets;  // [num_runs + 1]
    const int64_t* range_start;
    const int64_t* range_len;
    int64_t num_runs;
    int64_t num_queries;
    int64_t num_keys;
};

// One [tokens, heads, head_dim] tensor; the head dimension is contiguous.
struct HeadwayView {
    float* data;
    int64_t token_stride;
    int64_t head_stride;
};
}

// out and lse rows of queries that no run covers are left as they are. lse[num_queries, num_heads] (in units of log 2,
// what the backward needs) may be null. Returns 0.
HEADWAY_EXPORT int headway_attention_forward(const HeadwayPlan* plan, const HeadwayView* query, const HeadwayView* key,
                                             const HeadwayView* value, const HeadwayView* out, float* lse,
                                             int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float scale,
                                             int64_t num_threads);

// Writes the covered rows of d_query; adds to d_key and d_value, which the caller zeroes.
HEADWAY_EXPORT int headway_attention_backward(const HeadwayPlan* plan, const HeadwayView* query,
                                              const HeadwayView* key, const HeadwayView* value,
                                              const HeadwayView* out, const float* lse, const HeadwayView* d_out,
                                              const HeadwayView* d_query, const HeadwayView* d_key,
                                              const HeadwayView* d_value, int64_t num_heads, int64_t num_kv_heads,
                                              int64_t head_dim, float scale, int64_t num_threads);

// Returns the number of rows that cannot be sampled (token -1, log-prob NaN).
HEADWAY_EXPORT int64_t headway_sample_tokens(const float* logits, int64_t row_stride, int64_t num_rows,
                                             int64_t vocab_size, const float* inv_temperature, const int64_t* seeds,
                                             const int64_t* positions, int64_t* tokens, float* logprobs,
                                             int64_t num_threads);

// A Delta of delta_format.py, validated.
struct HeadwayDelta {
    const uint8_t* formats;
    const int64_t* offsets;
    const uint8_t* payload;
    int64_t num_elements;
    int32_t dtype;  // 0 bfloat16, 1 float16, 2 float32, as everywhere below
};

// Encodes where `old` differs from the sources, cast to dtype (source_type is dtype or 2); source s holds the elements
// source_starts[s] .. source_starts[s + 1]. Writes the new values over `old` if update is set; otherwise there is one
// source, of type dtype. payload has room for all values. Returns the number of elements that differ.
HEADWAY_EXPORT int64_t headway_delta_encode(const void* const* sources, const int64_t* source_starts,
                                            int64_t num_sources, int32_t source_type, int32_t dtype, void* old,
                                            int64_t num_elements, int update, uint8_t* formats, int64_t* offsets,
                                            uint8_t* payload, int64_t num_threads);

HEADWAY_EXPORT void headway_delta_apply(const HeadwayDelta* delta, void* destination, int64_t num_threads);

// The arrays are those of a SliceTable; dtypes are of the destinations.
HEADWAY_EXPORT void headway_delta_apply_slices(const HeadwayDelta* delta, const int64_t* runs,
                                               const int64_t* block_offsets, const int64_t* block_runs,
                                               void* const* destinations, const int32_t* dtypes, int64_t num_threads);

// The first malformed block, or -1; least and most: how many elements can have changed. Offsets have been checked.
HEADWAY_EXPORT int64_t headway_delta_check(const HeadwayDelta* delta, int64_t* least, int64_t* most,
                                           int64_t num_threads);

// payload has room for all values and a bit an element, of whole blocks. Returns the number of elements carried.
HEADWAY_EXPORT int64_t headway_delta_merge(const HeadwayDelta* older, const HeadwayDelta* newer, uint8_t* formats,
                                           int64_t* offsets, uint8_t* payload, int64_t num_threads);

// weight[vocabulary, hidden] of dtype, contiguous; bias[vocabulary] or null; softcap 0: none.
struct HeadwayHead {
    const void* weight;
    const float* bias;
    int64_t vocabulary, hidden;
    float scale, softcap;
    int32_t dtype;
};

// x[count, hidden], rows of any stride; target in [0, vocabulary), or outside where another rank holds it.
struct HeadwayRows {
    const float* x;
    int64_t x_stride;
    int64_t count;
    const int64_t* target;
    const float* inv_temperature;
};

// [count] each: largest logit, sum of exp(z - top), 1 - p(target); the scores. entropy may be null.
struct HeadwayScores {
    float* top;
    double* total;
    double* miss;
    float* logp;
    float* logsumexp;
    float* entropy;
};

// [count] each: dL/d(product) is exp(z - top) (alpha + beta (z - top)), at_target in the target's column; both times
// the slope of a softcap.
struct HeadwaySlopes {
    const float* top;
    const float* alpha;
    const float* beta;
    const float* at_target;
};

// Floats from one row of kept logits to the next.
HEADWAY_EXPORT int64_t headway_head_row_stride(int64_t vocabulary);

// keep[count, row stride] takes what headway_head_gradient needs; null where no gradient follows.
HEADWAY_EXPORT void headway_head_score(const HeadwayHead* head, const HeadwayRows* rows, float* keep,
                                       const HeadwayScores* out, int64_t num_threads);

// Uses `kept` up. live[num_live], ascending: the rows with a gradient. x_grad[num_live, hidden] is written;
// weight_grad[vocabulary, hidden] and bias_grad[vocabulary] are added to, or null.
HEADWAY_EXPORT void headway_head_gradient(const HeadwayHead* head, const HeadwayRows* rows,
                                          const HeadwaySlopes* slopes, float* kept, const int64_t* live,
                                          int64_t num_live, float* x_grad, float* weight_grad, float* bias_grad,
                                          int64_t num_threads);

// A segment_scan: float arrays are double where is_double is set. kind 0 return, 1 gae, 2 vtrace. values, log_ratio,
// mask and bootstrap may be null where the kind does not need them. segments rises from 0 to the number of tokens.
struct HeadwayScan {
    const void* rewards;
    const int64_t* segments;
    const void* values;
    const void* log_ratio;
    const uint8_t* mask;
    const void* bootstrap;
    void* advantage;
    void* target;
    int64_t num_segments;
    double gamma, lam, rho_cap, c_cap;
    int32_t kind, is_double;
};

// Returns the number of segments in which an active token has an input that is not finite.
HEADWAY_EXPORT int64_t headway_segment_scan(const HeadwayScan* task, int64_t num_threads);

// A matrix that is moved: element (r, c) from source[r source_stride + c] to target[r target_stride + c]. format 0
// casts between dtypes; 1 writes fp8 e4m3 codes and fp32 scales[r / 128 scale_stride + c / 128]; 2 writes fp8 e4m3
// codes and uint8 scales[r scale_stride + c / 32]. pack_cast.py states the values.
struct HeadwayPackPart {
    const void* source;
    void* target;
    void* scales;
    int64_t rows, columns, source_stride, target_stride, scale_stride;
    int32_t source_dtype, target_dtype, format, reserved;
};

HEADWAY_EXPORT void headway_pack_cast(const HeadwayPackPart* parts, int64_t num_parts, int64_t num_threads);

HEADWAY_EXPORT int headway_cpu_abi(void);

// The instruction sets that this build has and this processor runs, comma-separated, best last.
HEADWAY_EXPORT const char* headway_cpu_isas(void);

// Restricts the dispatch to one of them (for tests and benchmarks); null or "" lifts it. Returns 0, or -1 if unknown.
HEADWAY_EXPORT int headway_cpu_force_isa(const char* name);

// Whether num_threads > 1 has any effect.
HEADWAY_EXPORT int headway_cpu_has_threads(void);
