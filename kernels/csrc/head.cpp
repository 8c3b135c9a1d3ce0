// The language-model head: scores of rows, and the two gradient products, without a tensor of rows x vocabulary.
//
// Scores: tasks are spans of the vocabulary, cut by its size alone. A task packs a tile of columns, multiplies all rows
// with it, panel by panel while the products lie in L1, and keeps a running softmax per row; spans are merged in order.
// Gradients: dL/dlogits are written over the kept logits by tasks of columns, which multiply them into dL/dweight at
// once; then tasks of rows and columns multiply them into dL/dx.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace headway {
namespace {

constexpr int64_t MAX_TILE = 256;            // columns of the vocabulary that are packed together
constexpr int64_t TILE_BYTES = 512 << 10;    // of a packed tile: half of a common L2
constexpr int64_t MAX_SPANS = 64;            // of the vocabulary, each with partial sums of every row
constexpr int64_t MAX_ROWS = 1536;           // packed together; enough that packing the vocabulary again is cheap
constexpr int64_t GRADIENT_PANELS = 16;      // of A, that a task of dL/dweight holds in L2
constexpr int64_t GRADIENT_DEPTH = 512;      // rows that it sums before it touches dL/dweight
constexpr int64_t INPUT_DEPTH = 256;         // columns of the vocabulary that dL/dx sums before it touches dL/dx
constexpr int64_t INPUT_ROWS = 280;          // rows of a task of dL/dx: the more, the less often the weight is read
constexpr int64_t INPUT_COLUMNS = 64;        // of a task of dL/dx, at least

constexpr int64_t AHEAD = 4;                  // rows of logits that are asked for before they are read

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t round_up(int64_t x, int64_t y) { return divide_up(x, y) * y; }
int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

// Asks for the lines of a stretch of memory that is too short for the processor to foresee.
void prefetch(const float* p, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(p + i, 1);
}

// Softmax sums over some columns: what RowSums holds, in fp64 and relative to `top`.
struct Partial {
    double top = -std::numeric_limits<double>::infinity(), sum = 0.0, dot = 0.0;

    void add(double other_top, double other_sum, double other_dot) {
        if (other_sum == 0.0 || other_top == -std::numeric_limits<double>::infinity()) return;  // NaNs go on
        if (other_top > top) {
            const double shift = top - other_top, factor = std::exp(shift);
            dot = sum == 0.0 ? other_dot : (dot + shift * sum) * factor + other_dot;
            sum = sum == 0.0 ? other_sum : sum * factor + other_sum;
            top = other_top;
        } else {
            const double shift = other_top - top, factor = std::exp(shift);
            dot += (other_dot + shift * other_sum) * factor;
            sum += other_sum * factor;
        }
    }
};

LogitChain chain_of(const HeadwayHead& head, float inv_temperature) {
    if (head.softcap != 0.0f) return {head.scale, head.softcap, inv_temperature};
    return {head.scale * inv_temperature, 0.0f, 1.0f};
}

const uint8_t* weight_row(const HeadwayHead& head, int64_t row) {
    return static_cast<const uint8_t*>(head.weight) + row * head.hidden * value_bytes(head.dtype);
}

// The columns [begin, begin + width) of all rows of a group: products, chain, running sums.
class TileScorer {
public:
    TileScorer(const HeadKernels& kernels, const HeadwayHead& head, const HeadwayRows& rows, int64_t first,
               const float* packed, const float* bias, float* keep, int64_t keep_stride)
        : kernels_(kernels), head_(head), rows_(rows), first_(first), packed_(packed), bias_(bias), keep_(keep),
          keep_stride_(keep_stride) {}

    void score(int64_t begin, int64_t width, int64_t count, float* scratch, Partial* partials, float* picked) const {
        float* tile = scratch;
        float* products = scratch + round_up(width, kernels_.columns) * head_.hidden;
        const int64_t stride = round_up(width, kernels_.columns);
        kernels_.pack_transposed(head_.dtype, weight_row(head_, begin), head_.hidden, width, head_.hidden, tile);
        for (int64_t row = 0; row < count; row += kernels_.rows) {
            const int64_t height = smaller(kernels_.rows, count - row);
            kernels_.multiply(true, height, head_.hidden, packed_ + row * head_.hidden, 0, tile, stride, products,
                              stride, false);
            for (int64_t i = 0; i < height; i++)
                finish(row + i, begin, width, products + i * stride, partials[row + i], picked);
        }
    }

private:
    void finish(int64_t row, int64_t begin, int64_t width, float* products, Partial& partial, float* picked) const {
        const int64_t at = first_ + row, target = rows_.target[at] - begin;
        float* keep = keep_ ? keep_ + at * keep_stride_ + begin : nullptr;
        const LogitChain chain = chain_of(head_, rows_.inv_temperature[at]);
        const bool here = target >= 0 && target < width;
        const RowSums sums = kernels_.score(products, width, bias_ ? bias_ + begin : nullptr, chain, keep,
                                            here ? target : -1, picked + row);
        partial.add(sums.top, sums.sum, sums.dot);
    }

    const HeadKernels& kernels_;
    const HeadwayHead& head_;
    const HeadwayRows& rows_;
    const int64_t first_;
    const float* const packed_;
    const float* const bias_;
    float* const keep_;
    const int64_t keep_stride_;
};

void finish_row(const Partial& rest, float picked, int64_t row, const HeadwayScores& out) {
    Partial whole = rest;
    whole.add(picked, 1.0, 0.0);
    const double log_sum = std::log(whole.sum);
    const double miss = rest.sum == 0.0 ? 0.0 : rest.sum * std::exp(rest.top - whole.top) / whole.sum;
    const double logp = miss < 0.5 ? std::log1p(-miss) : static_cast<double>(picked) - whole.top - log_sum;
    out.top[row] = static_cast<float>(whole.top);
    out.total[row] = whole.sum;
    out.miss[row] = miss;
    out.logp[row] = static_cast<float>(logp);
    out.logsumexp[row] = static_cast<float>(whole.top + log_sum);
    if (out.entropy) out.entropy[row] = static_cast<float>(log_sum - whole.dot / whole.sum);
}

// Rows [first, first + count): few enough to be packed whole.
void score_group(const HeadKernels& kernels, const HeadwayHead& head, const HeadwayRows& rows, int64_t first,
                 int64_t count, const float* bias, float* keep, int64_t keep_stride, const HeadwayScores& out,
                 int64_t num_threads) {
    const int64_t hidden = head.hidden, vocabulary = head.vocabulary;
    const int64_t fitting = TILE_BYTES / 4 / hidden / kernels.columns * kernels.columns;
    const int64_t tile = fitting < kernels.columns ? kernels.columns : smaller(fitting, MAX_TILE);
    const int64_t num_tiles = divide_up(vocabulary, tile), span = divide_up(num_tiles, MAX_SPANS);
    const int64_t num_spans = divide_up(num_tiles, span);
    std::vector<float> packed(static_cast<size_t>(round_up(count, kernels.rows) * hidden));
    std::vector<float> picked(static_cast<size_t>(count), -std::numeric_limits<float>::infinity());
    const int64_t num_panels = divide_up(count, kernels.rows);
    parallel_for(num_panels, num_threads, [&](int64_t p) {
        const int64_t row = p * kernels.rows;
        kernels.pack_rows(rows.x + (first + row) * rows.x_stride, rows.x_stride, smaller(kernels.rows, count - row),
                          hidden, packed.data() + row * hidden);
    });
    std::vector<Partial> partials(static_cast<size_t>(num_spans * count));
    const TileScorer scorer(kernels, head, rows, first, packed.data(), bias, keep, keep_stride);
    parallel_for(num_spans, num_threads, [&](int64_t s) {
        float* scratch = thread_scratch(tile * hidden + kernels.rows * tile);
        for (int64_t t = s * span; t < smaller((s + 1) * span, num_tiles); t++) {
            const int64_t begin = t * tile;
            scorer.score(begin, smaller(tile, vocabulary - begin), count, scratch, partials.data() + s * count,
                         picked.data());
        }
    });
    for (int64_t row = 0; row < count; row++) {
        Partial rest;
        for (int64_t s = 0; s < num_spans; s++) {
            const Partial& part = partials[static_cast<size_t>(s * count + row)];
            rest.add(part.top, part.sum, part.dot);
        }
        finish_row(rest, picked[static_cast<size_t>(row)], first + row, out);
    }
}

// One head_gradient call. Live rows are those with a gradient; their logits move to the front of the buffer as they
// become dL/dlogits: row k of the live ones is never behind the row it comes from.
struct Gradient {
    const HeadKernels& kernels;
    const HeadwayHead& head;
    const HeadwayRows& rows;
    const HeadwaySlopes& slopes;
    float* buffer;
    int64_t stride;
    const int64_t* live;
    int64_t num_live;

    float* logits(int64_t row) const { return buffer + row * stride; }

    // dL/d(product) of row `live[k]`, columns [begin, begin + width), to out.
    void differentiate(int64_t k, int64_t begin, int64_t width, float* out) const {
        const int64_t row = live[k];
        const LogitChain chain = chain_of(head, rows.inv_temperature[row]);
        const RowSlope slope = {slopes.top[row], slopes.alpha[row], slopes.beta[row]};
        kernels.differentiate(logits(row) + begin, width, chain, slope, out);
        const int64_t target = rows.target[row] - begin;
        if (target < 0 || target >= width) return;
        // At the target the softmax is not subtracted from 1 after rounding: at_target has c (1 - p) + ...
        float bend = 1.0f;
        if (head.softcap != 0.0f) {
            const double t = std::tanh(static_cast<double>(logits(row)[begin + target]) / head.softcap);
            bend = static_cast<float>((1.0 - t) * (1.0 + t));
        }
        out[target] = slopes.at_target[row] * bend;
    }

    // dL/dlogits of some columns, over the logits; and their part of dL/dweight and dL/dbias.
    void columns(int64_t begin, int64_t width, const float* x_panels, float* weight_grad, float* bias_grad) const {
        const int64_t num_panels = divide_up(width, kernels.rows), panel_floats = GRADIENT_DEPTH * kernels.rows;
        float* packed = thread_scratch(num_panels * (panel_floats + kernels.rows));
        float* row = packed + num_panels * panel_floats;
        std::memset(row, 0, sizeof(float) * static_cast<size_t>(num_panels * kernels.rows));
        for (int64_t from = 0; from < num_live; from += GRADIENT_DEPTH) {
            const int64_t depth = smaller(GRADIENT_DEPTH, num_live - from);
            for (int64_t k = 0; k < depth; k++) {
                if (from + k + AHEAD < num_live) prefetch(logits(live[from + k + AHEAD]) + begin, width);
                differentiate(from + k, begin, width, row);
                std::memcpy(logits(from + k) + begin, row, sizeof(float) * static_cast<size_t>(width));
                if (bias_grad) kernels.add(row, width, bias_grad + begin);
                kernels.spread(row, num_panels, panel_floats, packed + k * kernels.rows);
            }
            const float* panels = x_panels + from * round_up(head.hidden, kernels.columns);
            if (weight_grad) weights(begin, width, depth, packed, panels, weight_grad);
        }
    }

    // Adds packed dL/dlogits of `depth` rows, transposed, times those rows of x to dL/dweight.
    void weights(int64_t begin, int64_t width, int64_t depth, const float* packed, const float* x_panels,
                 float* weight_grad) const {
        const int64_t panel = kernels.rows, num_panels = divide_up(width, panel), hidden = head.hidden;
        for (int64_t j = 0; j < hidden; j += kernels.columns) {
            const int64_t part = smaller(kernels.columns, hidden - j);
            for (int64_t p = 0; p < num_panels; p++) {
                float* c = weight_grad + (begin + p * panel) * hidden + j;
                for (int64_t i = panel; i < smaller(2 * panel, width - p * panel); i++) prefetch(c + i * hidden, part);
                kernels.multiply(true, smaller(panel, width - p * panel), depth, packed + p * GRADIENT_DEPTH * panel, 0,
                                 x_panels + j * depth, part, c, hidden, true);
            }
        }
    }

    // dL/dx of live rows [first, last), hidden columns [low, high).
    void inputs(int64_t first, int64_t last, int64_t low, int64_t high, float* x_grad) const {
        const int64_t hidden = head.hidden;
        float* tile = thread_scratch(INPUT_DEPTH * round_up(high - low, kernels.columns));
        for (int64_t v = 0; v < head.vocabulary; v += INPUT_DEPTH) {
            const int64_t depth = smaller(INPUT_DEPTH, head.vocabulary - v);
            kernels.pack_plain(head.dtype, weight_row(head, v) + low * value_bytes(head.dtype), hidden, high - low,
                               depth, tile);
            for (int64_t k = first; k < last; k += kernels.rows) {
                for (int64_t i = k + kernels.rows; i < smaller(k + 2 * kernels.rows, last); i++)
                    prefetch(logits(i) + v, depth);
                kernels.multiply(false, smaller(kernels.rows, last - k), depth, logits(k) + v, stride, tile, high - low,
                                 x_grad + k * hidden + low, hidden, v > 0);
            }
        }
    }
};

}  // namespace
}  // namespace headway

using namespace headway;

int64_t headway_head_row_stride(int64_t vocabulary) {
    // A multiple of a vector, odd, so that equal columns of neighbouring rows do not share a cache set.
    const int64_t vectors = divide_up(vocabulary, 16);
    return 16 * (vectors + (vectors + 1) % 2);
}

void headway_head_score(const HeadwayHead* head, const HeadwayRows* rows, float* keep, const HeadwayScores* out,
                        int64_t num_threads) {
    const HeadKernels& kernels = pick_kernels(0).head;
    std::vector<float> bias;
    if (head->bias) {
        bias.assign(static_cast<size_t>(round_up(head->vocabulary, 16) + 16), 0.0f);
        std::memcpy(bias.data(), head->bias, sizeof(float) * static_cast<size_t>(head->vocabulary));
    }
    const int64_t groups = divide_up(rows->count, MAX_ROWS);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * rows->count / groups, last = (g + 1) * rows->count / groups;
        score_group(kernels, *head, *rows, first, last - first, head->bias ? bias.data() : nullptr, keep,
                    headway_head_row_stride(head->vocabulary), *out, num_threads);
    }
}

void headway_head_gradient(const HeadwayHead* head, const HeadwayRows* rows, const HeadwaySlopes* slopes, float* kept,
                           const int64_t* live, int64_t num_live, float* x_grad, float* weight_grad, float* bias_grad,
                           int64_t num_threads) {
    const HeadKernels& kernels = pick_kernels(0).head;
    const int64_t hidden = head->hidden, vocabulary = head->vocabulary;
    const Gradient step = {kernels, *head, *rows, *slopes, kept, headway_head_row_stride(vocabulary), live, num_live};
    std::vector<float> x_panels;
    if (weight_grad) {
        const int64_t padded = round_up(hidden, kernels.columns);
        x_panels.resize(static_cast<size_t>(num_live * padded));
        std::vector<float> gathered(static_cast<size_t>(smaller(GRADIENT_DEPTH, num_live) * hidden));
        for (int64_t from = 0; from < num_live; from += GRADIENT_DEPTH) {
            const int64_t depth = smaller(GRADIENT_DEPTH, num_live - from);
            for (int64_t k = 0; k < depth; k++)
                std::memcpy(gathered.data() + k * hidden, rows->x + live[from + k] * rows->x_stride,
                            sizeof(float) * static_cast<size_t>(hidden));
            kernels.pack_plain(FLOAT32, gathered.data(), hidden, hidden, depth, x_panels.data() + from * padded);
        }
    }
    const int64_t width = GRADIENT_PANELS * kernels.rows;
    parallel_for(divide_up(vocabulary, width), num_threads, [&](int64_t g) {
        const int64_t begin = g * width;
        step.columns(begin, smaller(width, vocabulary - begin), x_panels.data(), weight_grad, bias_grad);
    });
    const int64_t row_tasks = divide_up(num_live, INPUT_ROWS);
    int64_t column_tasks = 1;  // more where there are too few tasks for the threads; no result depends on it
    while (row_tasks * column_tasks < 2 * num_threads && hidden / (2 * column_tasks) >= INPUT_COLUMNS)
        column_tasks *= 2;
    const int64_t part = round_up(divide_up(hidden, column_tasks), kernels.columns);
    const int64_t parts = divide_up(hidden, part);
    parallel_for(row_tasks * parts, num_threads, [&](int64_t task) {
        const int64_t r = task / parts, low = task % parts * part;
        step.inputs(r * num_live / row_tasks, (r + 1) * num_live / row_tasks, low, smaller(low + part, hidden), x_grad);
    });
}
