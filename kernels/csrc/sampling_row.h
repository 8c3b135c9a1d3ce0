// One row of logits: log-softmax at a temperature and one draw by the inverse of its distribution function.
//
// Included once per instruction set, inside that set's namespace, after simd.h. Sums run in blocks of 256 logits:
// fp32 lanes within a block, fp64 across blocks, so that the error does not grow with the vocabulary.

constexpr int64_t SUM_BLOCK = 256;
constexpr int64_t MAX_SPANS = 1024;  // sums kept for the inversion; a span is one or more blocks

// exp((z - top) / temperature) of up to LANES logits, 0 behind the end; factor is log2(e) / temperature.
HEADWAY_INLINE Vec exponentials(const float* z, int64_t count, Vec top, Vec factor) {
    if (count >= LANES) return exp2_vec((load(z) - top) * factor);
    float tail[LANES];
    for (int i = 0; i < LANES; i++) tail[i] = i < count ? z[i] : -__builtin_inff();
    return exp2_vec((load(tail) - top) * factor);
}

static double block_sum(const float* z, int64_t count, Vec top, Vec factor) {
    Vec sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int slot = 0;
    for (int64_t i = 0; i < count; i += LANES, slot = (slot + 1) & 3)
        sums[slot] += exponentials(z + i, count - i, top, factor);
    const Vec total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0.0;
    for (int i = 0; i < LANES; i++) sum += (double)total[i];
    return sum;
}

// The largest logit; NaN if there is a NaN.
static float row_top(const float* z, int64_t count) {
    Vec m0 = splat(-__builtin_inff()), m1 = m0;
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        // A NaN stays whichever side it is on: once in m, neither comparison replaces it.
        const Vec a = load(z + i), b = load(z + i + LANES);
        m0 = ((m0 >= a) | (m0 != m0)) ? m0 : a;
        m1 = ((m1 >= b) | (m1 != m1)) ? m1 : b;
    }
    float top = -__builtin_inff();
    for (int l = 0; l < LANES; l++) {
        top = (top >= m0[l] || top != top) ? top : m0[l];
        top = (top >= m1[l] || top != top) ? top : m1[l];
    }
    for (; i < count; i++) top = (top >= z[i] || top != top) ? top : z[i];
    return top;
}

static int64_t first_index(const float* z, float x) {
    int64_t i = 0;
    while (z[i] != x) i++;
    return i;
}

// The first index whose cumulative weight exceeds target; the last one of positive weight if rounding leaves none.
static int64_t invert_block(const float* z, int64_t begin, int64_t end, Vec top, Vec factor, double before,
                            double target) {
    int64_t last = -1;
    for (int64_t i = begin; i < end; i += LANES) {
        const Vec e = exponentials(z + i, end - i, top, factor);
        for (int l = 0; l < LANES && i + l < end; l++) {
            if (!(e[l] > 0.0f)) continue;
            last = i + l;
            before += (double)e[l];
            if (before > target) return last;
        }
    }
    return last;
}

static bool sample_row(const SampleTask& task, int64_t* token, float* logprob) {
    const float* z = task.logits;
    const int64_t size = task.vocab_size;
    const float top = row_top(z, size);
    *token = -1;
    *logprob = __builtin_nanf("");
    if (!(top - top == 0.0f)) return false;  // NaN, +inf, or nothing but -inf
    const bool greedy = __builtin_isinf(task.inv_temperature);
    const double scale = greedy ? 1.0 : (double)task.inv_temperature;
    const Vec tops = splat(top), factor = splat((float)(scale * LOG2E));
    const int64_t span = (size + MAX_SPANS * SUM_BLOCK - 1) / (MAX_SPANS * SUM_BLOCK) * SUM_BLOCK;
    double sums[MAX_SPANS], total = 0.0;
    for (int64_t b = 0; b < size; b += span) {
        const int64_t end = b + span < size ? b + span : size;
        double sum = 0.0;
        for (int64_t i = b; i < end; i += SUM_BLOCK)
            sum += block_sum(z + i, end - i < SUM_BLOCK ? end - i : SUM_BLOCK, tops, factor);
        sums[b / span] = sum;
        total += sum;
    }
    int64_t chosen;
    if (greedy) {
        chosen = first_index(z, top);
    } else {
        // uniform < 1, so target < total, and before reaches total in the same order of addition.
        const double target = task.uniform * total;
        double before = 0.0;
        int64_t b = 0;
        while (!(before + sums[b / span] > target)) before += sums[b / span], b += span;
        chosen = invert_block(z, b, b + span < size ? b + span : size, tops, factor, before, target);
    }
    *token = chosen;
    *logprob = (float)(((double)z[chosen] - (double)top) * scale - __builtin_log(total));
    return true;
}
