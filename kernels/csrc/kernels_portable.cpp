#define HEADWAY_ISA portable
#define HEADWAY_LANES 4
#define HEADWAY_DOT_ROWS 2
#include "kernels.inc"

namespace headway {
const Kernels kernels_portable = {
    "portable",
    portable::LANES,
    portable::MAX_DOT_ROWS,
    portable::forward_tile,
    portable::backward_tile,
    portable::sample_row,
    portable::delta_kernels,
    portable::head_kernels,
    portable::pack_kernels,
};
}
