// What delta.cpp asks of an instruction set: conversions, comparisons and compaction of runs of values.
#pragma once

#include <cstdint>

namespace headway {

constexpr int64_t BLOCK_ELEMENTS = 65536;
constexpr int64_t MASK_WORDS = BLOCK_ELEMENTS / 64;

// DTYPE_CODES of delta_format.py.
enum DType : int32_t { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };

static constexpr int64_t value_bytes(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

struct DeltaKernels {
    // Compares `count` values of `source`, cast to `target`, with `old`, bit by bit; sets bit `bit + i` of the zeroed
    // mask where they differ. Writes the cast values over `old` if update is set. Returns the number of differences.
    // mask has room for one word behind the last bit.
    int64_t (*diff)(int32_t source_type, int32_t target, const void* source, void* old, int64_t count, uint64_t* mask,
                    int64_t bit, bool update);
    // out = the values whose bit is set, in order; ends exactly at `end`.
    void (*compact)(int64_t bytes, const void* values, const uint64_t* mask, int64_t count, uint8_t* out, uint8_t* end);
    // destination[i - low] = next value for every set bit i of [low, high); stops exactly at `end` of the values.
    void (*expand)(int64_t bytes, const uint64_t* mask, int64_t low, int64_t high, const uint8_t* values,
                   const uint8_t* end, void* destination);
    // Casts values; the dtypes may be equal.
    void (*cast)(int32_t source_type, int32_t target, const void* source, void* out, int64_t count);
};

}  // namespace headway
