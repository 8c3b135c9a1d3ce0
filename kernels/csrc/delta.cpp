// Weight deltas: encoding of changed blocks, their application to tensors, their check, their merge.
// delta_format.py states the format. Blocks are independent, so all of this runs over blocks in parallel.
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace headway {
namespace {

enum Format : uint8_t { SAME = 0, SPARSE = 1, BITMASK = 2, DENSE = 3 };

struct Mask {
    uint64_t words[MASK_WORDS + 1];
};

int64_t block_length(int64_t num_elements, int64_t block) {
    const int64_t left = num_elements - block * BLOCK_ELEMENTS;
    return left < BLOCK_ELEMENTS ? left : BLOCK_ELEMENTS;
}

int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

int64_t mask_bytes(int64_t length) { return (length + 7) / 8; }

// As smallest_format and merged_format of delta_format.py: dense only if all values are known.
Format choose_format(int64_t length, int64_t count, int64_t bytes, bool complete) {
    if (count == 0) return SAME;
    const int64_t sparse = count * (2 + bytes), bits = mask_bytes(length) + count * bytes;
    if (complete && length * bytes < (sparse < bits ? sparse : bits)) return DENSE;
    return sparse <= bits ? SPARSE : BITMASK;
}

// Encodes a block whose new values are `values`; returns the bytes written.
int64_t encode_block(const DeltaKernels& kernels, const uint64_t* mask, int64_t count, const uint8_t* values,
                     int64_t length, int64_t bytes, Format format, uint8_t* out) {
    uint8_t* const begin = out;
    if (format == SAME) return 0;
    if (format == DENSE) {
        std::memcpy(out, values, static_cast<size_t>(length * bytes));
        return length * bytes;
    }
    if (format == BITMASK) {
        std::memcpy(out, mask, static_cast<size_t>(mask_bytes(length)));
        out += mask_bytes(length);
        kernels.compact(bytes, values, mask, length, out, out + count * bytes);
        return out - begin + count * bytes;
    }
    uint8_t* to = out + 2 * count;
    for (int64_t base = 0; base < length; base += 64)
        for (uint64_t word = mask[base >> 6]; word; word &= word - 1) {
            const int64_t i = base + __builtin_ctzll(word);
            const uint16_t index = static_cast<uint16_t>(i);
            std::memcpy(out, &index, 2);
            std::memcpy(to, values + i * bytes, static_cast<size_t>(bytes));
            out += 2;
            to += bytes;
        }
    return to - begin;
}

// Runs encode(block, out) -> bytes over all blocks, each thread over a stretch of its own, which starts in `payload`
// where it would if all blocks before were `most` bytes; then closes the gaps.
template <class Encode>
void encode_blocks(int64_t num_blocks, int64_t most, int64_t num_threads, int64_t* offsets, uint8_t* payload,
                   const Encode& encode) {
    offsets[0] = 0;
    const int64_t stretches = num_threads < 1 ? 1 : num_threads < num_blocks ? num_threads : num_blocks;
    parallel_for(stretches, num_threads, [&](int64_t s) {
        const int64_t first = s * num_blocks / stretches, last = (s + 1) * num_blocks / stretches;
        uint8_t* out = payload + first * most;
        for (int64_t b = first; b < last; b++) {
            const int64_t written = encode(b, out);
            offsets[b + 1] = written;  // lengths for now
            out += written;
        }
    });
    for (int64_t s = 0; s < stretches; s++) {
        const int64_t first = s * num_blocks / stretches, last = (s + 1) * num_blocks / stretches;
        const int64_t at = offsets[first];
        for (int64_t b = first; b < last; b++) offsets[b + 1] += offsets[b];
        const uint8_t* from = payload + first * most;
        if (from != payload + at && offsets[last] > at)
            std::memmove(payload + at, from, static_cast<size_t>(offsets[last] - at));
    }
}

struct Sources {
    const void* const* data;
    const int64_t* starts;  // [count + 1]
    int64_t count;
};

// Compares one block with the sources that meet it.
int64_t diff_block(const DeltaKernels& kernels, const Sources& sources, int32_t source_type, int32_t target,
                   int64_t begin, int64_t length, uint8_t* old, bool update, Mask& mask) {
    std::memset(&mask, 0, sizeof mask);
    int64_t low = 0, high = sources.count;  // the last source that starts at or before `begin`
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (sources.starts[middle] <= begin ? low : high) = middle;
    }
    int64_t changed = 0;
    for (int64_t done = 0; done < length; low++) {
        const int64_t at = begin + done, left = sources.starts[low + 1] - at;
        const int64_t count = left < length - done ? left : length - done;
        if (count <= 0) continue;
        const uint8_t* from = static_cast<const uint8_t*>(sources.data[low]) +
                              (at - sources.starts[low]) * value_bytes(source_type);
        changed += kernels.diff(source_type, target, from, old + done * value_bytes(target), count, mask.words, done,
                                update);
        done += count;
    }
    return changed;
}

// The rank of each word's first bit.
void count_ranks(const uint64_t* words, int64_t length, int32_t* ranks) {
    int32_t rank = 0;
    for (int64_t w = 0; w * 64 < length; w++) {
        ranks[w] = rank;
        rank += __builtin_popcountll(words[w]);
    }
}

int64_t list_bits(const uint64_t* words, int64_t length, uint16_t* positions) {
    int64_t count = 0;
    for (int64_t base = 0; base < length; base += 64)
        for (uint64_t word = words[base >> 6]; word; word &= word - 1)
            positions[count++] = static_cast<uint16_t>(base + __builtin_ctzll(word));
    return count;
}

struct Run {
    int64_t source_start, rows, row_length, source_stride, destination, offset, row_stride, column_stride;
};

// An encoded block, decoded as far as its runs need it.
struct Block {
    Format format;
    int64_t length, count, bytes;
    const uint8_t* indices;  // of SPARSE; may be unaligned
    const uint8_t* values;
    const uint8_t* end;
    Mask mask;
    int32_t ranks[MASK_WORDS];
    uint16_t positions[BLOCK_ELEMENTS];
    bool listed;

    void open(Format kind, const uint8_t* data, int64_t size, int64_t num_elements, int64_t value_size) {
        format = kind;
        length = num_elements;
        bytes = value_size;
        end = data + size;
        indices = values = data;
        listed = false;
        count = length;
        if (format == SPARSE) {
            count = size / (2 + bytes);
            values = data + 2 * count;
        } else if (format == BITMASK) {
            mask.words[(length - 1) / 64] = 0;
            std::memcpy(mask.words, data, static_cast<size_t>(mask_bytes(length)));
            values = data + mask_bytes(length);
            count = (size - mask_bytes(length)) / bytes;
            count_ranks(mask.words, length, ranks);
        }
    }

    // Changed elements before position i.
    int64_t rank(int64_t i) const {
        if (format == DENSE) return i;
        if (format == BITMASK) {
            if (i >= length) return count;
            const uint64_t below = mask.words[i / 64] & ((uint64_t{1} << (i & 63)) - 1);
            return ranks[i / 64] + __builtin_popcountll(below);
        }
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (index(middle) < i)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }

    int64_t index(int64_t rank) const {
        uint16_t i;
        std::memcpy(&i, indices + 2 * rank, 2);
        return i;
    }

    // The position of every changed element, whatever the format; DENSE needs none.
    void list() {
        if (listed || format == DENSE) return;
        listed = true;
        if (format == SPARSE)
            std::memcpy(positions, indices, static_cast<size_t>(2 * count));
        else
            list_bits(mask.words, length, positions);
    }
};

// Plain stores: they do not wait for the lines that they miss, so asking for lines ahead gains nothing.
template <int64_t bytes>
void scatter(const uint8_t* indices, const uint8_t* values, int64_t count, int64_t base, uint8_t* destination) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t at;
        std::memcpy(&at, indices + 2 * i, 2);
        std::memcpy(destination + (at - base) * bytes, values + i * bytes, static_cast<size_t>(bytes));
    }
}

// Writes the changed elements of [low, high) of the block to destination[0 .. high - low), same dtype.
void apply_contiguous(const DeltaKernels& kernels, const Block& block, int64_t low, int64_t high,
                      uint8_t* destination) {
    const int64_t first = block.rank(low), bytes = block.bytes;
    const uint8_t* values = block.values + first * bytes;
    if (block.format == DENSE) {
        std::memcpy(destination, values, static_cast<size_t>((high - low) * bytes));
    } else if (block.format == BITMASK) {
        kernels.expand(bytes, block.mask.words, low, high, values, block.end, destination);
    } else {
        const int64_t count = block.rank(high) - first;
        if (bytes == 2)
            scatter<2>(block.indices + 2 * first, values, count, low, destination);
        else
            scatter<4>(block.indices + 2 * first, values, count, low, destination);
    }
}

// Any run, any dtype: element by element, or row by row where the block is dense.
void apply_run(const DeltaKernels& kernels, Block& block, int64_t begin, const Run& run, int32_t source_type,
               int32_t target, uint8_t* destination) {
    const int64_t out_bytes = value_bytes(target);
    const int64_t run_end = run.source_start + (run.rows - 1) * run.source_stride + run.row_length;
    const int64_t low = run.source_start > begin ? run.source_start - begin : 0;
    const int64_t high = run_end < begin + block.length ? run_end - begin : block.length;
    if (low >= high) return;
    if (block.format == DENSE && run.column_stride == 1) {
        for (int64_t r = (begin + low - run.source_start) / run.source_stride; r < run.rows; r++) {
            const int64_t row = run.source_start + r * run.source_stride - begin;
            const int64_t from = row > low ? row : low;
            const int64_t to = row + run.row_length < high ? row + run.row_length : high;
            if (row >= high) break;
            if (from >= to) continue;
            kernels.cast(source_type, target, block.values + from * block.bytes,
                         destination + (run.offset + r * run.row_stride + from - row) * out_bytes, to - from);
        }
        return;
    }
    block.list();
    int64_t row = -1, row_begin = 0, row_end = 0;  // the row that the last element was in, as positions in the block
    for (int64_t k = block.rank(low), last = block.rank(high); k < last; k++) {
        const int64_t i = block.format == DENSE ? k : block.positions[k];
        if (row < 0 || i >= row_begin + run.source_stride) {
            row = (begin + i - run.source_start) / run.source_stride;
            row_begin = run.source_start + row * run.source_stride - begin;
            row_end = row_begin + run.row_length;
        }
        if (i >= row_end) continue;
        const int64_t at = run.offset + row * run.row_stride + (i - row_begin) * run.column_stride;
        if (source_type == target)
            std::memcpy(destination + at * out_bytes, block.values + k * block.bytes, static_cast<size_t>(out_bytes));
        else
            kernels.cast(source_type, target, block.values + k * block.bytes, destination + at * out_bytes, 1);
    }
}

// Elements that the block carries, or -1 if it is malformed.
int64_t check_block(uint8_t format, const uint8_t* data, int64_t size, int64_t length, int64_t bytes) {
    if (format == SAME) return size == 0 ? 0 : -1;
    if (format == DENSE) return size == length * bytes ? length : -1;
    if (format == SPARSE) {
        const int64_t count = size / (2 + bytes);
        if (size % (2 + bytes) || count < 1 || count > length) return -1;
        int32_t before = -1, falls = 0;
        for (int64_t i = 0; i < count; i++) {
            uint16_t index;
            std::memcpy(&index, data + 2 * i, 2);
            falls |= index <= before;
            before = index;
        }
        return falls || before >= length ? -1 : count;
    }
    if (format != BITMASK || size < mask_bytes(length)) return -1;
    Mask mask;
    mask.words[(length - 1) / 64] = 0;
    std::memcpy(mask.words, data, static_cast<size_t>(mask_bytes(length)));
    if (length % 64 && mask.words[length / 64] >> (length % 64)) return -1;
    int64_t count = 0;
    for (int64_t w = 0; w * 64 < length; w++) count += __builtin_popcountll(mask.words[w]);
    return count > 0 && size == mask_bytes(length) + count * bytes ? count : -1;
}

// Lays an encoded block over `values`, and marks what it touched.
void overlay(const DeltaKernels& kernels, Block& block, uint8_t format, const HeadwayDelta& delta, int64_t index,
             uint8_t* values, Mask& touched) {
    if (format == SAME) return;
    const int64_t length = block_length(delta.num_elements, index);
    block.open(static_cast<Format>(format), delta.payload + delta.offsets[index],
               delta.offsets[index + 1] - delta.offsets[index], length, value_bytes(delta.dtype));
    apply_contiguous(kernels, block, 0, length, values);
    if (format == DENSE) {
        for (int64_t w = 0; w * 64 < length; w++)
            touched.words[w] = length - w * 64 >= 64 ? ~uint64_t{0} : (uint64_t{1} << (length - w * 64)) - 1;
    } else if (format == BITMASK) {
        for (int64_t w = 0; w * 64 < length; w++) touched.words[w] |= block.mask.words[w];
    } else {
        for (int64_t k = 0; k < block.count; k++) {
            const int64_t i = block.index(k);
            touched.words[i / 64] |= uint64_t{1} << (i & 63);
        }
    }
}

// A thread's decoded block; 180 KiB are too much for some stacks.
Block& thread_block() {
    static thread_local Block* block = nullptr;
    static thread_local struct Owner {
        ~Owner() { delete block; }
    } owner;
    (void)owner;
    if (!block) block = new Block;
    return *block;
}

int64_t count_blocks(int64_t num_elements) { return (num_elements + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS; }

}  // namespace
}  // namespace headway

using namespace headway;

int64_t headway_delta_encode(const void* const* sources, const int64_t* source_starts, int64_t num_sources,
                             int32_t source_type, int32_t dtype, void* old, int64_t num_elements, int update,
                             uint8_t* formats, int64_t* offsets, uint8_t* payload, int64_t num_threads) {
    const DeltaKernels& kernels = pick_kernels(0).delta;
    const int64_t bytes = value_bytes(dtype);
    const Sources given = {sources, source_starts, num_sources};
    std::atomic<int64_t> changed{0};
    encode_blocks(count_blocks(num_elements), BLOCK_ELEMENTS * bytes, num_threads, offsets, payload,
                  [&](int64_t b, uint8_t* out) {
                      Mask mask;
                      const int64_t length = block_length(num_elements, b), begin = b * BLOCK_ELEMENTS;
                      uint8_t* before = static_cast<uint8_t*>(old) + begin * bytes;
                      const int64_t count = diff_block(kernels, given, source_type, dtype, begin, length, before,
                                                       update != 0, mask);
                      const uint8_t* values = before;
                      if (!update) values = static_cast<const uint8_t*>(sources[0]) + begin * bytes;
                      const Format format = choose_format(length, count, bytes, true);
                      formats[b] = format;
                      changed.fetch_add(count, std::memory_order_relaxed);
                      return encode_block(kernels, mask.words, count, values, length, bytes, format, out);
                  });
    return changed.load();
}

void headway_delta_apply(const HeadwayDelta* delta, void* destination, int64_t num_threads) {
    const DeltaKernels& kernels = pick_kernels(0).delta;
    const int64_t bytes = value_bytes(delta->dtype);
    const int64_t num_blocks = count_blocks(delta->num_elements), group = 16;
    uint8_t* const to = static_cast<uint8_t*>(destination);
    // waking a thread costs more than it takes to write a few thousand values
    if (delta->offsets[num_blocks] < (64 << 10)) num_threads = 1;
    parallel_for((num_blocks + group - 1) / group, num_threads, [&](int64_t g) {
        const int64_t first = g * group, last = first + group < num_blocks ? first + group : num_blocks;
        for (int64_t b = first; b < last; b++) {
            const uint8_t* data = delta->payload + delta->offsets[b];
            const int64_t size = delta->offsets[b + 1] - delta->offsets[b], length = block_length(delta->num_elements, b);
            uint8_t* out = to + b * BLOCK_ELEMENTS * bytes;
            if (delta->formats[b] == SPARSE) {
                const int64_t count = size / (2 + bytes);
                bytes == 2 ? scatter<2>(data, data + 2 * count, count, 0, out)
                           : scatter<4>(data, data + 2 * count, count, 0, out);
            } else if (delta->formats[b] != SAME) {
                Block& block = thread_block();
                block.open(static_cast<Format>(delta->formats[b]), data, size, length, bytes);
                apply_contiguous(kernels, block, 0, length, out);
            }
        }
    });
}

void headway_delta_apply_slices(const HeadwayDelta* delta, const int64_t* runs, const int64_t* block_offsets,
                                const int64_t* block_runs, void* const* destinations, const int32_t* dtypes,
                                int64_t num_threads) {
    const DeltaKernels& kernels = pick_kernels(0).delta;
    parallel_for(count_blocks(delta->num_elements), num_threads, [&](int64_t b) {
        if (delta->formats[b] == SAME || block_offsets[b] == block_offsets[b + 1]) return;
        Block& block = thread_block();
        const int64_t begin = b * BLOCK_ELEMENTS;
        block.open(static_cast<Format>(delta->formats[b]), delta->payload + delta->offsets[b],
                   delta->offsets[b + 1] - delta->offsets[b], block_length(delta->num_elements, b),
                   value_bytes(delta->dtype));
        for (int64_t k = block_offsets[b]; k < block_offsets[b + 1]; k++) {
            Run run;
            std::memcpy(&run, runs + block_runs[k] * 8, sizeof run);
            uint8_t* destination = static_cast<uint8_t*>(destinations[run.destination]);
            const int32_t target = dtypes[run.destination];
            if (run.rows == 1 && run.column_stride == 1 && target == delta->dtype) {
                const int64_t low = run.source_start > begin ? run.source_start - begin : 0;
                const int64_t end = run.source_start + run.row_length - begin;
                const int64_t high = end < block.length ? end : block.length;
                const int64_t at = run.offset + begin + low - run.source_start;
                apply_contiguous(kernels, block, low, high, destination + at * block.bytes);
            } else {
                apply_run(kernels, block, begin, run, delta->dtype, target, destination);
            }
        }
    });
}

int64_t headway_delta_check(const HeadwayDelta* delta, int64_t* least, int64_t* most, int64_t num_threads) {
    const int64_t bytes = value_bytes(delta->dtype), num_blocks = count_blocks(delta->num_elements);
    std::atomic<int64_t> sparse{0}, all{0}, bad{num_blocks};
    parallel_for(num_blocks, num_threads, [&](int64_t b) {
        const int64_t count =
            check_block(delta->formats[b], delta->payload + delta->offsets[b],
                        delta->offsets[b + 1] - delta->offsets[b], block_length(delta->num_elements, b), bytes);
        if (count < 0) {
            int64_t seen = bad.load();
            while (b < seen && !bad.compare_exchange_weak(seen, b)) {
            }
            return;
        }
        all.fetch_add(count, std::memory_order_relaxed);
        if (delta->formats[b] != DENSE) sparse.fetch_add(count, std::memory_order_relaxed);
    });
    *least = sparse.load();
    *most = all.load();
    return bad.load() < num_blocks ? bad.load() : -1;
}

int64_t headway_delta_merge(const HeadwayDelta* older, const HeadwayDelta* newer, uint8_t* formats, int64_t* offsets,
                            uint8_t* payload, int64_t num_threads) {
    const DeltaKernels& kernels = pick_kernels(0).delta;
    const int64_t bytes = value_bytes(older->dtype), most = BLOCK_ELEMENTS * bytes + BLOCK_ELEMENTS / 8;
    std::atomic<int64_t> carried{0};
    encode_blocks(count_blocks(older->num_elements), most, num_threads, offsets, payload, [&](int64_t b, uint8_t* out) {
        const int64_t length = block_length(older->num_elements, b);
        const uint8_t old_format = older->formats[b], new_format = newer->formats[b];
        Block& block = thread_block();
        if (old_format == SAME || new_format == SAME || new_format == DENSE) {
            const HeadwayDelta& only = old_format == SAME || new_format == DENSE ? *newer : *older;
            const int64_t size = only.offsets[b + 1] - only.offsets[b];
            formats[b] = only.formats[b];
            if (size) {
                block.open(static_cast<Format>(formats[b]), only.payload + only.offsets[b], size, length, bytes);
                carried.fetch_add(block.count, std::memory_order_relaxed);
                std::memcpy(out, only.payload + only.offsets[b], static_cast<size_t>(size));
            }
            return size;
        }
        Mask touched = {};
        uint8_t* values = reinterpret_cast<uint8_t*>(thread_scratch(BLOCK_ELEMENTS));
        overlay(kernels, block, old_format, *older, b, values, touched);
        overlay(kernels, block, new_format, *newer, b, values, touched);
        int64_t count = 0;
        for (int64_t w = 0; w * 64 < length; w++) count += __builtin_popcountll(touched.words[w]);
        const Format format = choose_format(length, count, bytes, count == length);
        formats[b] = format;
        carried.fetch_add(count, std::memory_order_relaxed);
        return encode_block(kernels, touched.words, count, values, length, bytes, format, out);
    });
    return carried.load();
}
