// C[M, N] (+)= A[M, K] * B[K, N], small and unpacked: scalars of A are broadcast, B and C are read in whole vectors.
//
// Included once per instruction set, inside that set's namespace, after simd.h. N is a multiple of LANES. Each element
// is one chain of additions over k in order, whatever the sizes of M and N, so a row does not depend on its neighbours.

enum class Order { RowsOfA, ColumnsOfA };  // A(i, k) at A[i * lda + k], or at A[k * lda + i]

// accumulate: the chain starts from C. add: the chain starts from 0 and its sum is added to C, so that rounding grows
// with the length of the pieces that K comes in and with their number, not with all of K.
template <int MR, int NR, Order order>
HEADWAY_INLINE void gemm_block(int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C,
                               int64_t ldc, bool accumulate, bool add = false) {
    Vec acc[MR][NR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) acc[i][j] = accumulate ? load(C + i * ldc + j * LANES) : splat(0.0f);
    }
    for (int64_t k = 0; k < K; k++) {
        Vec b[NR];
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) b[j] = load(B + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const float a = order == Order::RowsOfA ? A[i * lda + k] : A[i];
#pragma GCC unroll 4
            for (int j = 0; j < NR; j++) acc[i][j] += a * b[j];
        }
        B += ldb;
        if (order == Order::ColumnsOfA) A += lda;
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) {
            float* c = C + i * ldc + j * LANES;
            store(c, add ? load(c) + acc[i][j] : acc[i][j]);
        }
    }
}

// Rows in a block: MR x 2 accumulators, two vectors of B and a broadcast fill the registers.
constexpr int GEMM_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;

template <int NR, Order order>
HEADWAY_INLINE void gemm_panel(int64_t M, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C,
                               int64_t ldc, bool accumulate) {
    const int64_t step = order == Order::RowsOfA ? lda : 1;
    int64_t i = 0;
    while (i < M) {
        // The last rows go as two blocks of similar height rather than as a full one and a sliver.
        int64_t rows = M - i;
        if (rows > GEMM_ROWS) rows = rows >= 2 * GEMM_ROWS ? GEMM_ROWS : (rows + 1) / 2;
        const float* a = A + i * step;
        float* c = C + i * ldc;
        switch (rows) {
            case 1: gemm_block<1, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 2: gemm_block<2, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 3: gemm_block<3, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 4: gemm_block<4, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
#if HEADWAY_LANES >= 8
            case 5: gemm_block<5, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 6: gemm_block<6, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
#endif
#if HEADWAY_LANES == 16
            case 7: gemm_block<7, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 8: gemm_block<8, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 9: gemm_block<9, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 10: gemm_block<10, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 11: gemm_block<11, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
            case 12: gemm_block<12, NR, order>(K, a, lda, B, ldb, c, ldc, accumulate); break;
#endif
        }
        i += rows;
    }
}

template <Order order>
static void gemm(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C,
                 int64_t ldc, bool accumulate) {
    int64_t j = 0;
    if (M <= 3) {  // too few chains to hide the latency with two vectors a row
        for (; j + 4 * LANES <= N; j += 4 * LANES) {
            if (M == 1)
                gemm_block<1, 4, order>(K, A, lda, B + j, ldb, C + j, ldc, accumulate);
            else if (M == 2)
                gemm_block<2, 4, order>(K, A, lda, B + j, ldb, C + j, ldc, accumulate);
            else
                gemm_block<3, 4, order>(K, A, lda, B + j, ldb, C + j, ldc, accumulate);
        }
    }
    for (; j + 2 * LANES <= N; j += 2 * LANES)
        gemm_panel<2, order>(M, K, A, lda, B + j, ldb, C + j, ldc, accumulate);
    if (j < N) gemm_panel<1, order>(M, K, A, lda, B + j, ldb, C + j, ldc, accumulate);
}
