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

static void pack_transposed(int32_t dtype, const void* w, int64_t stride, int64_t count, int64_t size, float* out) {
    constexpr int64_t step = 16;
    const int64_t bytes = value_bytes(dtype);
    float part[HEAD_COLUMNS * step];
    for (int64_t j = 0; j < count; j += HEAD_COLUMNS, out += size * HEAD_COLUMNS) {
        const int64_t width = count - j < HEAD_COLUMNS ? count - j : HEAD_COLUMNS;
        for (int64_t i = width * step; i < HEAD_COLUMNS * step; i++) part[i] = 0.0f;
        for (int64_t k = 0; k < size; k += step) {
            const int64_t depth = size - k < step ? size - k : step;
            for (int64_t i = 0; i < width; i++)
                cast_values(dtype, FLOAT32, (const uint8_t*)w + ((j + i) * stride + k) * bytes, part + i * step, depth);
            float* to = out + k * HEAD_COLUMNS;
            for (int64_t d = 0; d < depth; d++)
                for (int64_t i = 0; i < HEAD_COLUMNS; i++) to[d * HEAD_COLUMNS + i] = part[i * step + d];
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
                              int64_t c_stride, bool accumulate) {
    for (int64_t j = 0; j < width; j += HEAD_COLUMNS, b += size * HEAD_COLUMNS) {
        if (width - j >= HEAD_COLUMNS) {
            gemm_block<rows, 2, order>(size, a, stride, b, HEAD_COLUMNS, c + j, c_stride, accumulate);
            continue;
        }
        float edge[rows * HEAD_COLUMNS] = {};
        for (int64_t i = 0; accumulate && i < rows; i++)
            for (int64_t n = 0; n < width - j; n++) edge[i * HEAD_COLUMNS + n] = c[i * c_stride + j + n];
        gemm_block<rows, 2, order>(size, a, stride, b, HEAD_COLUMNS, edge, HEAD_COLUMNS, accumulate);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t n = 0; n < width - j; n++) c[i * c_stride + j + n] = edge[i * HEAD_COLUMNS + n];
    }
}

template <Order order>
HEADWAY_INLINE void head_rows(int64_t count, int64_t size, const float* a, int64_t stride, const float* b, int64_t width,
                       float* c, int64_t c_stride, bool accumulate) {
#define HEADWAY_ROWS(n) \
    case n: head_tile<n, order>(size, a, stride, b, width, c, c_stride, accumulate); break;
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
                          int64_t width, float* c, int64_t c_stride, bool accumulate) {
    if (packed)
        head_rows<Order::ColumnsOfA>(count, size, a, HEAD_ROWS, b, width, c, c_stride, accumulate);
    else
        head_rows<Order::RowsOfA>(count, size, a, stride, b, width, c, c_stride, accumulate);
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
    if (keep) __builtin_memcpy(keep, products, sizeof(float) * count);
    if (capped)
        for (int64_t i = 0; i < padded; i += LANES)
            store(products + i, cap * tanh_vec(load(products + i) * shrink).value * inverse);
    for (int64_t i = count; i < padded; i++) products[i] = -__builtin_inff();
    if (target >= 0) {
        *picked = products[target];
        products[target] = -__builtin_inff();
    }
    Vec tops = splat(-__builtin_inff());
    for (int64_t i = 0; i < padded; i += LANES) {
        const Vec v = load(products + i);
        tops = v > tops ? v : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    if (top == -__builtin_inff()) top = 0.0f;  // nothing but -inf, or NaNs, which the sums keep
    const Vec at = splat(top), lowest = splat(LOWEST), log2e = splat((float)LOG2E);
    Vec sums = {}, dots = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        const Vec d = max_keep_nan(lowest, load(products + i) - at), e = exp2_vec(d * log2e);
        sums += e;
        dots += d * e;
    }
    return {top, reduce_add(sums), reduce_add(dots)};
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

static void add_row(const float* values, int64_t count, float* sums) {
    for (int64_t i = 0; i < count; i++) sums[i] += values[i];
}

static constexpr HeadKernels head_kernels = {
    HEAD_ROWS, HEAD_COLUMNS, pack_rows, pack_transposed, pack_plain, head_multiply, score_row, differentiate_row,
    add_row,
};
