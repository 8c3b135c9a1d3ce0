#define HEADWAY_ISA avx512
#define HEADWAY_LANES 16
#define HEADWAY_DOT_ROWS 8
#include "kernels.inc"

namespace headway {
const Kernels kernels_avx512 = {
    "avx512",
    avx512::LANES,
    avx512::MAX_DOT_ROWS,
    avx512::forward_tile,
    avx512::backward_tile,
    avx512::sample_row,
    avx512::delta_kernels,
    avx512::head_kernels,
    avx512::pack_kernels,
};
}
