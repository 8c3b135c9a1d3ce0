// Vectors of float as the compiler's own vector extension, so that one source serves every instruction set.
//
// Included once per instruction set, inside that set's namespace; HEADWAY_LANES is the number of floats in a vector.
// No standard-library templates here: an inline instantiation compiled for AVX-512 could replace the portable one at
// link time.

constexpr int LANES = HEADWAY_LANES;
typedef float Vec __attribute__((vector_size(HEADWAY_LANES * 4)));
typedef int32_t IVec __attribute__((vector_size(HEADWAY_LANES * 4)));

constexpr double LOG2E = 1.4426950408889634;

#define HEADWAY_INLINE static inline __attribute__((always_inline))

HEADWAY_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

HEADWAY_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

HEADWAY_INLINE Vec splat(float x) { return x - (Vec){}; }

// A NaN in b survives: b is what the comparison falls back to.
HEADWAY_INLINE Vec max_keep_nan(Vec a, Vec b) { return a > b ? a : b; }

// 2^x for x <= 127, relative error below 2e-7; 0 for x < -126.5, -inf included; NaN stays NaN.
HEADWAY_INLINE Vec exp2_vec(Vec x) {
    x = max_keep_nan(splat(-127.0f), x);
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const Vec shifted = x + magic;
    const Vec f = x - (shifted - magic);
    const IVec n = (IVec)shifted - (IVec)magic;
    Vec p = splat(1.326472889000076e-3f);
    p = p * f + splat(9.671513636504188e-3f);
    p = p * f + splat(5.550733748323529e-2f);
    p = p * f + splat(2.402224207020393e-1f);
    p = p * f + splat(6.931469775906171e-1f);
    p = p * f + splat(1.0f);
    return p * (Vec)((n + 127) << 23);
}

HEADWAY_INLINE float reduce_add(Vec v) {
    float s = 0.0f;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

HEADWAY_INLINE float reduce_max_keep_nan(Vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = (m > v[i] || m != m) ? m : v[i];
    return m;
}

// out[i] = sum of the lanes of v[i].
HEADWAY_INLINE void reduce_eight(const Vec* v, float* out) {
#if HEADWAY_LANES >= 8 && defined(__AVX2__)
    __m256 h[8];
    for (int i = 0; i < 8; i++) {
#if HEADWAY_LANES == 16
        const __m512 z = (__m512)v[i];
        h[i] = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
#else
        h[i] = (__m256)v[i];
#endif
    }
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(h[4], h[5]), _mm256_hadd_ps(h[6], h[7]));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
    for (int i = 0; i < 8; i++) out[i] = reduce_add(v[i]);
#endif
}
