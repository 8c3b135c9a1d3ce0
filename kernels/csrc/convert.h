// Casts between float32, bfloat16 and float16 on bits: to nearest, ties to even, subnormals kept, NaNs quieted with
// their sign and upper payload. The processors' bfloat16 instructions flush subnormals, so they are not used.
//
// Included once per instruction set, inside that set's namespace, after simd.h.

HEADWAY_INLINE uint32_t load_u32(const void* p) {
    uint32_t x;
    __builtin_memcpy(&x, p, 4);
    return x;
}

HEADWAY_INLINE uint16_t load_u16(const void* p) {
    uint16_t x;
    __builtin_memcpy(&x, p, 2);
    return x;
}

HEADWAY_INLINE uint16_t bfloat16_bits(uint32_t x) {
    const uint32_t rounded = (x + 0x7FFFu + ((x >> 16) & 1u)) >> 16, quiet = (x >> 16) | 0x40u;
    return (uint16_t)((x & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

static inline uint16_t float16_bits(uint32_t x) {
    const uint32_t sign = (x >> 16) & 0x8000u, magnitude = x & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | ((x >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);  // rounds to 65536 or more
    if (magnitude < 0x33000000u) return (uint16_t)sign;               // below half of the least subnormal
    const uint32_t exponent = magnitude >> 23;
    // Normal: drop 13 bits. Subnormal: the mantissa with its leading bit, shifted to units of 2^-24.
    const uint32_t shift = exponent < 113 ? 126 - exponent : 13;
    const uint32_t value = exponent < 113 ? (magnitude & 0x7FFFFFu) | 0x800000u : magnitude - (112u << 23);
    const uint32_t half = 1u << (shift - 1), low = value & ((1u << shift) - 1);
    uint32_t kept = value >> shift;
    kept += low > half || (low == half && (kept & 1u));
    return (uint16_t)(sign | kept);
}

static inline uint32_t float32_bits_of_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3FFu;
    if (exponent == 31) return sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
    if (exponent) return sign | ((exponent + 112) << 23) | (mantissa << 13);
    if (!mantissa) return sign;
    const int lead = 31 - __builtin_clz(mantissa);
    return sign | (uint32_t)(lead + 103) << 23 | ((mantissa << (23 - lead)) & 0x7FFFFFu);
}

// One value as the bits of float32, and back to `target`.
HEADWAY_INLINE uint32_t widen_bits(int32_t type, const void* p) {
    if (type == FLOAT32) return load_u32(p);
    return type == BFLOAT16 ? (uint32_t)load_u16(p) << 16 : float32_bits_of_half(load_u16(p));
}

HEADWAY_INLINE uint32_t narrow_bits(int32_t type, uint32_t x) {
    if (type == FLOAT32) return x;
    return type == BFLOAT16 ? bfloat16_bits(x) : float16_bits(x);
}

#if defined(__AVX512F__)
// The lower 16 bits of every lane of low, then of high.
HEADWAY_INLINE __m512i join_words(__m512i low, __m512i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
}

HEADWAY_INLINE __m512i bfloat16_lanes(__m512i x) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(x), _mm512_castsi512_ps(x), _CMP_UNORD_Q);
    return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, x, _mm512_set1_epi32(0x400000)), 16);
}

// 32 floats to 32 values of 16 bits.
template <int target>
HEADWAY_INLINE __m512i narrow_vector(const float* p) {
    const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 16);
    if (target == BFLOAT16) return join_words(bfloat16_lanes(a), bfloat16_lanes(b));
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtps_ph(_mm512_castsi512_ps(a), _MM_FROUND_TO_NEAREST_INT)),
        _mm512_cvtps_ph(_mm512_castsi512_ps(b), _MM_FROUND_TO_NEAREST_INT), 1);
}
#elif defined(__AVX2__)
HEADWAY_INLINE __m256i bfloat16_lanes(__m256i x) {
    const __m256i high = _mm256_srli_epi32(x, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const __m256 value = _mm256_castsi256_ps(x);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}

// 16 floats to 16 values of 16 bits.
template <int target>
HEADWAY_INLINE __m256i narrow_vector(const float* p) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 8));
    if (target == BFLOAT16)
        return _mm256_permute4x64_epi64(_mm256_packus_epi32(bfloat16_lanes(a), bfloat16_lanes(b)), 0xD8);
    return _mm256_set_m128i(_mm256_cvtps_ph(_mm256_castsi256_ps(b), _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(_mm256_castsi256_ps(a), _MM_FROUND_TO_NEAREST_INT));
}
#endif

// Casts `count` values, any dtypes.
static void cast_values(int32_t source_type, int32_t target, const void* source, void* out, int64_t count) {
    const uint8_t* in = (const uint8_t*)source;
    uint8_t* to = (uint8_t*)out;
    const int64_t in_bytes = value_bytes(source_type), out_bytes = value_bytes(target);
    if (source_type == target) {
        __builtin_memcpy(out, source, (count * in_bytes));
        return;
    }
    int64_t i = 0;
#if defined(__AVX2__)
    if (source_type == FLOAT32) {
        constexpr int64_t step = (int64_t)sizeof(narrow_vector<BFLOAT16>(nullptr)) / 2;
        for (; i + step <= count; i += step) {
            const float* p = (const float*)(in + 4 * i);
            const auto v = target == BFLOAT16 ? narrow_vector<BFLOAT16>(p) : narrow_vector<FLOAT16>(p);
            __builtin_memcpy(to + 2 * i, &v, sizeof v);
        }
    } else if (target == FLOAT32) {
        for (; i + 8 <= count; i += 8) {
            const __m128i h = _mm_loadu_si128((const __m128i*)(in + 2 * i));
            const __m256i w = source_type == BFLOAT16 ? _mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)
                                                      : _mm256_castps_si256(_mm256_cvtph_ps(h));
            _mm256_storeu_si256((__m256i*)(to + 4 * i), w);
        }
    }
#endif
    for (; i < count; i++) {
        const uint32_t bits = narrow_bits(target, widen_bits(source_type, in + i * in_bytes));
        __builtin_memcpy(to + i * out_bytes, &bits, out_bytes);
    }
}
