// Advantages and returns along packed trajectories; formulas and meaning in headway_kernels/segment_scan.py.
//
// Segments are independent; within one, a single walk from its end, in fp64.
#include <atomic>
#include <cmath>

#include "headway_cpu.h"
#include "parallel.h"

namespace headway {
namespace {

enum Kind { RETURN = 0, GAE = 1, VTRACE = 2 };

constexpr double MAX_EXPONENT = 20.0;  // of policy_token.py: beyond it no ratio can be meant

template <class Real>
struct Scan {
    const HeadwayScan& task;
    const Real* rewards;
    const Real* values;
    const Real* log_ratio;
    const Real* bootstrap;
    Real* advantage;
    Real* target;

    explicit Scan(const HeadwayScan& given)
        : task(given), rewards(static_cast<const Real*>(given.rewards)), values(static_cast<const Real*>(given.values)),
          log_ratio(static_cast<const Real*>(given.log_ratio)), bootstrap(static_cast<const Real*>(given.bootstrap)),
          advantage(static_cast<Real*>(given.advantage)), target(static_cast<Real*>(given.target)) {}

    // Returns whether every input of an active token was finite.
    bool segment(int64_t s) const {
        const double end = bootstrap ? static_cast<double>(bootstrap[s]) : 0.0;
        double next_value = end, carried = task.kind == RETURN ? end : 0.0, next_target = end, check = 0.0;
        for (int64_t t = task.segments[s + 1] - 1; t >= task.segments[s]; t--) {
            if (task.mask && !task.mask[t]) {
                advantage[t] = target[t] = Real{0};
                continue;
            }
            const double reward = rewards[t], value = values ? static_cast<double>(values[t]) : 0.0;
            check += reward * 0.0 + value * 0.0;  // NaN if one is not finite
            if (task.kind == RETURN) {
                carried = reward + task.gamma * carried;
                target[t] = static_cast<Real>(carried);
                advantage[t] = static_cast<Real>(carried - value);
            } else if (task.kind == GAE) {
                carried = reward + task.gamma * next_value - value + task.gamma * task.lam * carried;
                advantage[t] = static_cast<Real>(carried);
                target[t] = static_cast<Real>(carried + value);
            } else {
                const double log = log_ratio[t];
                check += log * 0.0;
                const double bounded = log < -MAX_EXPONENT ? -MAX_EXPONENT : log > MAX_EXPONENT ? MAX_EXPONENT : log;
                const double ratio = std::exp(bounded);
                const double rho = ratio < task.rho_cap ? ratio : task.rho_cap;
                const double c = ratio < task.c_cap ? ratio : task.c_cap;
                const double delta = rho * (reward + task.gamma * next_value - value);
                carried = delta + task.gamma * task.lam * c * carried;
                advantage[t] = static_cast<Real>(reward + task.gamma * next_target - value);
                next_target = value + carried;
                target[t] = static_cast<Real>(next_target);
            }
            next_value = value;
        }
        return check == 0.0;
    }
};

template <class Real>
int64_t scan_all(const HeadwayScan& task, int64_t num_threads) {
    const Scan<Real> scan(task);
    // Enough tokens a piece that handing it out costs nothing beside them.
    const int64_t tokens = task.segments[task.num_segments], per_piece = 16384;
    const int64_t pieces = tokens / per_piece < 1 ? 1 : tokens / per_piece;
    std::atomic<int64_t> bad{0};
    parallel_for(pieces, num_threads, [&](int64_t p) {
        const int64_t first = p * task.num_segments / pieces, last = (p + 1) * task.num_segments / pieces;
        for (int64_t s = first; s < last; s++)
            if (!scan.segment(s)) bad.fetch_add(1, std::memory_order_relaxed);
    });
    return bad.load();
}

}  // namespace
}  // namespace headway

int64_t headway_segment_scan(const HeadwayScan* task, int64_t num_threads) {
    return task->is_double ? headway::scan_all<double>(*task, num_threads) : headway::scan_all<float>(*task, num_threads);
}
