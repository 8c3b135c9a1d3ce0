// The policy loss of packed tokens: dL/dlogp, loss and statistics in one pass, then a reduction of fixed order.
//
// A thread block takes a tile of tokens, or a whole segment where a ratio is one value a segment. It writes one
// partial in fp32 for each statistic; policy_finish adds the partials up in fp64. No atomics, no host sync.
// Formulas: policy_token.h; meaning and order of the statistics: headway_kernels/policy_stats.py.
#include "block_scan.h"
#include "policy_token.h"

namespace headway {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kTile = 1024;

// policy_stats.SUMS, in its order, behind the loss.
enum Column : int {
    kLoss,
    kTokens,
    kWeighted,
    kHigh,
    kLow,
    kDual,
    kCapped,
    kRejected,
    kLimited,
    kRatio,
    kRatioSquared,
    kClamped,
    kClampedSquared,
    kObjectiveRatio,
    kBehaviour1,
    kBehaviour2,
    kBehaviour3,
    kReference1,
    kReference2,
    kReference3,
    kEntropy,
    kSegments,
    kSegmentsLimited,
    kSegmentsRejected,
    kNotFinite,
    kNumSums,
};
constexpr int kNumPeaks = 3;

// policy_stats: 128 buckets of 1/16 over [-4, 4), one below and one above.
constexpr int kInner = 128;
constexpr int kBuckets = kInner + 2;
constexpr int kColumns = kNumSums + kNumPeaks + kBuckets;

struct Tokens {
    const float* logp;
    const float* behaviour;
    const float* advantage;
    const float* weight;
    const float* proximal;
    const float* reference;
    const float* entropy;
    const double* m2_limit;
};

struct Running {
    float sums[kNumSums];
    float peaks[kNumPeaks];
};

// A token as loaded: not yet placed at its levels.
struct Loaded {
    bool active, finite;
    float weight, logp, behaviour, advantage, anchor, reference, entropy;
};

__device__ __forceinline__ Loaded load(const Tokens& in, int64_t index, bool inside) {
    Loaded token{};
    if (!inside) return token;
    token.weight = in.weight[index];
    token.active = token.weight != 0.0f;
    if (!token.active) return token;
    token.logp = in.logp[index];
    token.behaviour = in.behaviour[index];
    token.advantage = in.advantage[index];
    token.anchor = in.proximal == nullptr ? token.logp : in.proximal[index];
    token.reference = in.reference == nullptr ? 0.0f : in.reference[index];
    token.entropy = in.entropy == nullptr ? 0.0f : in.entropy[index];
    token.finite = is_finite(token.weight) && is_finite(token.logp) && is_finite(token.behaviour) &&
                   is_finite(token.advantage) && is_finite(token.anchor) && is_finite(token.reference) &&
                   is_finite(token.entropy);
    return token;
}

__device__ __forceinline__ PolicyToken place(const HeadwayPolicyOptions& options, const Tokens& in, const Loaded& token,
                                             float segment_value) {
    PolicyToken out{};
    out.weight = token.weight;
    out.advantage = token.advantage;
    out.logp = token.logp;
    out.behaviour = token.behaviour;
    out.reference = token.reference;
    out.entropy = token.entropy;
    out.has_reference = in.reference != nullptr;
    bool corrected = options.correction != kNoCorrection;
    out.log_q = corrected ? token.logp - token.anchor : token.logp - token.behaviour;
    out.log_rho = corrected ? token.anchor - token.behaviour : 0.0f;
    if (options.ratio_level != kTokenLevel) out.log_q = segment_value;
    if (options.rho_level != kTokenLevel) out.log_rho = segment_value;
    if (options.family == kM2) {
        double distance = static_cast<double>(token.logp) - static_cast<double>(token.behaviour);
        out.beyond_m2 = distance * distance > *in.m2_limit;
    }
    return out;
}

__device__ __forceinline__ int bucket_of(float logp, float behaviour) {
    double place = floor((static_cast<double>(logp) - static_cast<double>(behaviour) + 4.0) * 16.0);
    return static_cast<int>(place < -1.0 ? -1.0 : (place > kInner ? static_cast<double>(kInner) : place)) + 1;
}

__device__ __forceinline__ void count(Running& run, const PolicyToken& token, const PolicyTerms& terms) {
    bool limited = terms.high || terms.low || terms.dual || terms.capped || terms.rejected;
    float d = terms.log_ratio;
    run.sums[kLoss] += token.weight * terms.value;
    run.sums[kHigh] += terms.high ? 1.0f : 0.0f;
    run.sums[kLow] += terms.low ? 1.0f : 0.0f;
    run.sums[kDual] += terms.dual ? 1.0f : 0.0f;
    run.sums[kCapped] += terms.capped ? 1.0f : 0.0f;
    run.sums[kRejected] += terms.rejected ? 1.0f : 0.0f;
    run.sums[kLimited] += limited ? 1.0f : 0.0f;
    run.sums[kRatio] += terms.ratio;
    run.sums[kRatioSquared] += terms.ratio * terms.ratio;
    run.sums[kClamped] += terms.clamped;
    run.sums[kClampedSquared] += terms.clamped * terms.clamped;
    run.sums[kObjectiveRatio] += terms.objective_ratio;
    run.sums[kBehaviour1] -= d;
    run.sums[kBehaviour2] += d * d * 0.5f;
    run.sums[kBehaviour3] += expm1f(clamp_keeping_nan(d, -kMaxExponent, kMaxExponent)) - d;
    run.sums[kReference1] += terms.kl_1;
    run.sums[kReference2] += terms.kl_2;
    run.sums[kReference3] += terms.kl_3;
    run.sums[kEntropy] += token.entropy;
    run.peaks[0] = fmaxf(run.peaks[0], d);
    run.peaks[1] = fmaxf(run.peaks[1], fabsf(d));
    run.peaks[2] = fmaxf(run.peaks[2], terms.clamped);
}

// One token: its coefficient (without a segment's mean) and its share of the statistics; slope times weight in `product`.
__device__ __forceinline__ float evaluate(const HeadwayPolicyOptions& options, const Tokens& in, const Loaded& loaded,
                                          float segment_value, Running& run, float& product) {
    product = 0.0f;
    if (!loaded.active) return 0.0f;
    run.sums[kWeighted] += 1.0f;
    if (!loaded.finite) {
        run.sums[kNotFinite] += 1.0f;
        run.sums[kLoss] = NAN;
        return NAN;
    }
    PolicyToken token = place(options, in, loaded, segment_value);
    PolicyTerms terms = policy_terms(options, token);
    count(run, token, terms);
    product = token.weight * terms.slope;
    return terms.kl_coefficient;
}

// A warp's histogram: lanes of one bucket let the first of them add for all.
template <class Array>
__device__ __forceinline__ void add_to_bucket(Array& histogram, int warp, int lane, int bucket) {
    unsigned peers = __match_any_sync(kAllLanes, bucket);
    if (bucket >= 0 && __ffs(static_cast<int>(peers)) - 1 == lane) histogram[warp * kBuckets + bucket] += __popc(peers);
    __syncwarp();
}

// Sum over the block, in every thread; warp_sums is shared and free again when it returns.
template <class T, class Array>
__device__ __forceinline__ T block_sum(T value, Array& warp_sums) {
    T sum = warp_sum(value);
    int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) warp_sums[warp] = sum;
    __syncthreads();
    T total = 0;
    for (int i = 0; i < kWarps; ++i) total += static_cast<T>(warp_sums[i]);
    __syncthreads();
    return total;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int step = 16; step > 0; step >>= 1) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
    return value;
}

// Writes the block's column of partials: partials[column, row of this block].
template <class Floats, class Counts>
__device__ __forceinline__ void write_partials(const Running& run, Floats& staged, Counts& histogram, float* partials,
                                               int64_t num_rows) {
    constexpr int kStaged = kNumSums + kNumPeaks;
    int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll
    for (int i = 0; i < kNumSums; ++i) {
        float sum = warp_sum(run.sums[i]);
        if (lane == 0) staged[warp * kStaged + i] = sum;
    }
#pragma unroll
    for (int i = 0; i < kNumPeaks; ++i) {
        float peak = warp_max(run.peaks[i]);
        if (lane == 0) staged[warp * kStaged + kNumSums + i] = peak;
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < kColumns; column += kThreads) {
        float total = 0.0f;
        if (column < kStaged) {
            total = staged[column];
            for (int i = 1; i < kWarps; ++i) {
                float other = staged[i * kStaged + column];
                total = column < kNumSums ? total + other : fmaxf(total, other);
            }
        } else {
            int number = 0;
            for (int i = 0; i < kWarps; ++i) number += histogram[i * kBuckets + column - kStaged];
            total = static_cast<float>(number);
        }
        partials[column * num_rows + blockIdx.x] = total;
    }
}

__device__ __forceinline__ Running new_running() {
    Running run{};
    run.peaks[0] = -INFINITY;
    return run;
}

// SEGMENTED: block i takes segment i; else tile i.
template <bool SEGMENTED>
__global__ void __launch_bounds__(kThreads, 2)
    policy_tokens(HeadwayPolicyOptions options, Tokens in, const int64_t* segments, int64_t num_tokens, float* coefficient,
                  float* partials) {
    HEADWAY_SHARED(int, histogram, kWarps* kBuckets);
    HEADWAY_SHARED(float, staged, kWarps*(kNumSums + kNumPeaks));
    HEADWAY_SHARED(double, warp_sums, kWarps);
    int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
    for (int i = static_cast<int>(threadIdx.x); i < kWarps * kBuckets; i += kThreads) histogram[i] = 0;
    __syncthreads();
    int64_t row = blockIdx.x;
    int64_t start = SEGMENTED ? segments[row] : row * kTile;
    int64_t end = SEGMENTED ? segments[row + 1] : min_of(num_tokens, start + kTile);
    Running run = new_running();
    double number = 0.0, value = 0.0;
    if (SEGMENTED) {
        bool of_ratio = options.ratio_level != kTokenLevel;
        for (int64_t index = start + threadIdx.x; index < end; index += kThreads) {
            Loaded token = load(in, index, true);
            if (!token.active) continue;
            number += 1.0;
            float head = of_ratio ? token.logp : token.anchor;
            if (token.finite) value += static_cast<double>(head) - static_cast<double>(token.behaviour);
        }
        number = block_sum(number, warp_sums);
        value = block_sum(value, warp_sums);
        if ((of_ratio ? options.ratio_level : options.rho_level) == kGeometric) value /= fmax(number, 1.0);
    }
    double shared_slope = 0.0;
    for (int64_t base = start; base < end; base += kThreads) {
        int64_t index = base + threadIdx.x;
        Loaded token = load(in, index, index < end);
        float product;
        float part = evaluate(options, in, token, static_cast<float>(value), run, product);
        bool counted = token.active && token.finite;
        add_to_bucket(histogram, warp, lane, counted ? bucket_of(token.logp, token.behaviour) : -1);
        if (SEGMENTED && options.ratio_level == kGeometric)
            shared_slope += product;
        else
            part += product;
        if (index < end) coefficient[index] = part;
    }
    if (SEGMENTED) {
        if (options.ratio_level == kGeometric) {
            // d mean / d logp_t = 1 / length for every t of the segment, whichever token the loss term belongs to.
            float mean = static_cast<float>(block_sum(shared_slope, warp_sums) / fmax(number, 1.0));
            for (int64_t index = start + threadIdx.x; index < end; index += kThreads)
                if (in.weight[index] != 0.0f) coefficient[index] += mean;
        }
        double limited = block_sum(static_cast<double>(run.sums[kLimited]), warp_sums);
        double rejected = block_sum(static_cast<double>(run.sums[kRejected]), warp_sums);
        if (threadIdx.x == 0) {
            run.sums[kSegments] = number > 0.0 ? 1.0f : 0.0f;
            run.sums[kSegmentsLimited] = limited > 0.0 ? 1.0f : 0.0f;
            run.sums[kSegmentsRejected] = rejected > 0.0 ? 1.0f : 0.0f;
        }
    }
    if (threadIdx.x == 0) run.sums[kTokens] = static_cast<float>(end - start);
    write_partials(run, staged, histogram, partials, static_cast<int64_t>(gridDim.x));
}

// One warp a column: sums and buckets are added, peaks compared, in an order that only the number of rows decides.
__global__ void __launch_bounds__(kThreads) policy_finish(const float* partials, int64_t num_rows, double* results) {
    int column = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) / kWarpSize;
    int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if (column >= kColumns) return;
    bool is_peak = column >= kNumSums && column < kNumSums + kNumPeaks;
    double total = column == kNumSums ? -INFINITY : 0.0;
    for (int64_t row = lane; row < num_rows; row += kWarpSize) {
        double part = static_cast<double>(partials[column * num_rows + row]);
        total = is_peak ? fmax(total, part) : total + part;
    }
    for (int step = 16; step > 0; step >>= 1) {
        double other = __shfl_xor_sync(kAllLanes, total, step);
        total = is_peak ? fmax(total, other) : total + other;
    }
    if (lane == 0) results[column] = total;
}

}  // namespace
}  // namespace headway

using namespace headway;

int64_t headway_cuda_policy_rows(const HeadwayPolicyOptions* options, int64_t num_tokens, int64_t num_segments) {
    bool segmented = options->ratio_level != kTokenLevel || options->rho_level != kTokenLevel;
    return segmented ? num_segments : ceil_div(num_tokens, kTile);
}

int headway_cuda_policy_columns(void) { return kColumns; }

int headway_cuda_policy_loss(const HeadwayPolicyOptions* options, const float* logp, const float* behaviour,
                             const float* advantage, const float* token_weight, const float* proximal,
                             const float* reference, const float* entropy, const double* m2_limit,
                             const int64_t* segments, int64_t num_tokens, int64_t num_segments, float* coefficient,
                             float* partials, double* results, int device, void* stream) {
    int64_t rows = headway_cuda_policy_rows(options, num_tokens, num_segments);
    if (num_tokens < 0 || num_segments < 0 || rows > kMaxBlocks) return kInvalidArgument;
    if (options->family == kM2 && m2_limit == nullptr) return kInvalidArgument;
    if (options->kl != kNoKl && reference == nullptr) return kInvalidArgument;
    bool segmented = options->ratio_level != kTokenLevel || options->rho_level != kTokenLevel;
    if (segmented && segments == nullptr) return kInvalidArgument;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    Tokens in{logp, behaviour, advantage, token_weight, proximal, reference, entropy, m2_limit};
    HeadwayPolicyOptions copied = *options;
    if (rows > 0) {
        auto* kernel = segmented ? policy_tokens<true> : policy_tokens<false>;
        HEADWAY_LAUNCH(kernel, rows, kThreads, stream, copied, in, segments, num_tokens, coefficient, partials);
    }
    HEADWAY_LAUNCH(policy_finish, ceil_div(kColumns, kWarps), kThreads, stream, partials, rows, results);
    return scope.launched();
}
