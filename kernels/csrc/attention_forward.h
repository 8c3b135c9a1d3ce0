// One tile of attention rows against all their keys: online softmax, scores kept as [key, row].
//
// Included once per instruction set, inside that set's namespace, after gemm.h. With keys along the first axis a
// softmax over keys is vertical: a vector holds one key's scores of LANES rows, and maxima and sums need no shuffles.
// Where a span has too few rows for that (decoding), scores are dot products over [row, key] instead. Both forms share
// the running maximum, the running sum and the output accumulator of each row. All exponents are base 2.

struct ForwardScratch {
    float *q_cols, *q_rows, *acc, *scores, *dot_scores, *k_pad, *v_pad, *max, *sum, *alpha;
    int64_t* limit;
};

HEADWAY_INLINE float minus_infinity() { return -__builtin_inff(); }

static ForwardScratch forward_scratch(const AttentionTask& task, float* base) {
    ForwardScratch s;
    const int64_t tile = TILE_ROWS * task.padded_dim;
    s.q_cols = base;
    s.q_rows = s.q_cols + tile;
    s.acc = s.q_rows + tile;
    s.scores = s.acc + tile;
    s.dot_scores = s.scores + KEY_BLOCK * TILE_ROWS;
    s.k_pad = s.dot_scores + 16 * (DOT_KEYS + 64);
    s.v_pad = s.k_pad + DOT_KEYS * task.padded_dim;
    s.max = s.v_pad + DOT_KEYS * task.padded_dim;
    s.sum = s.max + TILE_ROWS;
    s.alpha = s.sum + TILE_ROWS;
    s.limit = reinterpret_cast<int64_t*>(s.alpha + TILE_ROWS);
    return s;
}

HEADWAY_INLINE int64_t row_query(const AttentionTask& t, const Segment& seg, int64_t row) {
    return t.plan.query_start[seg.run] + (seg.row_start + row) / t.group;
}

HEADWAY_INLINE int64_t row_head(const AttentionTask& t, const Segment& seg, int64_t kv_head, int64_t row) {
    return kv_head * t.group + (seg.row_start + row) % t.group;
}

HEADWAY_INLINE float* row_of(const HeadwayView& v, int64_t token, int64_t head) {
    return v.data + token * v.token_stride + head * v.head_stride;
}

// Last causal key (counted from causal_start) that this row sees.
HEADWAY_INLINE int64_t row_limit(const AttentionTask& t, const Segment& seg, int64_t row) {
    return t.plan.causal_base[seg.run] + (seg.row_start + row) / t.group;
}

// Copies count rows of dim floats to dst with rows of padded_dim, zeros behind.
static void pad_rows(const float* src, int64_t stride, int64_t count, int64_t dim, int64_t padded_dim, float* dst) {
    for (int64_t i = 0; i < count; i++) {
        __builtin_memcpy(dst + i * padded_dim, src + i * stride, dim * sizeof(float));
        for (int64_t d = dim; d < padded_dim; d++) dst[i * padded_dim + d] = 0.0f;
    }
}

// dst[d * TILE_ROWS + row] = src[row * dim + d]
static void transpose_rows(const float* src, int64_t rows, int64_t dim, float* dst) {
    for (int64_t r0 = 0; r0 < rows; r0 += 8) {
        const int64_t n = rows - r0 < 8 ? rows - r0 : 8;
        for (int64_t d = 0; d < dim; d++)
            for (int64_t r = r0; r < r0 + n; r++) dst[d * TILE_ROWS + r] = src[r * dim + d];
    }
}

// q_rows[row] = query * factor for every row of the tile; rows that only pad are zero.
static void pack_rows(const AttentionTask& t, const Tile& tile, const HeadwayView& view, int64_t kv_head, float factor,
                      float* rows) {
    int64_t next = 0;
    for (int32_t i = 0; i < tile.num_segments; i++) {
        const Segment& seg = t.segments[tile.first_segment + i];
        for (; next < seg.tile_row; next++)
            for (int64_t d = 0; d < t.padded_dim; d++) rows[next * t.padded_dim + d] = 0.0f;
        for (int64_t r = 0; r < seg.num_rows; r++, next++) {
            const float* src = row_of(view, row_query(t, seg, r), row_head(t, seg, kv_head, r));
            float* dst = rows + next * t.padded_dim;
            for (int64_t d = 0; d < t.head_dim; d++) dst[d] = src[d] * factor;
            for (int64_t d = t.head_dim; d < t.padded_dim; d++) dst[d] = 0.0f;
        }
    }
    for (; next < tile.num_rows; next++)
        for (int64_t d = 0; d < t.padded_dim; d++) rows[next * t.padded_dim + d] = 0.0f;
}

// scores[key, row] of one block: rows lo .. lo + n - 1 of the tile, n a multiple of LANES.
HEADWAY_INLINE void score_block(const AttentionTask& t, const float* keys, const float* cols, int64_t lo, int64_t n,
                                int64_t num_keys, float* scores) {
    gemm<Order::RowsOfA>(num_keys, n, t.head_dim, keys, t.key.token_stride, cols + lo, TILE_ROWS, scores + lo,
                         TILE_ROWS, false);
}

// -inf where a row's last key lies before first_key + key.
static void mask_block(const int64_t* limit, int64_t lo, int64_t n, int64_t first_key, int64_t num_keys,
                       float* scores) {
    for (int64_t c = lo; c < lo + n; c += LANES) {
        IVec seen;  // this lane's number of visible keys in the block
        for (int i = 0; i < LANES; i++) {
            const int64_t visible = limit[c + i] - first_key + 1;
            seen[i] = (int32_t)(visible < 0 ? 0 : visible > num_keys ? num_keys : visible);
        }
        for (int64_t k = 0; k < num_keys; k++) {
            float* p = scores + k * TILE_ROWS + c;
            store(p, (seen > (int32_t)k) ? load(p) : splat(minus_infinity()));
        }
    }
}

// Turns scores into exponentials relative to the new running maximum; updates max, sum and alpha. True if any output
// row must be rescaled.
static bool softmax_block(const ForwardScratch& s, int64_t lo, int64_t n, int64_t num_keys) {
    bool rescale = false;
    for (int64_t c = lo; c < lo + n; c += LANES) {
        float* p = s.scores + c;
        const Vec old_max = load(s.max + c);
        Vec m0 = old_max, m1 = old_max;
        int64_t k = 0;
        for (; k + 2 <= num_keys; k += 2) {
            m0 = max_keep_nan(m0, load(p + k * TILE_ROWS));
            m1 = max_keep_nan(m1, load(p + (k + 1) * TILE_ROWS));
        }
        if (k < num_keys) m0 = max_keep_nan(m0, load(p + k * TILE_ROWS));
        const Vec top = max_keep_nan(m0, m1);
        Vec s0 = splat(0.0f), s1 = splat(0.0f);
        for (k = 0; k + 2 <= num_keys; k += 2) {
            const Vec e0 = exp2_vec(load(p + k * TILE_ROWS) - top);
            const Vec e1 = exp2_vec(load(p + (k + 1) * TILE_ROWS) - top);
            store(p + k * TILE_ROWS, e0);
            store(p + (k + 1) * TILE_ROWS, e1);
            s0 += e0;
            s1 += e1;
        }
        if (k < num_keys) {
            const Vec e0 = exp2_vec(load(p + k * TILE_ROWS) - top);
            store(p + k * TILE_ROWS, e0);
            s0 += e0;
        }
        const Vec alpha = exp2_vec(old_max - top);
        store(s.max + c, top);
        store(s.sum + c, load(s.sum + c) * alpha + (s0 + s1));
        store(s.alpha + c, alpha);
        for (int i = 0; i < LANES; i++) rescale |= alpha[i] != 1.0f;
    }
    return rescale;
}

HEADWAY_INLINE void scale_row(float* row, int64_t padded_dim, float factor) {
    for (int64_t d = 0; d < padded_dim; d += LANES) store(row + d, load(row + d) * factor);
}

// All rows lo .. lo + n - 1 against keys start .. start + count - 1; causal: key i only for rows with limit >= i.
static void wide_span(const AttentionTask& t, const ForwardScratch& s, int64_t kv_head, int64_t lo, int64_t n,
                      int64_t start, int64_t count, bool causal) {
    for (int64_t k0 = 0; k0 < count; k0 += KEY_BLOCK) {
        const int64_t nk = count - k0 < KEY_BLOCK ? count - k0 : KEY_BLOCK;
        if (causal)  // rows whose last key lies before this block have nothing left to do
            while (n > LANES && s.limit[lo + LANES - 1] < k0) lo += LANES, n -= LANES;
        const float* keys = row_of(t.key, start + k0, kv_head);
        score_block(t, keys, s.q_cols, lo, n, nk, s.scores);
        if (causal && s.limit[lo] < k0 + nk - 1) mask_block(s.limit, lo, n, k0, nk, s.scores);
        if (softmax_block(s, lo, n, nk))
            for (int64_t r = lo; r < lo + n; r++) scale_row(s.acc + r * t.padded_dim, t.padded_dim, s.alpha[r]);
        const float* values = row_of(t.value, start + k0, kv_head);
        int64_t stride = t.value.token_stride;
        if (t.head_dim != t.padded_dim) {
            pad_rows(values, stride, nk, t.head_dim, t.padded_dim, s.v_pad);
            values = s.v_pad, stride = t.padded_dim;
        }
        gemm<Order::ColumnsOfA>(n, t.padded_dim, nk, s.scores + lo, TILE_ROWS, values, stride,
                                s.acc + lo * t.padded_dim, t.padded_dim, true);
    }
}

// Dot products of ROWS query rows with 8 / ROWS keys; keys beyond the last repeat it (their scores are not used).
constexpr int64_t PREFETCH_KEYS = 16;  // rows of a pool lie a stride apart, which hardware follows late

template <int ROWS>
static void dot_rows(const float* q, const float* keys, int64_t stride, int64_t num_keys, int64_t padded_dim,
                     float* scores, int64_t score_stride) {
    constexpr int STEP = 8 / ROWS;
    for (int64_t k0 = 0; k0 < num_keys; k0 += STEP) {
        const float* k[STEP];
        for (int i = 0; i < STEP; i++) k[i] = keys + (k0 + i < num_keys ? k0 + i : num_keys - 1) * stride;
        Vec acc[8];
        for (int i = 0; i < 8; i++) acc[i] = splat(0.0f);
        const int64_t ahead = k0 + PREFETCH_KEYS < num_keys ? PREFETCH_KEYS * stride : 0;
        for (int64_t d = 0; d < padded_dim; d += LANES) {
            Vec x[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) x[r] = load(q + r * padded_dim + d);
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++) {
                const Vec y = load(k[i] + d);
                if (LANES == 16 || d % 16 == 0) __builtin_prefetch(k[i] + d + ahead);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) acc[r * STEP + i] += x[r] * y;
            }
        }
        float sums[8];
        reduce_eight(acc, sums);
        for (int r = 0; r < ROWS; r++)
            __builtin_memcpy(scores + r * score_stride + k0, sums + r * STEP, STEP * sizeof(float));
    }
}

// One row's softmax step over scores[0 .. padded - 1] (padded with -inf); returns the factor for its accumulator.
static float softmax_row(float* scores, int64_t padded, float* max, float* sum) {
    Vec m = splat(*max);
    for (int64_t k = 0; k < padded; k += LANES) m = max_keep_nan(m, load(scores + k));
    const float top = reduce_max_keep_nan(m);
    Vec total = splat(0.0f);
    for (int64_t k = 0; k < padded; k += LANES) {
        const Vec e = exp2_vec(load(scores + k) - top);
        store(scores + k, e);
        total += e;
    }
    const float alpha = *max == top ? 1.0f : exp2_vec(splat(*max - top))[0];
    *max = top;
    *sum = *sum * alpha + reduce_add(total);
    return alpha;
}

// As wide_span, for at most max_dot_rows rows (n need not be a multiple of LANES).
static void dot_span(const AttentionTask& t, const ForwardScratch& s, int64_t kv_head, int64_t lo, int64_t n,
                     int64_t start, int64_t count, bool causal) {
    constexpr int64_t ld = DOT_KEYS + 64;
    for (int64_t k0 = 0; k0 < count; k0 += DOT_KEYS) {
        const int64_t nk = count - k0 < DOT_KEYS ? count - k0 : DOT_KEYS;
        const float *keys = row_of(t.key, start + k0, kv_head), *values = row_of(t.value, start + k0, kv_head);
        int64_t k_stride = t.key.token_stride, v_stride = t.value.token_stride;
        if (t.head_dim != t.padded_dim) {
            pad_rows(keys, k_stride, nk, t.head_dim, t.padded_dim, s.k_pad);
            pad_rows(values, v_stride, nk, t.head_dim, t.padded_dim, s.v_pad);
            keys = s.k_pad, values = s.v_pad, k_stride = v_stride = t.padded_dim;
        }
        for (int64_t r = 0; r < n;) {
            const float* q = s.q_rows + (lo + r) * t.padded_dim;
            float* out = s.dot_scores + r * ld;
            if (n - r >= 4)
                dot_rows<4>(q, keys, k_stride, nk, t.padded_dim, out, ld), r += 4;
            else if (n - r == 3)
                dot_rows<3>(q, keys, k_stride, nk, t.padded_dim, out, ld), r += 3;
            else if (n - r == 2)
                dot_rows<2>(q, keys, k_stride, nk, t.padded_dim, out, ld), r += 2;
            else
                dot_rows<1>(q, keys, k_stride, nk, t.padded_dim, out, ld), r += 1;
        }
        const int64_t padded = (nk + LANES - 1) / LANES * LANES;
        for (int64_t r = 0; r < n; r++) {
            float* scores = s.dot_scores + r * ld;
            int64_t visible = causal ? s.limit[lo + r] - k0 + 1 : nk;
            visible = visible < 0 ? 0 : visible > nk ? nk : visible;
            for (int64_t k = visible; k < padded; k++) scores[k] = minus_infinity();
            const float alpha = softmax_row(scores, padded, s.max + lo + r, s.sum + lo + r);
            if (alpha != 1.0f) scale_row(s.acc + (lo + r) * t.padded_dim, t.padded_dim, alpha);
        }
        gemm<Order::RowsOfA>(n, t.padded_dim, nk, s.dot_scores, ld, values, v_stride, s.acc + lo * t.padded_dim,
                             t.padded_dim, true);
    }
}

HEADWAY_INLINE void forward_span(const AttentionTask& t, const ForwardScratch& s, int64_t kv_head, int64_t lo,
                                 int64_t n, int64_t start, int64_t count, bool causal) {
    if (n <= MAX_DOT_ROWS)
        dot_span(t, s, kv_head, lo, n, start, count, causal);
    else
        wide_span(t, s, kv_head, lo, (n + LANES - 1) / LANES * LANES, start, count, causal);
}

static void write_segment(const AttentionTask& t, const ForwardScratch& s, const Segment& seg, int64_t kv_head) {
    for (int64_t r = 0; r < seg.num_rows; r++) {
        const int64_t row = seg.tile_row + r, token = row_query(t, seg, r), head = row_head(t, seg, kv_head, r);
        const float factor = 1.0f / s.sum[row];
        const float* acc = s.acc + row * t.padded_dim;
        float* out = row_of(t.out, token, head);
        for (int64_t d = 0; d < t.head_dim; d++) out[d] = acc[d] * factor;
        if (t.lse) t.lse[token * t.num_heads + head] = s.max[row] + __builtin_log2f(s.sum[row]);
    }
}

static void forward_tile(const AttentionTask& t, const Tile& tile, int64_t kv_head, float* base) {
    const ForwardScratch s = forward_scratch(t, base);
    pack_rows(t, tile, t.query, kv_head, (float)(t.scale * LOG2E), s.q_rows);
    if (tile.transposed) transpose_rows(s.q_rows, tile.num_rows, t.padded_dim, s.q_cols);
    for (int64_t i = 0; i < tile.num_rows * t.padded_dim; i++) s.acc[i] = 0.0f;
    for (int64_t r = 0; r < tile.num_rows; r++) {
        s.max[r] = minus_infinity();
        s.sum[r] = 0.0f;
        s.limit[r] = INT64_MAX / 2;  // rows that only pad see everything and are never written
    }
    const Segment* segments = t.segments + tile.first_segment;
    for (int64_t i = t.plan.range_offsets[tile.range_run]; i < t.plan.range_offsets[tile.range_run + 1]; i++) {
        const int64_t lo = tile.num_segments == 1 ? segments[0].tile_row : 0;
        const int64_t n = tile.num_segments == 1 ? segments[0].num_rows : tile.num_rows;
        forward_span(t, s, kv_head, lo, n, t.plan.range_start[i], t.plan.range_len[i], false);
    }
    for (int32_t i = 0; i < tile.num_segments; i++) {
        const Segment& seg = segments[i];
        for (int64_t r = 0; r < seg.num_rows; r++) s.limit[seg.tile_row + r] = row_limit(t, seg, r);
        const int64_t count = row_limit(t, seg, seg.num_rows - 1) + 1;
        forward_span(t, s, kv_head, seg.tile_row, seg.num_rows, t.plan.causal_start[seg.run], count, true);
        write_segment(t, s, seg, kv_head);
    }
}
