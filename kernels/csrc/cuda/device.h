// What a .cu source of this folder needs from its compiler: nvcc, or any C++17 compiler through emulator.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

// Arrays of one block: read and written by element only, so that the emulator can watch them.
#define HEADWAY_SHARED(type, name, count) __shared__ type name[count]

#define HEADWAY_LAUNCH(kernel, num_blocks, num_threads, stream, ...) \
    kernel<<<(num_blocks), (num_threads), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

#define HEADWAY_INLINE __host__ __device__ __forceinline__
#else
#include "emulator.h"

#define HEADWAY_SHARED(type, name, count)  \
    static const char name##_site = 0;     \
    headway::emulator::Shared<type> name(&name##_site, #name, count)

#define HEADWAY_LAUNCH(kernel, num_blocks, num_threads, stream, ...)                                             \
    ((void)(stream), headway::emulator::launch(dim3{static_cast<unsigned>(num_blocks), 1, 1}, (num_threads), [=] { \
        kernel(__VA_ARGS__);                                                                                     \
    }))

#define HEADWAY_INLINE inline
#endif

namespace headway {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Return codes of the C functions: 0, a positive cudaError_t, or one of these.
constexpr int kInvalidArgument = -1;
constexpr int kEmulatorFault = -2;

// The largest number of blocks of a launch; kernels that may need more step by gridDim.x.
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

// Makes `device` the current one, and the caller's again at the end of the scope.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
#if defined(__CUDACC__)
        code_ = static_cast<int>(cudaGetDevice(&previous_));
        if (code_ == 0 && previous_ != device) code_ = static_cast<int>(cudaSetDevice(device));
        changed_ = code_ == 0 && previous_ != device;
#else
        code_ = device == 0 ? 0 : kInvalidArgument;
        emulator::last_fault().clear();
#endif
    }
    ~DeviceScope() {
#if defined(__CUDACC__)
        if (changed_) cudaSetDevice(previous_);
#endif
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

    // Not 0: nothing may be launched.
    int code() const { return code_; }

    // The outcome of the launches since the scope began.
    int launched() const {
#if defined(__CUDACC__)
        return static_cast<int>(cudaGetLastError());
#else
        return emulator::last_fault().empty() ? 0 : kEmulatorFault;
#endif
    }

  private:
    int code_ = 0;
#if defined(__CUDACC__)
    int previous_ = 0;
    bool changed_ = false;
#endif
};

template <class T>
HEADWAY_INLINE T min_of(T a, T b) {
    return b < a ? b : a;
}

template <class T>
HEADWAY_INLINE T max_of(T a, T b) {
    return a < b ? b : a;
}

HEADWAY_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Comparisons that a NaN fails, so that it stays: min and max of the standard would drop it.
HEADWAY_INLINE float clamp_keeping_nan(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

HEADWAY_INLINE float cap_keeping_nan(float x, float cap) { return x > cap ? cap : x; }

HEADWAY_INLINE bool is_finite(float x) { return x - x == 0.0f; }

// exp(20) = 4.9e8: no ratio beyond it can be meant, and below it the guard changes no bit.
constexpr float kMaxExponent = 20.0f;

HEADWAY_INLINE float bounded_exp(float x) { return expf(clamp_keeping_nan(x, -kMaxExponent, kMaxExponent)); }

HEADWAY_INLINE bool is_aligned(const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace headway
