// Copies, casts and quantises many tensors in one launch, along a table of parts; a part is a matrix with row strides.
//
// A part is cut into tiles, one a thread block; a thread finds its part by the tile's number. Copies and casts are bit
// for bit those of bits.h. fp8 is e4m3 with an fp32 scale for each 128 x 128 block, or with a power of two for each 32
// neighbours of a row (OCP microscaling). Meaning of the arguments: headway_cuda.h.
#include "bits.h"
#include "headway_cuda.h"

namespace headway {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 8;           // elements that a thread moves at a time
constexpr int kRounds = 8;          // groups of a thread in a tile
constexpr int kTileGroups = kThreads * kRounds;
constexpr int kBlock = 128;         // side of an fp8 block
constexpr int kMx = 32;             // neighbours that share a microscale
constexpr int kGroupsOfMx = kMx / kGroup;
constexpr int kGroupsOfBlock = kBlock / kGroup;
constexpr float kFloat8Max = 448.0f;

enum Format : int { kCast = 0, kFloat8Block = 1, kFloat8Mx = 2 };

using Part = HeadwayPackPart;

__device__ __forceinline__ int64_t find_part(const int64_t* first_tiles, int64_t num_parts, int64_t tile) {
    int64_t low = 0, high = num_parts;  // first_tiles[low] <= tile < first_tiles[high]
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first_tiles[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ void load_bits(const Part& part, int64_t row, int64_t column, int count, uint32_t* bits) {
    int64_t at = row * part.source_stride + column;
    if (part.source_dtype == kFloat32) {
        const uint32_t* from = static_cast<const uint32_t*>(part.source) + at;
        if (count == kGroup && is_aligned(from, 16)) {
            uint4 raw[2] = {reinterpret_cast<const uint4*>(from)[0], reinterpret_cast<const uint4*>(from)[1]};
            memcpy(bits, raw, sizeof(raw));
            return;
        }
#pragma unroll
        for (int i = 0; i < kGroup; ++i) bits[i] = i < count ? from[i] : 0u;
        return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(part.source) + at;
    if (count == kGroup && is_aligned(from, 16)) {
        uint4 raw = *reinterpret_cast<const uint4*>(from);
        uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < kGroup; ++i) bits[i] = (pairs[i / 2] >> (16 * (i % 2))) & 0xffffu;
        return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) bits[i] = i < count ? from[i] : 0u;
}

__device__ __forceinline__ void store_group(const Part& part, int64_t row, int64_t column, int count,
                                            const uint32_t* bits) {
    int64_t at = row * part.target_stride + column;
    if (part.target_dtype == kFloat32) {
        uint32_t* to = static_cast<uint32_t*>(part.target) + at;
        if (count == kGroup && is_aligned(to, 16)) {
            reinterpret_cast<uint4*>(to)[0] = uint4{bits[0], bits[1], bits[2], bits[3]};
            reinterpret_cast<uint4*>(to)[1] = uint4{bits[4], bits[5], bits[6], bits[7]};
            return;
        }
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
            if (i < count) to[i] = bits[i];
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(part.target) + at;
    if (count == kGroup && is_aligned(to, 16)) {
        *reinterpret_cast<uint4*>(to) = uint4{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                                              bits[6] | bits[7] << 16};
        return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
        if (i < count) to[i] = static_cast<uint16_t>(bits[i]);
}

__device__ __forceinline__ void load_floats(const Part& part, int64_t row, int64_t column, int count, float* values) {
    uint32_t bits[kGroup];
    load_bits(part, row, column, count, bits);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = float_of(cast_bits(bits[i], part.source_dtype, kFloat32));
}

__device__ __forceinline__ void store_float8(const Part& part, int64_t row, int64_t column, int count,
                                             const uint8_t* codes) {
    uint8_t* to = static_cast<uint8_t*>(part.target) + row * part.target_stride + column;
    if (count == kGroup && is_aligned(to, 8)) {
        uint2 raw;
        memcpy(&raw, codes, sizeof(raw));
        *reinterpret_cast<uint2*>(to) = raw;
        return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
        if (i < count) to[i] = codes[i];
}

// The largest |value|; a NaN counts as infinity, so that a scale shows it.
__device__ __forceinline__ float largest(const float* values) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) most = fmaxf(most, values[i] == values[i] ? fabsf(values[i]) : INFINITY);
    return most;
}

__device__ __forceinline__ void cast_group(const Part& part, int64_t row, int64_t column, int count) {
    uint32_t bits[kGroup];
    load_bits(part, row, column, count, bits);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) bits[i] = cast_bits(bits[i], part.source_dtype, part.target_dtype);
    store_group(part, row, column, count, bits);
}

// Four neighbouring lanes hold the 32 values of one scale; every lane of the warp calls it.
__device__ __forceinline__ void microscale_group(const Part& part, int64_t row, int64_t column, int count) {
    float values[kGroup];
    if (count > 0) {
        load_floats(part, row, column, count, values);
    } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) values[i] = 0.0f;
    }
    float most = largest(values);
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
    // The exponent of the largest value less that of 448: 2^(code - 127), and 0xff for what is not finite.
    int exponent = static_cast<int>(bits_of(most) >> 23);
    int code = exponent == 255 ? 255 : max_of(0, exponent - 8);
    if (count <= 0) return;
    if (column % kMx == 0)
        static_cast<uint8_t*>(part.scales)[row * part.scale_stride + column / kMx] = static_cast<uint8_t>(code);
    int inverse = 254 - code;  // as a biased exponent; 0 is 2^-127, a subnormal
    float factor = code == 255 ? NAN : (inverse == 0 ? float_of(0x400000u) : float_of(static_cast<uint32_t>(inverse) << 23));
    uint8_t codes[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) codes[i] = float8_from_float(values[i] * factor);
    store_float8(part, row, column, count, codes);
}

// A tile of a part that is moved by rows: groups of 8 elements, counted along the rows.
__device__ __forceinline__ void move_rows(const Part& part, int64_t tile) {
    int64_t group = tile * kTileGroups, per_row = part.groups_per_row;
    int64_t row = static_cast<int64_t>(static_cast<double>(group) * part.reciprocal);
    int64_t within = group - row * per_row;  // off by one row at most: counts are below 2^50
    if (within < 0) {
        --row;
        within += per_row;
    } else if (within >= per_row) {
        ++row;
        within -= per_row;
    }
    for (int round = 0; round < kRounds; ++round) {
        int64_t here = within + round * kThreads + threadIdx.x, down = 0;
        if (here >= per_row) {
            // Then a row has fewer groups than the tile reaches behind it, unless it is the very next one.
            down = per_row > 2 * kTileGroups ? 1 : static_cast<uint32_t>(here) / static_cast<uint32_t>(per_row);
            here -= down * per_row;
        }
        int64_t column = here * kGroup, at = row + down;
        int count = at < part.rows ? static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(kGroup, part.columns - column))) : 0;
        if (part.format == kFloat8Mx)
            microscale_group(part, at, column, count);
        else if (count > 0)
            cast_group(part, at, column, count);
    }
}

// A 128 x 128 block with its scale, amax / 448 (1 where all is zero); values are divided by it.
template <class Array>
__device__ __forceinline__ void quantise_block(const Part& part, int64_t tile, Array& warp_most) {
    int64_t across = ceil_div(part.columns, kBlock);
    int64_t down = static_cast<int64_t>(static_cast<double>(tile) * part.reciprocal), right = tile - down * across;
    if (right < 0) {
        --down;
        right += across;
    } else if (right >= across) {
        ++down;
        right -= across;
    }
    int thread = static_cast<int>(threadIdx.x);
    int64_t column = right * kBlock + thread % kGroupsOfBlock * kGroup;
    int count = static_cast<int>(max_of<int64_t>(0, min_of<int64_t>(kGroup, part.columns - column)));
    float most = 0.0f;
    for (int pass = 0; pass < 2; ++pass) {  // the second pass reads what the first left in the cache
        float scale = 1.0f;
        if (pass == 1) {
            for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
            if (thread % kWarpSize == 0) warp_most[thread / kWarpSize] = most;
            __syncthreads();
            for (int i = 0; i < kThreads / kWarpSize; ++i) most = fmaxf(most, warp_most[i]);
            if (most > 0.0f) scale = most / kFloat8Max;
            if (!is_finite(most)) scale = NAN;
            if (scale == 0.0f) scale = 1.0f;  // below the smallest number: the values are 0 in fp8 as well
            if (thread == 0) static_cast<float*>(part.scales)[down * part.scale_stride + right] = scale;
        }
        for (int i = 0; i < kBlock * kGroupsOfBlock / kThreads; ++i) {
            int64_t row = down * kBlock + thread / kGroupsOfBlock + i * (kThreads / kGroupsOfBlock);
            if (row >= part.rows || count == 0) continue;
            float values[kGroup];
            load_floats(part, row, column, count, values);
            if (pass == 0) {
                most = fmaxf(most, largest(values));
                continue;
            }
            uint8_t codes[kGroup];
#pragma unroll
            for (int k = 0; k < kGroup; ++k) codes[k] = float8_from_float(values[k] / scale);
            store_float8(part, row, column, count, codes);
        }
    }
}

__global__ void __launch_bounds__(kThreads, 3)
    pack_cast(const Part* parts, const int64_t* first_tiles, int64_t num_parts, int64_t first_tile) {
    HEADWAY_SHARED(float, warp_most, kThreads / kWarpSize);
    int64_t tile = first_tile + blockIdx.x;
    int64_t number = find_part(first_tiles, num_parts, tile);
    const Part part = parts[number];
    tile -= first_tiles[number];
    if (part.format == kFloat8Block)
        quantise_block(part, tile, warp_most);
    else
        move_rows(part, tile);
}

}  // namespace
}  // namespace headway

using namespace headway;

int64_t headway_cuda_pack_tiles(HeadwayPackPart* part) {
    if (part->rows < 0 || part->columns < 0 || part->format < kCast || part->format > kFloat8Mx) return -1;
    part->groups_per_row = ceil_div(part->columns, kGroup);
    if (part->format == kFloat8Mx) part->groups_per_row = ceil_div(part->columns, kMx) * kGroupsOfMx;
    if (part->rows == 0 || part->columns == 0) return 0;
    int64_t across = ceil_div(part->columns, kBlock);
    bool blocks = part->format == kFloat8Block;
    part->reciprocal = 1.0 / static_cast<double>(blocks ? across : part->groups_per_row);
    if (blocks) return across * ceil_div(part->rows, kBlock);
    return ceil_div(part->rows * part->groups_per_row, kTileGroups);
}

int headway_cuda_pack_cast(const HeadwayPackPart* parts, const int64_t* first_tiles, int64_t num_parts, int64_t first_tile,
                           int64_t num_tiles, int device, void* stream) {
    if (num_parts < 0 || first_tile < 0 || num_tiles < 0 || num_tiles > kMaxBlocks) return kInvalidArgument;
    if (num_tiles == 0) return 0;
    DeviceScope scope(device);
    if (scope.code()) return scope.code();
    HEADWAY_LAUNCH(pack_cast, num_tiles, kThreads, stream, parts, first_tiles, num_parts, first_tile);
    return scope.launched();
}
