// Sampling of a batch of rows; each row's draw depends on its logits, seed and position alone.
#include <atomic>

#include "kernels.h"
#include "parallel.h"

namespace {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): key = seed, counter = position.
// 53 bits of its first two words give a uniform number in [0, 1).
double philox_uniform(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
        for (int i = 0; i < 4; i++) c[i] = next[i];
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint64_t bits = (uint64_t{c[0] >> 5} << 26) | (c[1] >> 6);
    return static_cast<double>(bits) * 0x1.0p-53;
}

}  // namespace

int64_t headway_sample_tokens(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                              const float* inv_temperature, const int64_t* seeds, const int64_t* positions,
                              int64_t* tokens, float* logprobs, int64_t num_threads) {
    const headway::Kernels& kernels = headway::pick_kernels(0);
    std::atomic<int64_t> failed{0};
    headway::parallel_for(num_rows, num_threads, [&](int64_t i) {
        const headway::SampleTask task = {
            logits + i * row_stride, vocab_size, inv_temperature[i],
            philox_uniform(static_cast<uint64_t>(seeds[i]), static_cast<uint64_t>(positions[i]))};
        if (!kernels.sample_row(task, tokens + i, logprobs + i)) failed.fetch_add(1);
    });
    return failed.load();
}
