// Schedules a plan into tiles and runs them: the forward tile by tile, the backward piece by piece.
#include "kernels.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "parallel.h"

namespace headway {
namespace {

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

struct Schedule {
    std::vector<Segment> segments;
    std::vector<Tile> tiles;
};

int64_t num_ranges(const HeadwayPlan& p, int64_t run) { return p.range_offsets[run + 1] - p.range_offsets[run]; }

int compare_ranges(const HeadwayPlan& p, int64_t a, int64_t b) {
    const int64_t na = num_ranges(p, a), nb = num_ranges(p, b);
    if (na != nb) return na < nb ? -1 : 1;
    for (int64_t i = 0; i < na; i++) {
        const int64_t x = p.range_offsets[a] + i, y = p.range_offsets[b] + i;
        if (p.range_start[x] != p.range_start[y]) return p.range_start[x] < p.range_start[y] ? -1 : 1;
        if (p.range_len[x] != p.range_len[y]) return p.range_len[x] < p.range_len[y] ? -1 : 1;
    }
    return 0;
}

// Runs that are not empty, those with equal ranges next to each other, otherwise in the plan's order.
std::vector<int64_t> ordered_runs(const HeadwayPlan& p) {
    std::vector<int64_t> runs;
    runs.reserve(static_cast<size_t>(p.num_runs));
    for (int64_t r = 0; r < p.num_runs; r++)
        if (p.query_len[r] > 0) runs.push_back(r);
    const auto less = [&](int64_t a, int64_t b) { return compare_ranges(p, a, b) < 0; };
    if (!std::is_sorted(runs.begin(), runs.end(), less)) std::stable_sort(runs.begin(), runs.end(), less);
    return runs;
}

class TileBuilder {
public:
    // aligned_rows: segments with more rows than this start and end at a multiple of the vector length.
    TileBuilder(const HeadwayPlan& plan, int64_t group, int64_t lanes, int64_t aligned_rows, Schedule& out)
        : plan_(plan), group_(group), lanes_(lanes), aligned_rows_(aligned_rows), out_(out) {}

    void add(int64_t run) {
        const int64_t rows = plan_.query_len[run] * group_;
        if (open_ && compare_ranges(plan_, range_run_, run) != 0) close();
        for (int64_t row = 0; row < rows;) {
            const int64_t left = rows - row, need = left < TILE_ROWS ? left : TILE_ROWS;
            if (open_ && start_of(need) + need > TILE_ROWS) close();
            if (!open_) open(run);
            const int64_t at = start_of(need);
            out_.segments.push_back({run, row, static_cast<int32_t>(need), static_cast<int32_t>(at)});
            wide_ |= need > aligned_rows_;
            cursor_ = need > aligned_rows_ ? round_up(at + need, lanes_) : at + need;
            row += need;
        }
    }

    void close() {
        if (!open_) return;
        Tile tile;
        tile.range_run = range_run_;
        tile.first_segment = static_cast<int32_t>(first_);
        tile.num_segments = static_cast<int32_t>(out_.segments.size() - first_);
        tile.num_rows = static_cast<int32_t>(round_up(cursor_, lanes_));
        const bool ranges_wide = num_ranges(plan_, range_run_) > 0 && tile.num_segments > 1;
        tile.transposed = wide_ || ranges_wide;
        out_.tiles.push_back(tile);
        open_ = false;
    }

private:
    void open(int64_t run) {
        open_ = true;
        wide_ = false;
        range_run_ = run;
        first_ = out_.segments.size();
        cursor_ = 0;
    }

    int64_t start_of(int64_t rows) const { return rows > aligned_rows_ ? round_up(cursor_, lanes_) : cursor_; }

    const HeadwayPlan& plan_;
    const int64_t group_, lanes_, aligned_rows_;
    Schedule& out_;
    bool open_ = false, wide_ = false;
    int64_t range_run_ = 0, cursor_ = 0;
    size_t first_ = 0;
};

Schedule make_schedule(const HeadwayPlan& plan, const std::vector<int64_t>& runs, int64_t group, int64_t lanes,
                       int64_t aligned_rows) {
    Schedule schedule;
    schedule.segments.reserve(runs.size() + 16);
    TileBuilder builder(plan, group, lanes, aligned_rows, schedule);
    for (const int64_t run : runs) builder.add(run);
    builder.close();
    return schedule;
}

struct WorkItem {
    int64_t tile, kv_head;
};

bool continues_run(const Schedule& s, size_t tile) {
    if (tile == 0) return false;
    const Tile &a = s.tiles[tile - 1], &b = s.tiles[tile];
    return a.num_segments == 1 && b.num_segments == 1 &&
           s.segments[a.first_segment].run == s.segments[b.first_segment].run;
}

// Tile by tile with all heads of a tile together, so that a pool's pages and prefetched lines serve all of them. The
// tiles of one long run go head by head instead: a head's keys then stay in the cache from tile to tile. Those start
// with the last, which sees the most keys, so that no thread is left with it at the end.
std::vector<WorkItem> work_order(const Schedule& schedule, int64_t num_kv_heads) {
    std::vector<WorkItem> work;
    const size_t num_tiles = schedule.tiles.size();
    work.reserve(num_tiles * static_cast<size_t>(num_kv_heads));
    for (size_t first = 0; first < num_tiles;) {
        size_t end = first + 1;
        while (end < num_tiles && continues_run(schedule, end)) end++;
        for (int64_t head = 0; head < num_kv_heads; head++)
            for (size_t tile = end; tile-- > first;) work.push_back({static_cast<int64_t>(tile), head});
        first = end;
    }
    return work;
}

struct KeySpan {
    int64_t begin, end, run;
};

void append_spans(const HeadwayPlan& p, int64_t run, std::vector<KeySpan>& spans) {
    for (int64_t i = p.range_offsets[run]; i < p.range_offsets[run + 1]; i++)
        if (p.range_len[i] > 0) spans.push_back({p.range_start[i], p.range_start[i] + p.range_len[i], run});
    const int64_t causal = p.causal_base[run] + p.query_len[run];
    spans.push_back({p.causal_start[run], p.causal_start[run] + causal, run});
}

// Splits the runs into pieces that share no key, each in the given order.
std::vector<std::vector<int64_t>> independent_pieces(const HeadwayPlan& p, const std::vector<int64_t>& runs) {
    std::vector<KeySpan> spans;
    for (const int64_t run : runs) append_spans(p, run, spans);
    std::sort(spans.begin(), spans.end(), [](const KeySpan& a, const KeySpan& b) { return a.begin < b.begin; });
    std::vector<int64_t> parent(static_cast<size_t>(p.num_runs));
    std::iota(parent.begin(), parent.end(), 0);
    const auto find = [&](int64_t x) {
        while (parent[x] != x) x = parent[x] = parent[parent[x]];
        return x;
    };
    int64_t reach = -1, reach_run = -1;
    for (const KeySpan& s : spans) {
        if (reach_run >= 0 && s.begin < reach) parent[find(s.run)] = find(reach_run);
        if (s.end > reach) reach = s.end, reach_run = s.run;
    }
    std::vector<std::vector<int64_t>> pieces;
    std::vector<int64_t> piece_of(static_cast<size_t>(p.num_runs), -1);
    for (const int64_t run : runs) {
        int64_t& piece = piece_of[find(run)];
        if (piece < 0) piece = static_cast<int64_t>(pieces.size()), pieces.emplace_back();
        pieces[piece].push_back(run);
    }
    return pieces;
}

AttentionTask make_task(const HeadwayPlan& plan, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        float scale, int lanes) {
    AttentionTask task = {};
    task.plan = plan;
    task.num_heads = num_heads;
    task.group = num_heads / num_kv_heads;
    task.head_dim = head_dim;
    task.padded_dim = round_up(head_dim, lanes);
    task.scale = scale;
    return task;
}

}  // namespace
}  // namespace headway

int headway_attention_forward(const HeadwayPlan* plan, const HeadwayView* query, const HeadwayView* key,
                              const HeadwayView* value, const HeadwayView* out, float* lse, int64_t num_heads,
                              int64_t num_kv_heads, int64_t head_dim, float scale, int64_t num_threads) {
    using namespace headway;
    const Kernels& kernels = pick_kernels(head_dim);
    AttentionTask task = make_task(*plan, num_heads, num_kv_heads, head_dim, scale, kernels.lanes);
    task.query = *query, task.key = *key, task.value = *value, task.out = *out, task.lse = lse;
    const Schedule schedule =
        make_schedule(*plan, ordered_runs(*plan), task.group, kernels.lanes, kernels.max_dot_rows);
    task.segments = schedule.segments.data();
    const std::vector<WorkItem> work = work_order(schedule, num_kv_heads);
    parallel_for(static_cast<int64_t>(work.size()), num_threads, [&](int64_t i) {
        kernels.forward_tile(task, schedule.tiles[work[i].tile], work[i].kv_head,
                             thread_scratch(scratch_floats(task.padded_dim)));
    });
    return 0;
}

int headway_attention_backward(const HeadwayPlan* plan, const HeadwayView* query, const HeadwayView* key,
                               const HeadwayView* value, const HeadwayView* out, const float* lse,
                               const HeadwayView* d_out, const HeadwayView* d_query, const HeadwayView* d_key,
                               const HeadwayView* d_value, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                               float scale, int64_t num_threads) {
    using namespace headway;
    const Kernels& kernels = pick_kernels(head_dim);
    AttentionTask task = make_task(*plan, num_heads, num_kv_heads, head_dim, scale, kernels.lanes);
    task.query = *query, task.key = *key, task.value = *value, task.out = *out, task.lse = const_cast<float*>(lse);
    task.d_out = *d_out, task.d_query = *d_query, task.d_key = *d_key, task.d_value = *d_value;
    const std::vector<int64_t> runs = ordered_runs(*plan);
    // Pieces whatever the number of threads: the order of the sums into d_key and d_value must not depend on it.
    const auto pieces = independent_pieces(*plan, runs);
    std::vector<Schedule> schedules;
    schedules.reserve(pieces.size());
    for (const auto& piece : pieces) schedules.push_back(make_schedule(*plan, piece, task.group, kernels.lanes, 0));
    const int64_t num_pieces = static_cast<int64_t>(pieces.size());
    parallel_for(num_pieces * num_kv_heads, num_threads, [&](int64_t i) {
        const Schedule& schedule = schedules[i % num_pieces];
        AttentionTask local = task;
        local.segments = schedule.segments.data();
        float* scratch = thread_scratch(scratch_floats(task.padded_dim));
        for (const Tile& tile : schedule.tiles) kernels.backward_tile(local, tile, i / num_pieces, scratch);
    });
    return 0;
}
