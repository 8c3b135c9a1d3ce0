// Which instruction set runs: what was built, what the processor has, what the caller forced.
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace headway {
namespace {

const Kernels* const built[] = {
    &kernels_portable,
#if defined(HEADWAY_HAVE_AVX2)
    &kernels_avx2,
#endif
#if defined(HEADWAY_HAVE_AVX512)
    &kernels_avx512,
#endif
};

std::atomic<const Kernels*> forced{nullptr};

bool runs_here(const Kernels& k) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (!std::strcmp(k.name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    if (!std::strcmp(k.name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
#endif
    return !std::strcmp(k.name, "portable");
}

int usable_count() {
    static const int count = [] {
        int n = 0;
        for (const Kernels* k : built) n += runs_here(*k) ? 1 : 0;
        return n;
    }();
    return count;  // a set is usable only if all narrower ones are
}

}  // namespace

const Kernels& pick_kernels(int64_t head_dim) {
    if (const Kernels* k = forced.load()) return *k;
    for (int i = usable_count() - 1; i > 0; i--)
        if (head_dim % built[i]->lanes == 0) return *built[i];
    return usable_count() > 1 && head_dim > 4 ? *built[1] : *built[0];
}

}  // namespace headway

int headway_cpu_abi(void) { return HEADWAY_CPU_ABI; }

const char* headway_cpu_isas(void) {
    switch (headway::usable_count()) {
        case 3: return "portable,avx2,avx512";
        case 2: return "portable,avx2";
        default: return "portable";
    }
}

int headway_cpu_force_isa(const char* name) {
    if (!name || !*name) {
        headway::forced.store(nullptr);
        return 0;
    }
    for (int i = 0; i < headway::usable_count(); i++)
        if (!std::strcmp(headway::built[i]->name, name)) {
            headway::forced.store(headway::built[i]);
            return 0;
        }
    return -1;
}

int headway_cpu_has_threads(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}
