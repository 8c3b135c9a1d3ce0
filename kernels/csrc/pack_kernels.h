// fp8 e4m3 codes: bias 7, largest 448, no infinity, 0x7f a NaN. pack_task.h says what each function does.
//
// Included once per instruction set, inside that set's namespace, after simd.h.

static float largest_value(const float* values, int64_t count) {
    const IVec infinity = (IVec)splat(__builtin_inff());
    IVec most = {};
    int64_t i = 0;
    // As integers: magnitudes order like the floats, and a NaN is above infinity.
    for (; i + LANES <= count; i += LANES) {
        const IVec m = (IVec)load(values + i) & 0x7FFFFFFF;
        most = m > most ? m : most;
    }
    int32_t top = 0;
    for (int l = 0; l < LANES; l++) top = most[l] > top ? most[l] : top;
    for (; i < count; i++) {
        int32_t m;
        __builtin_memcpy(&m, values + i, 4);
        m &= 0x7FFFFFFF;
        top = m > top ? m : top;
    }
    top = top > infinity[0] ? infinity[0] : top;
    float result;
    __builtin_memcpy(&result, &top, 4);
    return result;
}

HEADWAY_INLINE IVec float8_lanes(Vec x) {
    const IVec bits = (IVec)x, sign = (bits >> 24) & 0x80, magnitude = bits & 0x7FFFFFFF;
    const IVec odd = (magnitude >> 20) & 1;
    const IVec normal = (magnitude - 0x3C000000 + 0x7FFFF + odd) >> 20;
    // Below 2^-6 codes count units of 2^-9: adding 1.5 * 2^14 rounds to them, the unit of that sum's last place.
    const Vec shift = splat(24576.0f);
    const IVec subnormal = (IVec)((Vec)magnitude + shift) - (IVec)shift;
    IVec code = magnitude < 0x3C800000 ? subnormal : normal;
    code = magnitude >= 0x43E80000 ? (IVec){} + 0x7E : code;
    // One NaN code: the sign of a NaN that arithmetic made depends on the order of its operands.
    return magnitude > 0x7F800000 ? (IVec){} + 0x7F : code | sign;
}

static void encode_float8(const float* values, int64_t count, float divisor, float factor, uint8_t* codes) {
    const Vec divide = splat(divisor), multiply = splat(factor);
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i < LANES ? count - i : LANES;
        float part[LANES] = {};
        for (int64_t l = 0; l < left && left < LANES; l++) part[l] = values[i + l];
        const Vec x = load(left < LANES ? part : values + i);
        const IVec code = float8_lanes(divisor == 1.0f ? x * multiply : x / divide);
        uint8_t bytes[LANES];
        for (int l = 0; l < LANES; l++) bytes[l] = (uint8_t)code[l];
        __builtin_memcpy(codes + i, bytes, left);
    }
}

static constexpr PackKernels pack_kernels = {largest_value, encode_float8};
