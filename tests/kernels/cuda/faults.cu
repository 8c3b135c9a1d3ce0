// Kernels with one planted fault each, and a sound one: what the emulator must and must not report.
#include "device.h"

namespace headway {
namespace {

constexpr int kThreads = 64;

enum Fault : int {
    kSound,
    kMissingBarrier,
    kMissingWarpSync,
    kReadThenWrite,
    kLeftBeforeBarrier,
    kTwoBarriers,
    kHalfWarpShuffles,
    kSharedOutOfBounds,
    kNeverWritten,
    kGlobalOutOfBounds,
    kForgottenReader,
};

// Warp 1 reads, lanes of warp 0 read again and again behind warp collectives, then warp 0 writes: one race, with warp 1.
__global__ void forgotten_reader(int* data) {
    HEADWAY_SHARED(int, staged, 1);
    int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) staged[0] = 7;
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < (thread < kWarpSize ? 4 : 1); ++i) {
        sum += staged[0];
        __syncwarp();
    }
    if (thread < kWarpSize) __syncwarp();
    if (thread == 1) staged[0] = sum;
    data[thread] = sum;
}

__global__ void reverse(int fault, int* data) {
    HEADWAY_SHARED(int, staged, kThreads);
    int thread = static_cast<int>(threadIdx.x);
    if (fault != kNeverWritten || thread != 3) staged[thread] = data[thread];
    if (fault == kLeftBeforeBarrier && thread == 5) return;
    if (fault == kTwoBarriers && thread < kWarpSize) {
        __syncthreads();
    } else if (fault == kMissingWarpSync) {
        data[thread] = staged[thread ^ 1];
        return;
    } else if (fault != kMissingBarrier) {
        __syncthreads();
    }
    if (fault == kHalfWarpShuffles && thread % 2) return;
    int sum = __shfl_xor_sync(kAllLanes, thread, 1);
    int from = kThreads - 1 - thread + (fault == kSharedOutOfBounds && thread == 7 ? kThreads : 0);
    int value = staged[from];
    if (fault == kReadThenWrite) staged[thread] = sum;
    data[thread + (fault == kGlobalOutOfBounds ? kThreads : 0)] = value;
}

}  // namespace
}  // namespace headway

using namespace headway;

// 0, or kEmulatorFault; headway_fault_message says what.
extern "C" __attribute__((visibility("default"))) int headway_fault(int fault, int* data) {
    DeviceScope scope(0);
    if (fault == kForgottenReader)
        HEADWAY_LAUNCH(forgotten_reader, 1, kThreads, nullptr, data);
    else
        HEADWAY_LAUNCH(reverse, 1, kThreads, nullptr, fault, data);
    return scope.launched();
}

extern "C" __attribute__((visibility("default"))) const char* headway_fault_message() {
    return emulator::last_fault().c_str();
}
