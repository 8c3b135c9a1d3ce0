// What head.cpp asks of an instruction set: packing, products of packed panels, and the passes over a row of logits.
//
// A product is C[M, N] (+)= A[M, K] B[K, N]. B is packed into panels of `columns` columns: panel p holds B(k, p columns
// + j) at [p K columns + k columns + j], zero behind N. Each element is one chain of fused additions over k in order,
// then added to C if asked, whatever M, N and the splitting of the work: so a row does not depend on its neighbours,
// nor a result on the number of threads.
#pragma once

#include <cstdint>

namespace headway {

// The chain from a product to a logit: z = cap(scale (product + bias)) inv_temperature.
struct LogitChain {
    float factor;           // scale, times inv_temperature if there is no softcap
    float softcap;          // 0: none
    float inv_temperature;  // of a capped row; 1 otherwise
};

// A row's softmax in parts: largest logit, sum of exp(z - top), sum of (z - top) exp(z - top).
struct RowSums {
    float top, sum, dot;
};

// What turns a row's logits into dL/d(product): e (alpha + beta (z - top)) with e = exp(z - top), times the slope of
// a softcap.
struct RowSlope {
    float top, alpha, beta;
};

struct HeadKernels {
    int64_t rows;     // of a register tile, and of a packed panel of A
    int64_t columns;  // of a packed panel of B

    // Panel of A from up to `rows` rows of x: out[k rows + i] = x[i stride + k].
    void (*pack_rows)(const float* x, int64_t stride, int64_t count, int64_t size, float* out);
    // Panels of B from rows of a matrix: B(k, j) = w[j stride + k], j < count.
    void (*pack_transposed)(int32_t dtype, const void* w, int64_t stride, int64_t count, int64_t size, float* out);
    // Panels of B from columns of a matrix: B(k, j) = w[k stride + j], j < count, k < size.
    void (*pack_plain)(int32_t dtype, const void* w, int64_t stride, int64_t count, int64_t size, float* out);
    // C rows of one register tile (count <= rows) against panels of B; A(i, k) at a[i stride + k], or, packed, at
    // a[k rows + i]. Writes `width` columns, or adds to them.
    void (*multiply)(bool packed, int64_t count, int64_t size, const float* a, int64_t stride, const float* b,
                     int64_t width, float* c, int64_t c_stride, bool add);
    // Turns `count` products in place into logits, padded with -inf to whole vectors; stores what the gradient needs
    // (logits, or their values before a softcap) to `keep` if it is given. The sums leave out column `target` (-1:
    // none), whose logit goes to `picked`: so 1 - p(target) comes without cancellation.
    RowSums (*score)(float* products, int64_t count, const float* bias, const LogitChain& chain, float* keep,
                     int64_t target, float* picked);
    // out[i] = dL/d(product) of what score() kept; out may be `kept`.
    void (*differentiate)(const float* kept, int64_t count, const LogitChain& chain, const RowSlope& slope, float* out);
    // Panel p of A gets the next `rows` of the row's values: out[p panel_floats + i] = row[p rows + i].
    void (*spread)(const float* row, int64_t num_panels, int64_t panel_floats, float* out);
    // sums[i] += values[i]
    void (*add)(const float* values, int64_t count, float* sums);
};

}  // namespace headway
