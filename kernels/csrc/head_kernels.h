// The head's products and row passes; head_task.h says what each function does.
//
// Included once per instruction set, inside that set's namespace, after gemm.h and convert.h.

constexpr int64_t HEAD_ROWS = LANES == 16 ? 14 : LANES == 8 ? 6 : 4;
constexpr int64_t HEAD_COLUMNS = 2 * LANES;
constexpr float LOWEST = -1e4f;  // a finite stand-in for -inf - top: its exponential is 0, and 0 times it is no NaN

static void pack_rows(const float* x, int64_t stride, int64_t count, int64_t size, float* out) {
    for (int64_t k = 0; k < size; k++)
        for (int64_t i = 0; i < HEAD_ROWS; i++) out[k * HEAD_ROWS + i] = i < count ? x[i * stride + k] : 0.0f;
}

// out[k HEAD_COLUMNS + i] = rows[i stride + k], i < LANES, k < LANES.
HEADWAY_INLINE void transpose_block(const float* rows, int64_t stride, float* out) {
#if defined(__AVX512F__)
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
    // a[4 q + c]: rows 4 q .. 4 q + 3 of columns c, c + 4, c + 8, c + 12.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
        const __m512 high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xDD);
        const __m512 odd_high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xDD);
        _mm512_storeu_ps(out + c * HEAD_COLUMNS, _mm512_shuffle_f32x4(low, high, 0x88));
        _mm512_storeu_ps(out + (c + 8) * HEAD_COLUMNS, _mm512_shuffle_f32x4(low, high, 0xDD));
        _mm512_storeu_ps(out + (c + 4) * HEAD_COLUMNS, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_ps(out + (c + 12) * HEAD_COLUMNS, _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD));
    }
#elif defined(__AVX2__)
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(out + c * HEAD_COLUMNS, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
        _mm256_storeu_ps(out + (c + 4) * HEAD_COLUMNS, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
    }
#else
    for (int k = 0; k < LANES; k++)
        for (int i = 0; i < LANES; i++) out[k * HEAD_COLUMNS + i] = rows[i * stride + k];
#endif
}

static void pack_transposed(int32_t dtype, const void* w, int64_t stride, int64_t count, int64_t size, float* out) {
    const int64_t bytes = value_bytes(dtype);
    float part[HEAD_COLUMNS * LANES];  // LANES columns of the panel's rows, cast
    for (int64_t j = 0; j < count; j += HEAD_COLUMNS, out += size * HEAD_COLUMNS) {
        const int64_t width = count - j < HEAD_COLUMNS ? count - j : HEAD_COLUMNS;
        for (int64_t i = width * LANES; i < HEAD_COLUMNS * LANES; i++) part[i] = 0.0f;
        for (int64_t k = 0; k < size; k += LANES) {
            float* to = out + k * HEAD_COLUMNS;
            const int64_t depth = size - k < LANES ? size - k : LANES;
            if (dtype == FLOAT32 && width == HEAD_COLUMNS && depth == LANES) {
                const float* from = (const float*)w + j * stride + k;
                transpose_block(from, stride, to);
                transpose_block(from + LANES * stride, stride, to + LANES);
                continue;
            }
            const uint8_t* from = (const uint8_t*)w + (j * stride + k) * bytes;
            for (int64_t i = 0; i < width; i++)
                cast_values(dtype, FLOAT32, from + i * stride * bytes, part + i * LANES, depth);
            if (depth == LANES) {
                transpose_block(part, LANES, to);
                transpose_block(part + LANES * LANES, LANES, to + LANES);
                continue;
            }
            for (int64_t d = 0; d < depth; d++)
                for (int64_t i = 0; i < HEAD_COLUMNS; i++) to[d * HEAD_COLUMNS + i] = part[i * LANES + d];
        }
    }
}

static void pack_plain(int32_t dtype, const void* w, int64_t stride, int64_t count, int64_t size, float* out) {
    const int64_t bytes = value_bytes(dtype);
    for (int64_t j = 0; j < count; j += HEAD_COLUMNS, out += size * HEAD_COLUMNS) {
        const int64_t width = count - j < HEAD_COLUMNS ? count - j : HEAD_COLUMNS;
        const uint8_t* from = (const uint8_t*)w + j * bytes;
        for (int64_t k = 0; k < size; k++, from += stride * bytes) {
            float* to = out + k * HEAD_COLUMNS;
            if (dtype == FLOAT32 && width == HEAD_COLUMNS) {
                __builtin_memcpy(to, from, sizeof(float) * HEAD_COLUMNS);
                continue;
            }
            cast_values(dtype, FLOAT32, from, to, width);
            for (int64_t i = width; i < HEAD_COLUMNS; i++) to[i] = 0.0f;
        }
    }
}

template <int rows, Order order>
HEADWAY_INLINE void head_tile(int64_t size, const float* a, int64_t stride, const float* b, int64_t width, float* c,
                              int64_t c_stride, bool add) {
    for (int64_t j = 0; j < width; j += HEAD_COLUMNS, b += size * HEAD_COLUMNS) {
        if (width - j >= HEAD_COLUMNS) {
            gemm_block<rows, 2, order>(size, a, stride, b, HEAD_COLUMNS, c + j, c_stride, false, add);
            continue;
        }
        float edge[rows * HEAD_COLUMNS];
        gemm_block<rows, 2, order>(size, a, stride, b, HEAD_COLUMNS, edge, HEAD_COLUMNS, false);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t n = 0; n < width - j; n++) {
                float* to = c + i * c_stride + j + n;
                *to = edge[i * HEAD_COLUMNS + n] + (add ? *to : 0.0f);
            }
    }
}

template <Order order>
HEADWAY_INLINE void head_rows(int64_t count, int64_t size, const float* a, int64_t stride, const float* b,
                              int64_t width, float* c, int64_t c_stride, bool add) {
#define HEADWAY_ROWS(n) \
    case n: head_tile<n, order>(size, a, stride, b, width, c, c_stride, add); break;
    switch (count) {
        HEADWAY_ROWS(1)
        HEADWAY_ROWS(2)
        HEADWAY_ROWS(3)
        HEADWAY_ROWS(4)
#if HEADWAY_LANES >= 8
        HEADWAY_ROWS(5)
        HEADWAY_ROWS(6)
#endif
#if HEADWAY_LANES == 16
        HEADWAY_ROWS(7)
        HEADWAY_ROWS(8)
        HEADWAY_ROWS(9)
        HEADWAY_ROWS(10)
        HEADWAY_ROWS(11)
        HEADWAY_ROWS(12)
        HEADWAY_ROWS(13)
        HEADWAY_ROWS(14)
#endif
    }
#undef HEADWAY_ROWS
}

static void head_multiply(bool packed, int64_t count, int64_t size, const float* a, int64_t stride, const float* b,
                          int64_t width, float* c, int64_t c_stride, bool add) {
    if (packed)
        head_rows<Order::ColumnsOfA>(count, size, a, HEAD_ROWS, b, width, c, c_stride, add);
    else
        head_rows<Order::RowsOfA>(count, size, a, stride, b, width, c, c_stride, add);
}

// tanh and its slope 1 - tanh^2, both to a few units in the last place, also near 0 and where tanh is almost 1.
struct Tanh {
    Vec value, slope;
};

HEADWAY_INLINE Tanh tanh_vec(Vec y) {
    const Vec positive = y < 0.0f ? -y : y;
    const Vec e = exp2_vec(positive * splat((float)(-2.0 * LOG2E)));
    const Vec one = splat(1.0f), inverse = one / (one + e);
    const Vec large = (one - e) * inverse, square = y * y;
    Vec p = splat(62.0f / 2835.0f);
    p = p * square + splat(-17.0f / 315.0f);
    p = p * square + splat(2.0f / 15.0f);
    p = p * square + splat(-1.0f / 3.0f);
    const Vec small = y + y * (square * p);
    // A NaN takes the first branch and stays one.
    return {positive >= 0.25f ? (y < 0.0f ? -large : large) : small, splat(4.0f) * e * inverse * inverse};
}

// The larger; the second if the first is a NaN.
HEADWAY_INLINE Vec max_number(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

HEADWAY_INLINE float reduce_max(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

// A copy past the caches: the chunk that it goes to is larger than they are, and is read much later.
HEADWAY_INLINE void stream_row(const float* from, int64_t count, float* to) {
    int64_t i = 0;
#if defined(__AVX512F__)
    if (((uintptr_t)to & 63) == 0)
        for (; i + LANES <= count; i += LANES) _mm512_stream_ps(to + i, (__m512)load(from + i));
#elif defined(__AVX2__)
    if (((uintptr_t)to & 31) == 0)
        for (; i + LANES <= count; i += LANES) _mm256_stream_ps(to + i, (__m256)load(from + i));
#endif
    __builtin_memcpy(to + i, from + i, sizeof(float) * (count - i));
}

static RowSums score_row(float* products, int64_t count, const float* bias, const LogitChain& chain, float* keep,
                         int64_t target, float* picked) {
    const Vec factor = splat(chain.factor), cap = splat(chain.softcap), shrink = splat(1.0f / chain.softcap);
    const Vec inverse = splat(chain.inv_temperature);
    const bool capped = chain.softcap != 0.0f;
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; i < padded; i += LANES) {
        Vec v = load(products + i);
        if (bias) v += load(bias + i);
        store(products + i, v * factor);
    }
    if (keep) stream_row(products, count, keep);
    if (capped)
        for (int64_t i = 0; i < padded; i += LANES)
            store(products + i, cap * tanh_vec(load(products + i) * shrink).value * inverse);
    for (int64_t i = count; i < padded; i++) products[i] = -__builtin_inff();
    if (target >= 0) {
        *picked = products[target];
        products[target] = -__builtin_inff();
    }
    Vec tops = splat(-__builtin_inff());
    for (int64_t i = 0; i < padded; i += LANES) tops = max_number(load(products + i), tops);
    float top = reduce_max(tops);
    if (top == -__builtin_inff()) top = 0.0f;  // nothing but -inf, or NaNs, which the sums keep
    const Vec at = splat(top), lowest = splat(LOWEST), log2e = splat((float)LOG2E);
    Vec sums = {}, dots = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        const Vec d = max_keep_nan(lowest, load(products + i) - at), e = exp2_vec(d * log2e);
        sums += e;
        dots += d * e;
    }
    const Vec both[8] = {sums, dots};
    float totals[8];
    reduce_eight(both, totals);
    return {top, totals[0], totals[1]};
}

static void differentiate_row(const float* kept, int64_t count, const LogitChain& chain, const RowSlope& slope,
                              float* out) {
    const Vec cap = splat(chain.softcap * chain.inv_temperature), shrink = splat(1.0f / chain.softcap);
    const Vec top = splat(slope.top), alpha = splat(slope.alpha), beta = splat(slope.beta);
    const Vec lowest = splat(LOWEST), log2e = splat((float)LOG2E);
    const bool capped = chain.softcap != 0.0f;
    for (int64_t i = 0; i < count; i += LANES) {
        float edge[LANES] = {};
        const bool whole = i + LANES <= count;
        if (!whole)
            for (int64_t n = i; n < count; n++) edge[n - i] = kept[n];
        Vec z = load(whole ? kept + i : edge), bend = splat(1.0f);
        if (capped) {
            const Tanh t = tanh_vec(z * shrink);
            z = cap * t.value;
            bend = t.slope;
        }
        const Vec d = max_keep_nan(lowest, z - top);
        const Vec g = exp2_vec(d * log2e) * (alpha + beta * d) * bend;
        store(whole ? out + i : edge, g);
        if (!whole)
            for (int64_t n = i; n < count; n++) out[n] = edge[n - i];
    }
}

static void spread_row(const float* row, int64_t num_panels, int64_t panel_floats, float* out) {
    for (int64_t p = 0; p < num_panels; p++)
        __builtin_memcpy(out + p * panel_floats, row + p * HEAD_ROWS, sizeof(float) * HEAD_ROWS);
}

static void add_row(const float* values, int64_t count, float* sums) {
    for (int64_t i = 0; i < count; i++) sums[i] += values[i];
}

static constexpr HeadKernels head_kernels = {
    HEAD_ROWS,         HEAD_COLUMNS, pack_rows, pack_transposed, pack_plain, head_multiply, score_row,
    differentiate_row, spread_row,   add_row,
};
