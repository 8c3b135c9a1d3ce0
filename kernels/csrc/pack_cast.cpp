// Copies, casts and quantises many tensors along a table of parts; a part is a matrix with row strides.
// Meaning of the arguments: headway_cpu.h; formats: headway_kernels/pack_cast.py.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace headway {
namespace {

enum PackFormat : int32_t { CAST = 0, FP8_BLOCK = 1, FP8_MX = 2 };

constexpr int64_t SIDE = 128, MX = 32;
constexpr int64_t TASK_ELEMENTS = 65536;
constexpr float FLOAT8_MAX = 448.0f;

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

// How a part is cut: bands of rows, each of them into stretches of columns.
struct Cut {
    int64_t rows, columns, across, tasks;
};

Cut cut_of(const HeadwayPackPart& part) {
    Cut cut;
    cut.columns = smaller(part.columns, TASK_ELEMENTS);
    cut.rows = part.format == FP8_BLOCK ? SIDE : TASK_ELEMENTS / (cut.columns < 1 ? 1 : cut.columns);
    cut.rows = cut.rows < 1 ? 1 : cut.rows;
    if (part.rows == 0 || part.columns == 0) return {1, 1, 0, 0};
    cut.across = divide_up(part.columns, cut.columns);
    cut.tasks = cut.across * divide_up(part.rows, cut.rows);
    return cut;
}

class Mover {
public:
    Mover(const Kernels& kernels, const HeadwayPackPart& part) : kernels_(kernels), part_(part) {}

    void cast(int64_t row, int64_t column, int64_t count) const {
        kernels_.delta.cast(part_.source_dtype, part_.target_dtype, source(row, column),
                            target(row, column, value_bytes(part_.target_dtype)), count);
    }

    void microscale(int64_t row, int64_t column, int64_t count) const {
        uint8_t* scales = static_cast<uint8_t*>(part_.scales) + row * part_.scale_stride;
        for (int64_t at = column; at < column + count; at += MX) {
            const int64_t length = smaller(MX, column + count - at);
            float values[MX];
            load(row, at, length, values);
            const float most = kernels_.pack.largest(values, length);
            uint32_t bits;
            std::memcpy(&bits, &most, 4);
            // The exponent of the largest value less that of 448, and 255 for what is not finite.
            const int exponent = static_cast<int>(bits >> 23);
            const int code = exponent == 255 ? 255 : exponent < 8 ? 0 : exponent - 8;
            scales[at / MX] = static_cast<uint8_t>(code);
            const float factor = code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, 127 - code);
            kernels_.pack.encode(values, length, 1.0f, factor, target(row, at, 1));
        }
    }

    // The 128 x 128 block at (row, column), cut by the matrix.
    void block(int64_t row, int64_t column) const {
        const int64_t height = smaller(SIDE, part_.rows - row), width = smaller(SIDE, part_.columns - column);
        float* values = thread_scratch(SIDE * SIDE);
        float most = 0.0f;
        for (int64_t r = 0; r < height; r++) {
            load(row + r, column, width, values + r * SIDE);
            const float here = kernels_.pack.largest(values + r * SIDE, width);
            most = here > most ? here : most;
        }
        float scale = most > 0.0f ? most / FLOAT8_MAX : 1.0f;
        if (std::isinf(most)) scale = std::numeric_limits<float>::quiet_NaN();
        if (scale == 0.0f) scale = 1.0f;  // below the smallest number: the values are 0 in fp8 as well
        static_cast<float*>(part_.scales)[row / SIDE * part_.scale_stride + column / SIDE] = scale;
        for (int64_t r = 0; r < height; r++)
            kernels_.pack.encode(values + r * SIDE, width, scale, 1.0f, target(row + r, column, 1));
    }

private:
    const uint8_t* source(int64_t row, int64_t column) const {
        return static_cast<const uint8_t*>(part_.source) +
               (row * part_.source_stride + column) * value_bytes(part_.source_dtype);
    }

    uint8_t* target(int64_t row, int64_t column, int64_t bytes) const {
        return static_cast<uint8_t*>(part_.target) + (row * part_.target_stride + column) * bytes;
    }

    void load(int64_t row, int64_t column, int64_t count, float* values) const {
        kernels_.delta.cast(part_.source_dtype, FLOAT32, source(row, column), values, count);
    }

    const Kernels& kernels_;
    const HeadwayPackPart& part_;
};

void move_task(const Kernels& kernels, const HeadwayPackPart& part, const Cut& cut, int64_t task) {
    const Mover mover(kernels, part);
    const int64_t row = task / cut.across * cut.rows, column = task % cut.across * cut.columns;
    const int64_t last = smaller(row + cut.rows, part.rows), width = smaller(cut.columns, part.columns - column);
    if (part.format == FP8_BLOCK) {
        for (int64_t at = column; at < column + width; at += SIDE) mover.block(row, at);
        return;
    }
    for (int64_t r = row; r < last; r++) {
        if (part.format == FP8_MX)
            mover.microscale(r, column, width);
        else
            mover.cast(r, column, width);
    }
}

}  // namespace
}  // namespace headway

using namespace headway;

void headway_pack_cast(const HeadwayPackPart* parts, int64_t num_parts, int64_t num_threads) {
    const Kernels& kernels = pick_kernels(0);
    std::vector<Cut> cuts;
    std::vector<int64_t> starts{0};
    for (int64_t p = 0; p < num_parts; p++) {
        cuts.push_back(cut_of(parts[p]));
        starts.push_back(starts.back() + cuts.back().tasks);
    }
    // Small parts are many: a thread takes several tasks at a time.
    const int64_t total = starts.back(), pieces = smaller(total, 16 * (num_threads < 1 ? 1 : num_threads));
    parallel_for(pieces, num_threads, [&](int64_t piece) {
        int64_t task = piece * total / pieces, end = (piece + 1) * total / pieces, p = 0;
        int64_t low = 0, high = num_parts;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (starts[static_cast<size_t>(middle)] <= task ? low : high) = middle;
        }
        for (p = low; task < end; p++)
            for (; task < smaller(end, starts[static_cast<size_t>(p) + 1]); task++)
                move_task(kernels, parts[p], cuts[static_cast<size_t>(p)], task - starts[static_cast<size_t>(p)]);
    });
}
