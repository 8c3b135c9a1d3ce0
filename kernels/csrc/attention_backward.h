// The gradients of one tile of attention rows: scores are formed again from the saved log-sum-exp.
//
// Included once per instruction set, inside that set's namespace, after attention_forward.h. A tile writes its rows of
// d_query and adds to d_key and d_value; tiles that share keys run one after the other, in the order of the schedule,
// so the sums have one order and no atomics.

struct BackwardScratch {
    float *q_cols, *q_rows, *g_cols, *g_rows, *d_q, *probs, *d_scores, *k_pad, *d_pad, *lse, *delta;
    int64_t* limit;
};

static BackwardScratch backward_scratch(const AttentionTask& task, float* base) {
    BackwardScratch s;
    const int64_t tile = TILE_ROWS * task.padded_dim;
    s.q_cols = base;
    s.q_rows = s.q_cols + tile;
    s.g_cols = s.q_rows + tile;
    s.g_rows = s.g_cols + tile;
    s.d_q = s.g_rows + tile;
    s.probs = s.d_q + tile;
    s.d_scores = s.probs + KEY_BLOCK * TILE_ROWS;
    s.k_pad = s.d_scores + KEY_BLOCK * TILE_ROWS;
    s.d_pad = s.k_pad + KEY_BLOCK * task.padded_dim;
    s.lse = s.d_pad + KEY_BLOCK * task.padded_dim;
    s.delta = s.lse + TILE_ROWS;
    s.limit = reinterpret_cast<int64_t*>(s.delta + TILE_ROWS);
    return s;
}

// probs becomes the probabilities, d_scores (which holds dL/dprob) dL/dscore * scale.
static void score_gradients(const BackwardScratch& s, int64_t lo, int64_t n, int64_t num_keys, float scale) {
    for (int64_t c = lo; c < lo + n; c += LANES) {
        const Vec lse = load(s.lse + c), delta = load(s.delta + c);
        for (int64_t k = 0; k < num_keys; k++) {
            float *p = s.probs + k * TILE_ROWS + c, *g = s.d_scores + k * TILE_ROWS + c;
            const Vec prob = exp2_vec(load(p) - lse);
            store(p, prob);
            store(g, prob * (load(g) - delta) * scale);
        }
    }
}

// out[key, :] += weights[key, rows] * rows[row, :] for one block of keys.
static void add_to_keys(const AttentionTask& t, const float* weights, const float* rows, int64_t num_rows,
                        int64_t num_keys, float* out, int64_t out_stride, float* pad) {
    if (t.head_dim == t.padded_dim) {
        gemm<Order::RowsOfA>(num_keys, t.padded_dim, num_rows, weights, TILE_ROWS, rows, t.padded_dim, out, out_stride,
                             true);
        return;
    }
    gemm<Order::RowsOfA>(num_keys, t.padded_dim, num_rows, weights, TILE_ROWS, rows, t.padded_dim, pad, t.padded_dim,
                         false);
    for (int64_t k = 0; k < num_keys; k++)
        for (int64_t d = 0; d < t.head_dim; d++) out[k * out_stride + d] += pad[k * t.padded_dim + d];
}

static void backward_span(const AttentionTask& t, const BackwardScratch& s, int64_t kv_head, int64_t lo,
                          int64_t num_rows, int64_t start, int64_t count, bool causal) {
    const int64_t end = lo + num_rows;
    for (int64_t k0 = 0; k0 < count; k0 += KEY_BLOCK) {
        const int64_t nk = count - k0 < KEY_BLOCK ? count - k0 : KEY_BLOCK;
        if (causal)
            while (end - lo > LANES && s.limit[lo + LANES - 1] < k0) lo += LANES;
        const int64_t n = (end - lo + LANES - 1) / LANES * LANES;
        const float *keys = row_of(t.key, start + k0, kv_head), *values = row_of(t.value, start + k0, kv_head);
        gemm<Order::RowsOfA>(nk, n, t.head_dim, keys, t.key.token_stride, s.q_cols + lo, TILE_ROWS, s.probs + lo,
                             TILE_ROWS, false);
        gemm<Order::RowsOfA>(nk, n, t.head_dim, values, t.value.token_stride, s.g_cols + lo, TILE_ROWS,
                             s.d_scores + lo, TILE_ROWS, false);
        if (causal && s.limit[lo] < k0 + nk - 1) mask_block(s.limit, lo, n, k0, nk, s.probs);
        score_gradients(s, lo, n, nk, t.scale);
        add_to_keys(t, s.probs + lo, s.g_rows + lo * t.padded_dim, end - lo, nk,
                    row_of(t.d_value, start + k0, kv_head), t.d_value.token_stride, s.d_pad);
        add_to_keys(t, s.d_scores + lo, s.q_rows + lo * t.padded_dim, end - lo, nk,
                    row_of(t.d_key, start + k0, kv_head), t.d_key.token_stride, s.d_pad);
        int64_t stride = t.key.token_stride;
        if (t.head_dim != t.padded_dim) {
            pad_rows(keys, stride, nk, t.head_dim, t.padded_dim, s.k_pad);
            keys = s.k_pad, stride = t.padded_dim;
        }
        gemm<Order::ColumnsOfA>(end - lo, t.padded_dim, nk, s.d_scores + lo, TILE_ROWS, keys, stride,
                                s.d_q + lo * t.padded_dim, t.padded_dim, true);
    }
}

// Saved log-sum-exp, delta = sum(d_out * out) and the causal limit of every row. Rows that only pad get lse = +inf:
// their probabilities are exactly 0.
static void load_row_state(const AttentionTask& t, const BackwardScratch& s, const Tile& tile, int64_t kv_head) {
    for (int64_t r = 0; r < tile.num_rows; r++) {
        s.lse[r] = -minus_infinity();
        s.delta[r] = 0.0f;
        s.limit[r] = INT64_MAX / 2;
    }
    for (int32_t i = 0; i < tile.num_segments; i++) {
        const Segment& seg = t.segments[tile.first_segment + i];
        for (int64_t r = 0; r < seg.num_rows; r++) {
            const int64_t row = seg.tile_row + r, token = row_query(t, seg, r), head = row_head(t, seg, kv_head, r);
            const float* out = row_of(t.out, token, head);
            const float* grad = s.g_rows + row * t.padded_dim;
            float delta = 0.0f;
            int64_t d = 0;
            if (t.head_dim >= LANES) {
                Vec sums = splat(0.0f);
                for (; d + LANES <= t.head_dim; d += LANES) sums += load(out + d) * load(grad + d);
                delta = reduce_add(sums);
            }
            for (; d < t.head_dim; d++) delta += out[d] * grad[d];
            s.delta[row] = delta;
            s.lse[row] = t.lse[token * t.num_heads + head];
            s.limit[row] = row_limit(t, seg, r);
        }
    }
}

static void backward_tile(const AttentionTask& t, const Tile& tile, int64_t kv_head, float* base) {
    const BackwardScratch s = backward_scratch(t, base);
    pack_rows(t, tile, t.query, kv_head, (float)(t.scale * LOG2E), s.q_rows);
    transpose_rows(s.q_rows, tile.num_rows, t.padded_dim, s.q_cols);
    pack_rows(t, tile, t.query, kv_head, 1.0f, s.q_rows);
    pack_rows(t, tile, t.d_out, kv_head, 1.0f, s.g_rows);
    transpose_rows(s.g_rows, tile.num_rows, t.padded_dim, s.g_cols);
    load_row_state(t, s, tile, kv_head);
    for (int64_t i = 0; i < tile.num_rows * t.padded_dim; i++) s.d_q[i] = 0.0f;
    const Segment* segments = t.segments + tile.first_segment;
    for (int64_t i = t.plan.range_offsets[tile.range_run]; i < t.plan.range_offsets[tile.range_run + 1]; i++)
        backward_span(t, s, kv_head, 0, tile.num_rows, t.plan.range_start[i], t.plan.range_len[i], false);
    for (int32_t i = 0; i < tile.num_segments; i++) {
        const Segment& seg = segments[i];
        const int64_t count = row_limit(t, seg, seg.num_rows - 1) + 1;
        backward_span(t, s, kv_head, seg.tile_row, seg.num_rows, t.plan.causal_start[seg.run], count, true);
        for (int64_t r = 0; r < seg.num_rows; r++) {
            float* out = row_of(t.d_query, row_query(t, seg, r), row_head(t, seg, kv_head, r));
            __builtin_memcpy(out, s.d_q + (seg.tile_row + r) * t.padded_dim, t.head_dim * sizeof(float));
        }
    }
}
