// Conversions between storage formats on bit patterns: the same integers on every compiler and device.
//
// Round to nearest, ties to even, subnormals included. A NaN keeps its sign and the upper bits of its payload and
// becomes quiet, as in delta_reference.py. The hardware's conversions differ in what they make of a NaN.
#pragma once

#include "device.h"

namespace headway {

// The dtype codes of the C interface and of delta_format.DTYPE_CODES.
enum Dtype : int { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

HEADWAY_INLINE int64_t dtype_bytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

HEADWAY_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

HEADWAY_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

HEADWAY_INLINE bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

HEADWAY_INLINE uint16_t bfloat16_from_bits(uint32_t bits) {
    if (is_nan_bits(bits)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// `value` shifted right by 0 < `shift` <= 31, the lost bits rounded to the nearest, ties to even.
HEADWAY_INLINE uint32_t round_shift(uint32_t value, uint32_t shift) {
    uint32_t kept = value >> shift;
    uint32_t lost = value & ((1u << shift) - 1u);
    uint32_t half = 1u << (shift - 1u);
    return kept + ((lost > half || (lost == half && (kept & 1u))) ? 1u : 0u);
}

HEADWAY_INLINE uint16_t float16_from_bits(uint32_t bits) {
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((bits >> 13) & 0x3ffu);
    } else if (magnitude >= 0x47800000u) {  // 65536 and above, infinity
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // normal in float16; rounding may carry into the exponent
        half = round_shift(magnitude - 0x38000000u, 13);
    } else if (magnitude >= 0x33000000u) {  // from half of the smallest subnormal on
        uint32_t exponent = magnitude >> 23;
        half = round_shift((magnitude & 0x7fffffu) | 0x800000u, 126u - exponent);
    } else {
        half = 0;
    }
    return static_cast<uint16_t>(sign | half);
}

HEADWAY_INLINE uint32_t bits_from_bfloat16(uint16_t half) { return static_cast<uint32_t>(half) << 16; }

HEADWAY_INLINE uint32_t bits_from_float16(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1fu;
    uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0x1fu) return sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
    if (exponent) return sign | ((exponent + 112u) << 23) | (mantissa << 13);
    return sign | bits_of(static_cast<float>(mantissa) * 5.9604644775390625e-8f);  // 2^-24: exact
}

// float8 e4m3 (bias 7, largest 448, no infinity, 0x7f a NaN): nearest, ties to even; too large becomes +-448.
HEADWAY_INLINE uint8_t float8_from_float(float value) {
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t code;
    if (magnitude > 0x7f800000u) {
        code = 0x7fu;
    } else if (magnitude >= 0x43e80000u) {  // 464, half way to what would follow 448, and above
        code = 0x7eu;
    } else if (magnitude >= 0x3c800000u) {  // 2^-6, the smallest normal
        code = round_shift(magnitude - 0x3c000000u, 20);
    } else if (magnitude >= 0x3a800000u) {  // from half of the smallest subnormal, 2^-9, on
        uint32_t exponent = magnitude >> 23;
        code = round_shift((magnitude & 0x7fffffu) | 0x800000u, 141u - exponent);
    } else {
        code = 0;
    }
    return static_cast<uint8_t>(sign | min_of(code, magnitude > 0x7f800000u ? 0x7fu : 0x7eu));
}

// Bits of one value in another dtype, in the low bits of the result.
HEADWAY_INLINE uint32_t cast_bits(uint32_t bits, int source, int target) {
    if (source == target) return bits;
    uint32_t wide = bits;
    if (source == kBfloat16) wide = bits_from_bfloat16(static_cast<uint16_t>(bits));
    if (source == kFloat16) wide = bits_from_float16(static_cast<uint16_t>(bits));
    if (target == kBfloat16) return bfloat16_from_bits(wide);
    if (target == kFloat16) return float16_from_bits(wide);
    return wide;
}

HEADWAY_INLINE uint32_t load_bits(const void* base, int64_t index, int dtype) {
    if (dtype == kFloat32) return static_cast<const uint32_t*>(base)[index];
    return static_cast<const uint16_t*>(base)[index];
}

HEADWAY_INLINE void store_bits(void* base, int64_t index, int dtype, uint32_t bits) {
    if (dtype == kFloat32)
        static_cast<uint32_t*>(base)[index] = bits;
    else
        static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(bits);
}

}  // namespace headway
