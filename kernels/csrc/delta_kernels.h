// Comparison, compaction and expansion of 16- and 32-bit values under a bit mask.
//
// Included once per instruction set, inside that set's namespace, after convert.h.


template <int source_type, int target>
HEADWAY_INLINE uint64_t diff_word(const uint8_t* source, uint8_t* old, bool update) {
    uint64_t word = 0;
    constexpr bool wide = target == FLOAT32;
#if defined(__AVX512F__)
    constexpr int step = wide ? 16 : 32;
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += step) {
        __m512i fresh;
        if constexpr (source_type == target)
            fresh = _mm512_loadu_si512(source + i * (wide ? 4 : 2));
        else
            fresh = narrow_vector<target>((const float*)(source + i * 4));
        uint8_t* at = old + i * (wide ? 4 : 2);
        const __m512i before = _mm512_loadu_si512(at);
        const uint64_t differs = wide ? (uint64_t)_mm512_cmpneq_epi32_mask(fresh, before)
                                      : (uint64_t)_mm512_cmpneq_epi16_mask(fresh, before);
        // A line that did not change is not written: where little changes that saves its way back to memory.
        if (update && differs) _mm512_storeu_si512(at, fresh);
        word |= differs << i;
    }
#elif defined(__AVX2__)
    constexpr int step = wide ? 8 : 16;
#pragma GCC unroll 8
    for (int i = 0; i < 64; i += step) {
        __m256i fresh;
        if constexpr (source_type == target)
            fresh = _mm256_loadu_si256((const __m256i*)(source + i * (wide ? 4 : 2)));
        else
            fresh = narrow_vector<target>((const float*)(source + i * 4));
        __m256i* at = (__m256i*)(old + i * (wide ? 4 : 2));
        const __m256i before = _mm256_loadu_si256(at);
        uint64_t differs;
        if constexpr (wide) {
            const __m256i same = _mm256_cmpeq_epi32(fresh, before);
            differs = 0xFFu & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same));
        } else {
            const __m256i same = _mm256_cmpeq_epi16(fresh, before);
            const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(same), _mm256_extracti128_si256(same, 1));
            differs = 0xFFFFu & ~(uint32_t)_mm_movemask_epi8(bytes);
        }
        if (update && differs) _mm256_storeu_si256(at, fresh);
        word |= differs << i;
    }
#else
    uint8_t fresh[64 * 4];
    cast_values(source_type, target, source, fresh, 64);
    uint8_t differs[64];
    for (int i = 0; i < 64; i++)
        differs[i] = wide ? load_u32(fresh + 4 * i) != load_u32(old + 4 * i)
                          : load_u16(fresh + 2 * i) != load_u16(old + 2 * i);
    for (int i = 0; i < 64; i += 8) {
        uint64_t eight;  // bytes of 0 or 1; the product gathers their bits in its top byte, the first lowest
        __builtin_memcpy(&eight, differs + i, 8);
        word |= (eight * 0x0102040810204080u >> 56) << i;
    }
    if (update && word) __builtin_memcpy(old, fresh, wide ? 256 : 128);
#endif
    return word;
}

template <int source_type, int target>
static int64_t diff_values(const uint8_t* source, uint8_t* old, int64_t count, uint64_t* mask, int64_t bit,
                           bool update) {
    constexpr int64_t in_bytes = source_type == FLOAT32 ? 4 : 2, out_bytes = target == FLOAT32 ? 4 : 2;
    const int shift = (int)(bit & 63);
    uint64_t* at = mask + (bit >> 6);
    int64_t changed = 0, i = 0;
    for (; i + 64 <= count; i += 64, at++) {
        const uint64_t word = diff_word<source_type, target>(source + i * in_bytes, old + i * out_bytes, update);
        changed += __builtin_popcountll(word);
        at[0] |= word << shift;
        if (shift) at[1] |= word >> (64 - shift);
    }
    if (i < count) {  // the rest through a copy, so that nothing behind the end is read
        const int64_t left = count - i;
        uint8_t fresh[64 * 4] = {}, before[64 * 4] = {};
        cast_values(source_type, target, source + i * in_bytes, fresh, left);
        __builtin_memcpy(before, old + i * out_bytes, (left * out_bytes));
        const uint64_t word = diff_word<target, target>(fresh, before, false);
        if (update) __builtin_memcpy(old + i * out_bytes, fresh, (left * out_bytes));
        changed += __builtin_popcountll(word);
        at[0] |= word << shift;
        if (shift && left > 64 - shift) at[1] |= word >> (64 - shift);
    }
    return changed;
}

static int64_t diff_span(int32_t source_type, int32_t target, const void* source, void* old, int64_t count,
                         uint64_t* mask, int64_t bit, bool update) {
    const uint8_t* in = (const uint8_t*)source;
    uint8_t* to = (uint8_t*)old;
    if (source_type != target)
        return target == BFLOAT16 ? diff_values<FLOAT32, BFLOAT16>(in, to, count, mask, bit, update)
                                  : diff_values<FLOAT32, FLOAT16>(in, to, count, mask, bit, update);
    return target == FLOAT32 ? diff_values<FLOAT32, FLOAT32>(in, to, count, mask, bit, update)
                             : diff_values<BFLOAT16, BFLOAT16>(in, to, count, mask, bit, update);
}


#if defined(__AVX2__)
struct ShuffleTables {
    uint8_t compact16[256][16];  // byte shuffles that move the chosen of eight 16-bit values to the front
    uint8_t expand16[256][16];   // and back; 0x80 where a value is not chosen
    uint8_t compact32[256][8];   // the same as indices of 32-bit values
    uint8_t expand32[256][8];

    constexpr ShuffleTables() : compact16(), expand16(), compact32(), expand32() {
        for (int m = 0; m < 256; m++) {
            int rank = 0;
            for (int i = 0; i < 8; i++) {
                expand16[m][2 * i] = expand16[m][2 * i + 1] = 0x80;
                if (!(m >> i & 1)) continue;
                expand16[m][2 * i] = (uint8_t)(2 * rank);
                expand16[m][2 * i + 1] = (uint8_t)(2 * rank + 1);
                expand32[m][i] = (uint8_t)rank;
                compact16[m][2 * rank] = (uint8_t)(2 * i);
                compact16[m][2 * rank + 1] = (uint8_t)(2 * i + 1);
                compact32[m][rank] = (uint8_t)i;
                rank++;
            }
        }
    }
};
static constexpr ShuffleTables shuffles;

HEADWAY_INLINE __m256i indices_of(const uint8_t* table) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)table));
}
#endif

// out[0 .. popcount) of eight values; may write 8 * bytes bytes.
HEADWAY_INLINE void compact_eight(int64_t bytes, const uint8_t* values, uint32_t m, uint8_t* out) {
#if defined(__AVX2__)
    if (bytes == 2) {
        const __m128i shuffle = _mm_loadu_si128((const __m128i*)shuffles.compact16[m]);
        _mm_storeu_si128((__m128i*)out, _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)values), shuffle));
    } else {
        const __m256i v = _mm256_loadu_si256((const __m256i*)values);
        _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(v, indices_of(shuffles.compact32[m])));
    }
#else
    for (; m; m &= m - 1, out += bytes) __builtin_memcpy(out, values + __builtin_ctz(m) * bytes, bytes);
#endif
}

// The chosen of eight values replaced by the next ones; reads 8 * bytes bytes of both.
HEADWAY_INLINE void expand_eight(int64_t bytes, const uint8_t* values, uint32_t m, uint8_t* to) {
#if defined(__AVX2__)
    if (bytes == 2) {
        const __m128i shuffle = _mm_loadu_si128((const __m128i*)shuffles.expand16[m]);
        const __m128i fresh = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)values), shuffle);
        _mm_storeu_si128((__m128i*)to, _mm_blendv_epi8(fresh, _mm_loadu_si128((const __m128i*)to), shuffle));
    } else {
        const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)m), bits), bits);
        const __m256i v = _mm256_loadu_si256((const __m256i*)values);
        const __m256i fresh = _mm256_permutevar8x32_epi32(v, indices_of(shuffles.expand32[m]));
        const __m256i before = _mm256_loadu_si256((const __m256i*)to);
        _mm256_storeu_si256((__m256i*)to, _mm256_blendv_epi8(before, fresh, chosen));
    }
#else
    for (; m; m &= m - 1, values += bytes) __builtin_memcpy(to + __builtin_ctz(m) * bytes, values, bytes);
#endif
}

template <int64_t bytes>
static void compact_values(const uint8_t* values, const uint64_t* mask, int64_t count, uint8_t* out, uint8_t* end) {
    for (int64_t base = 0; base < count; base += 64) {
        const uint64_t word = mask[base >> 6];
        for (int64_t i = 0; i < 64 && (word >> i); i += 8) {
            const uint32_t m = (uint32_t)(word >> i) & 255u;
            const uint8_t* from = values + (base + i) * bytes;
            if (base + i + 8 <= count && out + 8 * bytes <= end) {
                compact_eight(bytes, from, m, out);
                out += __builtin_popcount(m) * bytes;
                continue;
            }
            for (uint32_t left = m; left; left &= left - 1, out += bytes)
                __builtin_memcpy(out, from + __builtin_ctz(left) * bytes, bytes);
        }
    }
}

static void compact_span(int64_t bytes, const void* values, const uint64_t* mask, int64_t count, uint8_t* out,
                         uint8_t* end) {
    if (bytes == 2)
        compact_values<2>((const uint8_t*)values, mask, count, out, end);
    else
        compact_values<4>((const uint8_t*)values, mask, count, out, end);
}

template <int64_t bytes>
static void expand_values(const uint64_t* mask, int64_t low, int64_t high, const uint8_t* values, const uint8_t* end,
                          uint8_t* destination) {
    const uint8_t* marks = (const uint8_t*)mask;  // little-endian: byte j holds bits 8 j .. 8 j + 7
    for (int64_t base = low & ~int64_t{7}; base < high; base += 8) {
        uint32_t m = marks[base >> 3];
        if (base < low) m &= 255u << (low - base);
        if (base + 8 > high) m &= 255u >> (base + 8 - high);
        if (base >= low && base + 8 <= high && values + 8 * bytes <= end) {  // even if m is 0: that is hard to predict
            expand_eight(bytes, values, m, destination + (base - low) * bytes);
            values += __builtin_popcount(m) * bytes;
            continue;
        }
        for (; m; m &= m - 1, values += bytes)
            __builtin_memcpy(destination + (base + __builtin_ctz(m) - low) * bytes, values, bytes);
    }
}

static void expand_span(int64_t bytes, const uint64_t* mask, int64_t low, int64_t high, const uint8_t* values,
                        const uint8_t* end, void* destination) {
    if (bytes == 2)
        expand_values<2>(mask, low, high, values, end, (uint8_t*)destination);
    else
        expand_values<4>(mask, low, high, values, end, (uint8_t*)destination);
}

static constexpr DeltaKernels delta_kernels = {diff_span, compact_span, expand_span, cast_values};
