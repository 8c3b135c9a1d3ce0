// GAE, V-trace and discounted returns over packed segments: y_i = b_i + f_i y_{i+1} over the active tokens.
//
// One thread block walks one segment from its end in tiles. A warp takes 32 neighbouring tokens at a time, so loads
// are coalesced, and joins them by a suffix scan of affine maps; a passed-over token is the identity. The order of
// the additions depends on the segment alone: a value does not depend on what else is packed beside it.
// Formulas and meaning of the arguments: headway_kernels/segment_scan.py.
#include "device.h"
#include "headway_cuda.h"

namespace headway {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kChunks = 4;  // of 32 tokens, a warp and tile
constexpr int64_t kTile = int64_t{kThreads} * kChunks;

enum Kind : int { kReturn = 0, kGae = 1, kVtrace = 2 };

struct Inputs {
    const float* rewards;
    const float* values;
    const float* log_ratio;
    const uint8_t* mask;
    const float* bootstrap;
    float gamma, lam, rho_cap, c_cap;
};

// y -> gain + factor y.
struct Affine {
    float factor, gain;
};

// The map of this token, then `later`, which stands to its right: y enters from the right.
__device__ __forceinline__ Affine join(Affine earlier, Affine later) {
    return Affine{earlier.factor * later.factor, earlier.gain + earlier.factor * later.gain};
}

__device__ __forceinline__ float apply(Affine map, float y) { return map.gain + map.factor * y; }

__device__ __forceinline__ Affine shuffle(Affine map, int source) {
    return Affine{__shfl_sync(kAllLanes, map.factor, source), __shfl_sync(kAllLanes, map.gain, source)};
}

// Every lane's map joined with those of the lanes above it.
__device__ __forceinline__ Affine suffix_scan(Affine map, int lane) {
    for (unsigned step = 1; step < kWarpSize; step <<= 1) {
        Affine later{__shfl_down_sync(kAllLanes, map.factor, step), __shfl_down_sync(kAllLanes, map.gain, step)};
        if (lane + static_cast<int>(step) < kWarpSize) map = join(map, later);
    }
    return map;
}

// What a lane holds of one chunk.
struct Token {
    bool active;
    float reward, value, ratio;
    float next_value;  // V of the next active token of the segment, or its bootstrap
    Affine suffix;     // this token's map joined with those of the later tokens of the chunk
};

// A value that is not finite must reach every output before it, whatever the factors are.
__device__ __forceinline__ float checked(float x) { return is_finite(x) ? x : NAN; }

template <int KIND>
__device__ __forceinline__ Token load(const Inputs& in, int64_t index, bool inside) {
    Token token{};
    token.active = inside && (in.mask == nullptr || in.mask[index] != 0);
    if (!token.active) return token;
    token.reward = checked(in.rewards[index]);
    if (in.values != nullptr) token.value = checked(in.values[index]);
    if (KIND == kVtrace) token.ratio = bounded_exp(checked(in.log_ratio[index]));
    return token;
}

template <int KIND>
__device__ __forceinline__ Affine map_of(const Inputs& in, const Token& token) {
    if (!token.active) return Affine{1.0f, 0.0f};
    if (KIND == kReturn) return Affine{in.gamma, token.reward};
    float delta = token.reward + in.gamma * token.next_value - token.value;
    if (KIND == kGae) return Affine{in.gamma * in.lam, delta};
    float rho = cap_keeping_nan(token.ratio, in.rho_cap), c = cap_keeping_nan(token.ratio, in.c_cap);
    return Affine{in.gamma * in.lam * c, rho * delta};
}

// Writes advantage and target; y_next is y of the next active token.
template <int KIND>
__device__ __forceinline__ void store(const Inputs& in, const Token& token, float y, float y_next, float* advantage,
                                      float* target) {
    float a = 0.0f, t = 0.0f;
    if (token.active) {
        if (KIND == kReturn) {
            a = y - token.value;
            t = y;
        } else if (KIND == kGae) {
            a = y;
            t = y + token.value;
        } else {
            a = token.reward + in.gamma * (token.next_value + y_next) - token.value;
            t = token.value + y;
        }
    }
    *advantage = a;
    *target = t;
}

// Fills next_value of a warp's chunks, from the last one down; `next` is what stands to the right of them.
__device__ __forceinline__ void chain_values(Token* tokens, int lane, float next) {
#pragma unroll
    for (int chunk = kChunks - 1; chunk >= 0; --chunk) {
        Token& token = tokens[chunk];
        unsigned active = __ballot_sync(kAllLanes, token.active);
        unsigned later = lane == kWarpSize - 1 ? 0u : active >> (lane + 1);
        int source = later ? lane + __ffs(static_cast<int>(later)) : lane;
        float value = __shfl_sync(kAllLanes, token.value, source);
        token.next_value = later ? value : next;
        int first = active ? __ffs(static_cast<int>(active)) - 1 : 0;
        float leading = __shfl_sync(kAllLanes, token.value, first);
        if (active) next = leading;
    }
}

// V of the first active token of a warp's chunks in `value`; whether there is one.
__device__ __forceinline__ bool leading_value(const Token* tokens, float& value) {
    bool found = false;
#pragma unroll
    for (int chunk = kChunks - 1; chunk >= 0; --chunk) {
        unsigned active = __ballot_sync(kAllLanes, tokens[chunk].active);
        float first = __shfl_sync(kAllLanes, tokens[chunk].value, active ? __ffs(static_cast<int>(active)) - 1 : 0);
        if (active) {
            value = first;
            found = true;
        }
    }
    return found;
}

template <int KIND>
__global__ void __launch_bounds__(kThreads, 6)
    segment_scan(Inputs in, const int64_t* segments, float* advantage, float* target) {
    HEADWAY_SHARED(float, warp_value, kWarps);
    HEADWAY_SHARED(int, warp_found, kWarps);
    HEADWAY_SHARED(float, warp_factor, kWarps);
    HEADWAY_SHARED(float, warp_gain, kWarps);
    int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int64_t segment = blockIdx.x, start = segments[segment], end = segments[segment + 1];
    float after = in.bootstrap == nullptr ? 0.0f : checked(in.bootstrap[segment]);
    float y = KIND == kReturn ? after : 0.0f;  // of the first active token of the tiles done so far
    float next_value = after;
    for (int64_t tile = start + (end - start - 1) / kTile * kTile; tile >= start && end > start; tile -= kTile) {
        int64_t base = tile + int64_t{warp} * kChunks * kWarpSize + lane;
        Token tokens[kChunks];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            int64_t index = base + chunk * kWarpSize;
            tokens[chunk] = load<KIND>(in, index, index < end);
        }
        float leading = 0.0f;
        bool found = leading_value(tokens, leading);
        if (lane == 0) {
            warp_found[warp] = found ? 1 : 0;
            warp_value[warp] = leading;
        }
        __syncthreads();
        float next = next_value;
        for (int other = kWarps - 1; other >= 0; --other) {
            if (warp_found[other] == 0) continue;
            if (other > warp) next = warp_value[other];
            next_value = warp_value[other];
        }
        chain_values(tokens, lane, next);
        Affine whole{1.0f, 0.0f};
#pragma unroll
        for (int chunk = kChunks - 1; chunk >= 0; --chunk) {
            tokens[chunk].suffix = suffix_scan(map_of<KIND>(in, tokens[chunk]), lane);
            whole = join(shuffle(tokens[chunk].suffix, 0), whole);
        }
        if (lane == 0) {
            warp_factor[warp] = whole.factor;
            warp_gain[warp] = whole.gain;
        }
        __syncthreads();
        float y_next = y;
        for (int other = kWarps - 1; other >= 0; --other) {
            if (other == warp) y_next = y;
            y = apply(Affine{warp_factor[other], warp_gain[other]}, y);
        }
#pragma unroll
        for (int chunk = kChunks - 1; chunk >= 0; --chunk) {
            float here = apply(tokens[chunk].suffix, y_next);
            float above = __shfl_down_sync(kAllLanes, here, 1);
            if (lane == kWarpSize - 1) above = y_next;
            int64_t index = base + chunk * kWarpSize;
            if (index < end) store<KIND>(in, tokens[chunk], here, above, advantage + index, target + index);
            y_next = __shfl_sync(kAllLanes, here, 0);
        }
        __syncthreads();
    }
}

template <int KIND>
void launch_scan(const Inputs& in, const int64_t* segments, int64_t num_segments, float* advantage, float* target,
                 void* stream) {
    auto* kernel = segment_scan<KIND>;
    HEADWAY_LAUNCH(kernel, num_segments, kThreads, stream, in, segments, advantage, target);
}

}  // namespace
}  // namespace headway

using namespace headway;

int headway_cuda_segment_scan(int kind, const float* rewards, const int64_t* segments, const float* values,
                              const float* log_ratio, const uint8_t* mask, const float* bootstrap, int64_t num_segments,
                              float gamma, float lam, float rho_cap, float c_cap, float* advantage, float* target,
                              int device, void* stream) {
    if (kind < kReturn || kind > kVtrace || num_segments < 0 || num_segments > kMaxBlocks) return kInvalidArgument;
    if ((kind != kReturn && values == nullptr) || (kind == kVtrace) != (log_ratio != nullptr)) return kInvalidArgument;
    if (num_segments == 0) return 0;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    Inputs in{rewards, values, log_ratio, mask, bootstrap, gamma, lam, rho_cap, c_cap};
    if (kind == kReturn)
        launch_scan<kReturn>(in, segments, num_segments, advantage, target, stream);
    else if (kind == kGae)
        launch_scan<kGae>(in, segments, num_segments, advantage, target, stream);
    else
        launch_scan<kVtrace>(in, segments, num_segments, advantage, target, stream);
    return scope.launched();
}
