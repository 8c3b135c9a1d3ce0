// Sums over the threads of a block in a fixed order: the same bits in every run, whatever else the device does.
#pragma once

#include "device.h"

namespace headway {

// Sum over the warp, in every lane.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(kAllLanes, value, step);
    return value;
}

// Sum over the lanes below this one.
template <class T>
__device__ __forceinline__ T warp_exclusive_sum(T value) {
    int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    T sum = value;
    for (int step = 1; step < kWarpSize; step <<= 1) {
        T below = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(step));
        if (lane >= step) sum += below;
    }
    return sum - value;
}

// Sum over the threads below this one, and over all of them in `total`. Integers only: it subtracts.
// Every thread must call it; warp_sums[THREADS / 32] is shared and free again when it returns.
template <int THREADS, class T, class Array>
__device__ __forceinline__ T block_exclusive_sum(T value, T& total, Array& warp_sums) {
    int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
    T before = warp_exclusive_sum(value);
    if (lane == kWarpSize - 1) warp_sums[warp] = before + value;
    __syncthreads();
    T base = 0;
    total = 0;
    for (int i = 0; i < THREADS / kWarpSize; ++i) {
        T sum = warp_sums[i];
        if (i < warp) base += sum;
        total += sum;
    }
    __syncthreads();
    return base + before;
}

}  // namespace headway
