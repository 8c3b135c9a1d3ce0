// What pack_cast.cpp asks of an instruction set: fp8 e4m3 codes of a run of values.
#pragma once

#include <cstdint>

namespace headway {

struct PackKernels {
    // The largest |value|; infinity if there is a NaN.
    float (*largest)(const float* values, int64_t count);
    // codes[i] = e4m3 of values[i] / divisor * factor, one of the two being 1: nearest, ties to even, at most 448.
    void (*encode)(const float* values, int64_t count, float divisor, float factor, uint8_t* codes);
};

}  // namespace headway
