// Weight deltas on a GPU: cast, compare, encode, apply. One thread block handles one block of 65,536 elements.
//
// Encoding takes three launches: compare marks the changed elements (one bit each) and counts them, layout turns the
// counts into formats and offsets, encode writes the payload from the marks, reading only the values that changed.
// Source of the format: headway_kernels/delta_format.py; oracle: delta_reference.py, equal bit for bit.
#include "bits.h"
#include "block_scan.h"
#include "headway_cuda.h"

namespace headway {
namespace {

constexpr int64_t kBlockElements = 65536;
constexpr int kThreads = 256;
constexpr int kGroup = 8;  // elements that a thread compares at a time: one byte of marks
constexpr int64_t kMarkBytes = kBlockElements / 8;
constexpr int kWordsPerThread = static_cast<int>(kBlockElements / 32 / kThreads);

enum Format : uint8_t { kSame = 0, kSparse = 1, kBitmask = 2, kDense = 3 };

HEADWAY_INLINE int64_t block_length(int64_t num_elements, int64_t block) {
    return min_of(kBlockElements, num_elements - block * kBlockElements);
}

// ---- compare ----

// The tensor's next values: pieces whose elements follow each other.
struct Pieces {
    const void* const* data;
    const int64_t* starts;
    int64_t count;
};

// The piece that holds element `index`; pieces may be empty.
__device__ __forceinline__ int64_t find_piece(const Pieces& pieces, int64_t index) {
    int64_t low = 0, high = pieces.count;  // starts[low] <= index < starts[high]
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (pieces.starts[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// A source of W-byte values that becomes values of type Bits.
struct CastBfloat16 {
    using Source = uint32_t;
    using Bits = uint16_t;
    HEADWAY_INLINE static Bits cast(Source bits) { return bfloat16_from_bits(bits); }
};
struct CastFloat16 {
    using Source = uint32_t;
    using Bits = uint16_t;
    HEADWAY_INLINE static Bits cast(Source bits) { return float16_from_bits(bits); }
};
struct Copy16 {
    using Source = uint16_t;
    using Bits = uint16_t;
    HEADWAY_INLINE static Bits cast(Source bits) { return bits; }
};
struct Copy32 {
    using Source = uint32_t;
    using Bits = uint32_t;
    HEADWAY_INLINE static Bits cast(Source bits) { return bits; }
};

// kGroup values at `from`, which is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void load_group(const T* from, T* values) {
    constexpr int kVectors = kGroup * static_cast<int>(sizeof(T)) / 16;
    uint4 raw[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
    memcpy(values, raw, sizeof(raw));
}

template <class T>
__device__ __forceinline__ void store_group(T* to, const T* values) {
    constexpr int kVectors = kGroup * static_cast<int>(sizeof(T)) / 16;
    uint4 raw[kVectors];
    memcpy(raw, values, sizeof(raw));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(to)[i] = raw[i];
}

// Loads up to kGroup new values from element `first` on, across the borders of pieces.
template <class Cast>
__device__ __forceinline__ void load_new(const Pieces& pieces, int64_t& piece, int64_t first, int count,
                                         typename Cast::Bits* values) {
    using Source = typename Cast::Source;
    while (piece + 1 < pieces.count && pieces.starts[piece + 1] <= first) ++piece;
    const Source* data = static_cast<const Source*>(pieces.data[piece]) + (first - pieces.starts[piece]);
    if (count == kGroup && first + kGroup <= pieces.starts[piece + 1] && is_aligned(data, 16)) {
        Source raw[kGroup];
        load_group(data, raw);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) values[i] = Cast::cast(raw[i]);
        return;
    }
    int64_t at = piece;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        if (i < count) {
            int64_t index = first + i;
            while (at + 1 < pieces.count && pieces.starts[at + 1] <= index) ++at;
            values[i] = Cast::cast(static_cast<const Source*>(pieces.data[at])[index - pieces.starts[at]]);
        }
    }
}

// Compares up to kGroup elements; returns their marks, and leaves the new bits in `old` where it is asked to.
template <class Bits>
__device__ __forceinline__ unsigned compare_group(const Bits* fresh, Bits* old, int count, bool update) {
    unsigned marks = 0;
    if (count == kGroup && is_aligned(old, 16)) {
        Bits before[kGroup];
        load_group(old, before);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) marks |= (fresh[i] != before[i] ? 1u : 0u) << i;
        if (update && marks) store_group(old, fresh);
        return marks;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        if (i < count && fresh[i] != old[i]) {
            marks |= 1u << i;
            if (update) old[i] = fresh[i];
        }
    }
    return marks;
}

template <class Cast>
__global__ void __launch_bounds__(kThreads, 4)
    delta_compare(Pieces pieces, typename Cast::Bits* old, int64_t num_elements, int update, int64_t first_block,
                  uint8_t* marks, int32_t* counts) {
    HEADWAY_SHARED(int, warp_sums, kThreads / kWarpSize);
    int64_t local = blockIdx.x, block = first_block + local;
    int64_t base = block * kBlockElements;
    int length = static_cast<int>(block_length(num_elements, block));
    int64_t piece = find_piece(pieces, base);
    int changed = 0;
    for (int group = static_cast<int>(threadIdx.x); group < kMarkBytes; group += kThreads) {
        int at = group * kGroup, count = min_of(kGroup, length - at);
        unsigned found = 0;
        if (count > 0) {
            typename Cast::Bits fresh[kGroup];
            load_new<Cast>(pieces, piece, base + at, count, fresh);
            found = compare_group(fresh, old + base + at, count, update != 0);
        }
        marks[local * kMarkBytes + group] = static_cast<uint8_t>(found);
        changed += __popc(found);
    }
    int total;
    block_exclusive_sum<kThreads>(changed, total, warp_sums);
    if (threadIdx.x == 0) counts[local] = total;
}

// ---- layout ----

struct Choice {
    Format format;
    int64_t bytes;
};

// The format of fewest bytes, the first of equals.
HEADWAY_INLINE Choice smallest_format(int64_t length, int64_t changed, int64_t value_bytes) {
    Choice best{kSame, 0};
    if (changed == 0) return best;
    best = Choice{kSparse, changed * (2 + value_bytes)};
    int64_t bitmask = ceil_div(length, 8) + changed * value_bytes, dense = length * value_bytes;
    if (bitmask < best.bytes) best = Choice{kBitmask, bitmask};
    if (dense < best.bytes) best = Choice{kDense, dense};
    return best;
}

constexpr int kLayoutThreads = 1024;

// One thread block walks over all counts: blocks are 65,536 times fewer than elements.
__global__ void __launch_bounds__(kLayoutThreads)
    delta_layout(const int32_t* counts, int64_t num_elements, int64_t num_blocks, int64_t value_bytes, uint8_t* formats,
                 int64_t* offsets, int64_t* num_changed) {
    HEADWAY_SHARED(int64_t, warp_sums, kLayoutThreads / kWarpSize);
    int64_t at = 0, changed = 0;
    for (int64_t first = 0; first < num_blocks; first += kLayoutThreads) {
        int64_t block = first + threadIdx.x;
        int64_t count = block < num_blocks ? counts[block] : 0;
        Choice choice = smallest_format(block < num_blocks ? block_length(num_elements, block) : 0, count, value_bytes);
        int64_t bytes, number;
        int64_t before = block_exclusive_sum<kLayoutThreads>(choice.bytes, bytes, warp_sums);
        block_exclusive_sum<kLayoutThreads>(count, number, warp_sums);
        if (block < num_blocks) {
            formats[block] = choice.format;
            offsets[block] = at + before;
        }
        at += bytes;
        changed += number;
    }
    if (threadIdx.x == 0) {
        offsets[num_blocks] = at;
        num_changed[0] = changed;
    }
}

// ---- encode and decode one block ----

// A value of the payload need not be aligned: blocks follow each other without padding.
template <class Bits>
__device__ __forceinline__ void put(uint8_t* to, Bits value) {
    if (is_aligned(to, sizeof(Bits))) {
        *reinterpret_cast<Bits*>(to) = value;
        return;
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Bits)); ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <class Bits>
__device__ __forceinline__ Bits get(const uint8_t* from) {
    if (is_aligned(from, sizeof(Bits))) return *reinterpret_cast<const Bits*>(from);
    uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Bits)); ++i) value |= static_cast<uint32_t>(from[i]) << (8 * i);
    return static_cast<Bits>(value);
}

// 32 marks from byte `at` on; bytes from `end` on count as 0.
__device__ __forceinline__ uint32_t mark_word(const uint8_t* marks, int64_t at, int64_t end) {
    if (at + 4 <= end && is_aligned(marks + at, 4)) return *reinterpret_cast<const uint32_t*>(marks + at);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (at + i < end) word |= static_cast<uint32_t>(marks[at + i]) << (8 * i);
    return word;
}

// Calls visit(position in the block, rank among the changed) for every mark, ranks rising with positions. A thread
// takes words 32 apart within its warp's stretch, so that neighbouring lanes touch neighbouring memory.
template <class Array, class Visit>
__device__ __forceinline__ void for_each_mark(const uint8_t* marks, int64_t mark_bytes, Array& warp_sums, Visit visit) {
    int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int first_word = warp * kWordsPerThread * kWarpSize + lane;
    uint32_t words[kWordsPerThread];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
        words[i] = mark_word(marks, int64_t{4} * (first_word + i * kWarpSize), mark_bytes);
        count += __popc(words[i]);
    }
    int of_warp = warp_sum(count);
    if (lane == 0) warp_sums[warp] = of_warp;
    __syncthreads();
    int rank = 0;
    for (int i = 0; i < warp; ++i) rank += warp_sums[i];
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
        int number = __popc(words[i]);
        int at = rank + warp_exclusive_sum(number);
        rank += warp_sum(number);
        for (uint32_t word = words[i]; word; word &= word - 1u)
            visit(32 * (first_word + i * kWarpSize) + __ffs(static_cast<int>(word)) - 1, at++);
    }
}

template <class Bits>
__global__ void __launch_bounds__(kThreads, 4)
    delta_encode(const Bits* values, int64_t num_elements, const uint8_t* marks, const uint8_t* formats,
                 const int64_t* offsets, int64_t first_block, uint8_t* payload) {
    HEADWAY_SHARED(int, warp_sums, kThreads / kWarpSize);
    int64_t local = blockIdx.x, block = first_block + local;
    uint8_t format = formats[block];
    if (format == kSame) return;
    const Bits* from = values + block * kBlockElements;
    int length = static_cast<int>(block_length(num_elements, block));
    uint8_t* to = payload + offsets[block];
    if (format == kDense) {
        for (int i = static_cast<int>(threadIdx.x); i < length; i += kThreads) put(to + i * sizeof(Bits), from[i]);
        return;
    }
    const uint8_t* here = marks + local * kMarkBytes;
    int64_t mark_bytes = ceil_div(length, 8);
    if (format == kBitmask) {
        for (int i = static_cast<int>(threadIdx.x); i < mark_bytes; i += kThreads) to[i] = here[i];
        uint8_t* data = to + mark_bytes;
        for_each_mark(here, mark_bytes, warp_sums,
                      [&](int position, int rank) { put(data + rank * sizeof(Bits), from[position]); });
        return;
    }
    int64_t changed = (offsets[block + 1] - offsets[block]) / static_cast<int64_t>(2 + sizeof(Bits));
    uint8_t* data = to + 2 * changed;
    for_each_mark(here, mark_bytes, warp_sums, [&](int position, int rank) {
        put(to + rank * 2, static_cast<uint16_t>(position));
        put(data + rank * sizeof(Bits), from[position]);
    });
}

// Calls write(position in the block, new bits) for every changed element of a block.
template <class Bits, class Array, class Write>
__device__ __forceinline__ void for_each_change(uint8_t format, const uint8_t* data, int64_t bytes, int length,
                                                Array& warp_sums, Write write) {
    if (format == kDense) {
        for (int i = static_cast<int>(threadIdx.x); i < length; i += kThreads) write(i, get<Bits>(data + i * sizeof(Bits)));
    } else if (format == kSparse) {
        int changed = static_cast<int>(bytes / static_cast<int64_t>(2 + sizeof(Bits)));
        const uint8_t* values = data + 2 * changed;
        for (int i = static_cast<int>(threadIdx.x); i < changed; i += kThreads)
            write(static_cast<int>(get<uint16_t>(data + 2 * i)), get<Bits>(values + i * sizeof(Bits)));
    } else if (format == kBitmask) {
        int64_t mark_bytes = ceil_div(length, 8);
        for_each_mark(data, mark_bytes, warp_sums, [&](int position, int rank) {
            write(position, get<Bits>(data + mark_bytes + rank * sizeof(Bits)));
        });
    }
}

template <class Bits>
__global__ void __launch_bounds__(kThreads, 4)
    delta_apply(const uint8_t* formats, const int64_t* offsets, const uint8_t* payload, int64_t num_elements,
                int64_t first_block, Bits* destination) {
    HEADWAY_SHARED(int, warp_sums, kThreads / kWarpSize);
    int64_t block = first_block + blockIdx.x;
    int length = static_cast<int>(block_length(num_elements, block));
    Bits* to = destination + block * kBlockElements;
    for_each_change<Bits>(formats[block], payload + offsets[block], offsets[block + 1] - offsets[block], length, warp_sums,
                          [&](int position, Bits bits) { to[position] = bits; });
}

// ---- apply along a table ----

// A row of SliceTable.runs.
struct Run {
    int64_t source_start, rows, row_length, source_stride, destination, destination_offset, row_stride, column_stride;
};

struct Table {
    const int64_t* runs;
    const double* reciprocals;  // 1 / source_stride of each run: a 64-bit division is a call of 100 instructions
    const int64_t* block_offsets;
    const int64_t* block_runs;
    void* const* destinations;
    const int32_t* dtypes;
};

// Where a run puts source element `source`; -1 where it does not cover it.
__device__ __forceinline__ int64_t landing(const Run& run, double reciprocal, int64_t source) {
    int64_t relative = source - run.source_start, row = 0, column = relative;
    if (relative < 0) return -1;
    if (run.rows > 1) {
        // Off by one at most, as long as there are fewer than 2^50 rows.
        row = static_cast<int64_t>(static_cast<double>(relative) * reciprocal);
        column = relative - row * run.source_stride;
        if (column < 0) {
            --row;
            column += run.source_stride;
        } else if (column >= run.source_stride) {
            ++row;
            column -= run.source_stride;
        }
    }
    if (row >= run.rows || column >= run.row_length) return -1;
    return run.destination_offset + row * run.row_stride + column * run.column_stride;
}

template <class Bits>
__global__ void __launch_bounds__(kThreads, 4)
    delta_apply_slices(const uint8_t* formats, const int64_t* offsets, const uint8_t* payload, int dtype,
                       int64_t num_elements, Table table, int64_t first_block) {
    HEADWAY_SHARED(int, warp_sums, kThreads / kWarpSize);
    int64_t block = first_block + blockIdx.x;
    int length = static_cast<int>(block_length(num_elements, block));
    const Run* runs = reinterpret_cast<const Run*>(table.runs);
    for_each_change<Bits>(
        formats[block], payload + offsets[block], offsets[block + 1] - offsets[block], length, warp_sums,
        [&](int position, Bits bits) {
            int64_t source = block * kBlockElements + position;
            for (int64_t i = table.block_offsets[block]; i < table.block_offsets[block + 1]; ++i) {
                int64_t number = table.block_runs[i];
                const Run& run = runs[number];
                int64_t index = landing(run, table.reciprocals[number], source);
                if (index < 0) continue;
                int target = table.dtypes[run.destination];
                store_bits(table.destinations[run.destination], index, target, cast_bits(bits, dtype, target));
            }
        });
}

// ---- launches ----

template <class Cast>
void launch_compare(const Pieces& pieces, void* old, int64_t num_elements, int update, int64_t first_block,
                    int64_t num_blocks, uint8_t* marks, int32_t* counts, void* stream) {
    auto* bits = static_cast<typename Cast::Bits*>(old);
    auto* kernel = delta_compare<Cast>;
    HEADWAY_LAUNCH(kernel, num_blocks, kThreads, stream, pieces, bits, num_elements, update, first_block, marks, counts);
}

bool known_dtype(int dtype) { return dtype == kBfloat16 || dtype == kFloat16 || dtype == kFloat32; }

bool known_blocks(int64_t num_elements, int64_t first_block, int64_t num_blocks) {
    return num_elements >= 0 && first_block >= 0 && num_blocks >= 0 && num_blocks <= kMaxBlocks &&
           first_block + num_blocks <= ceil_div(num_elements, kBlockElements);
}

}  // namespace
}  // namespace headway

using namespace headway;

int headway_cuda_delta_compare(const void* const* pieces, const int64_t* starts, int64_t num_pieces, int source_dtype,
                               void* old, int dtype, int64_t num_elements, int update, int64_t first_block,
                               int64_t num_blocks, uint8_t* marks, int32_t* counts, int device, void* stream) {
    if (!known_dtype(dtype) || !known_blocks(num_elements, first_block, num_blocks)) return kInvalidArgument;
    if (source_dtype != dtype && source_dtype != kFloat32) return kInvalidArgument;
    if (num_blocks == 0) return 0;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    Pieces all{pieces, starts, num_pieces};
    if (dtype == kFloat32)
        launch_compare<Copy32>(all, old, num_elements, update, first_block, num_blocks, marks, counts, stream);
    else if (source_dtype == dtype)
        launch_compare<Copy16>(all, old, num_elements, update, first_block, num_blocks, marks, counts, stream);
    else if (dtype == kBfloat16)
        launch_compare<CastBfloat16>(all, old, num_elements, update, first_block, num_blocks, marks, counts, stream);
    else
        launch_compare<CastFloat16>(all, old, num_elements, update, first_block, num_blocks, marks, counts, stream);
    return scope.launched();
}

int headway_cuda_delta_layout(const int32_t* counts, int64_t num_elements, int dtype, uint8_t* formats, int64_t* offsets,
                              int64_t* num_changed, int device, void* stream) {
    if (!known_dtype(dtype) || num_elements < 0) return kInvalidArgument;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    int64_t num_blocks = ceil_div(num_elements, kBlockElements), value_bytes = dtype_bytes(dtype);
    HEADWAY_LAUNCH(delta_layout, 1, kLayoutThreads, stream, counts, num_elements, num_blocks, value_bytes, formats, offsets,
                   num_changed);
    return scope.launched();
}

int headway_cuda_delta_encode(const void* values, int dtype, int64_t num_elements, const uint8_t* marks,
                              const uint8_t* formats, const int64_t* offsets, int64_t first_block, int64_t num_blocks,
                              uint8_t* payload, int device, void* stream) {
    if (!known_dtype(dtype) || !known_blocks(num_elements, first_block, num_blocks)) return kInvalidArgument;
    if (num_blocks == 0) return 0;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    if (dtype == kFloat32) {
        auto* bits = static_cast<const uint32_t*>(values);
        HEADWAY_LAUNCH(delta_encode<uint32_t>, num_blocks, kThreads, stream, bits, num_elements, marks, formats, offsets,
                       first_block, payload);
    } else {
        auto* bits = static_cast<const uint16_t*>(values);
        HEADWAY_LAUNCH(delta_encode<uint16_t>, num_blocks, kThreads, stream, bits, num_elements, marks, formats, offsets,
                       first_block, payload);
    }
    return scope.launched();
}

int headway_cuda_delta_apply(const uint8_t* formats, const int64_t* offsets, const uint8_t* payload, int dtype,
                             int64_t num_elements, int64_t first_block, int64_t num_blocks, void* destination, int device,
                             void* stream) {
    if (!known_dtype(dtype) || !known_blocks(num_elements, first_block, num_blocks)) return kInvalidArgument;
    if (num_blocks == 0) return 0;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    if (dtype == kFloat32) {
        auto* bits = static_cast<uint32_t*>(destination);
        HEADWAY_LAUNCH(delta_apply<uint32_t>, num_blocks, kThreads, stream, formats, offsets, payload, num_elements,
                       first_block, bits);
    } else {
        auto* bits = static_cast<uint16_t*>(destination);
        HEADWAY_LAUNCH(delta_apply<uint16_t>, num_blocks, kThreads, stream, formats, offsets, payload, num_elements,
                       first_block, bits);
    }
    return scope.launched();
}

int headway_cuda_delta_apply_slices(const uint8_t* formats, const int64_t* offsets, const uint8_t* payload, int dtype,
                                    int64_t num_elements, const int64_t* runs, const double* reciprocals,
                                    const int64_t* block_offsets, const int64_t* block_runs, void* const* destinations,
                                    const int32_t* destination_dtypes, int64_t first_block, int64_t num_blocks, int device,
                                    void* stream) {
    if (!known_dtype(dtype) || !known_blocks(num_elements, first_block, num_blocks)) return kInvalidArgument;
    if (num_blocks == 0) return 0;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    Table table{runs, reciprocals, block_offsets, block_runs, destinations, destination_dtypes};
    if (dtype == kFloat32)
        HEADWAY_LAUNCH(delta_apply_slices<uint32_t>, num_blocks, kThreads, stream, formats, offsets, payload, dtype,
                       num_elements, table, first_block);
    else
        HEADWAY_LAUNCH(delta_apply_slices<uint16_t>, num_blocks, kThreads, stream, formats, offsets, payload, dtype,
                       num_elements, table, first_block);
    return scope.launched();
}
