#define HEADWAY_ISA avx2
#define HEADWAY_LANES 8
#define HEADWAY_DOT_ROWS 4
#include "kernels.inc"

namespace headway {
const Kernels kernels_avx2 = {
    "avx2",
    avx2::LANES,
    avx2::MAX_DOT_ROWS,
    avx2::forward_tile,
    avx2::backward_tile,
    avx2::sample_row,
    avx2::delta_kernels,
    avx2::head_kernels,
    avx2::pack_kernels,
};
}
