// What the library says of itself: interface number, devices, messages.
#include "device.h"
#include "headway_cuda.h"

using namespace headway;

int headway_cuda_abi(void) { return HEADWAY_CUDA_ABI; }

int headway_cuda_is_emulated(void) {
#if defined(__CUDACC__)
    return 0;
#else
    return 1;
#endif
}

int headway_cuda_num_devices(void) {
#if defined(__CUDACC__)
    int count = 0;
    int code = static_cast<int>(cudaGetDeviceCount(&count));
    cudaGetLastError();  // a machine without a device must not fail the next launch check
    return code ? -code : count;
#else
    return 1;
#endif
}

const char* headway_cuda_message(int code) {
    if (code == kInvalidArgument) return "invalid argument";
#if defined(__CUDACC__)
    return cudaGetErrorString(static_cast<cudaError_t>(code));
#else
    return emulator::last_fault().c_str();
#endif
}
