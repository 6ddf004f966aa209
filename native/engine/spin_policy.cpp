#include "engine/spin_policy.hpp"

#include "base/system.hpp"

namespace unisono::engine {
namespace {

// About 2 us: the time of a small message if both sides call at once.
constexpr unsigned rounds_roomy = 32;
// With a core for every rank, spinning costs no other rank; with fewer cores it keeps the awaited rank from running.
// Beside other processes' load, spinning is the only way to keep a core, as long as the awaited rank has another one.
constexpr std::int64_t spin_ns_long = 500'000;
constexpr std::int64_t spin_ns_roomy = 20'000, yield_ns_roomy = 2 * millisecond;
constexpr std::int64_t spin_ns_crowded = 0, yield_ns_crowded = 100'000;
// Between two changes of the core.
constexpr std::int64_t move_ns = 5 * millisecond;
constexpr std::int64_t yield_ns_long = 50'000, crowded_ns = 20 * millisecond;

}  // namespace

SpinPolicy::SpinPolicy() : spin_ns_(spin_ns_crowded), yield_ns_(yield_ns_crowded) {}

void SpinPolicy::set_host(int ranks, int cores) {
  ranks_per_core_ = static_cast<size_t>((ranks + cores - 1) / cores);
  if (ranks > cores) return;
  spin_ns_ = spin_ns_roomy;
  spin_ns_long_ = spin_ns_long;
  rounds_ = rounds_roomy;
  yield_ns_ = yield_ns_roomy;
}

SpinPolicy::Step SpinPolicy::next(const Seen& seen) const {
  const bool is_crowded = seen.now < crowded_until_;
  // No core should serve more than its share of ranks. The highest rank on a crowded one moves.
  if (seen.is_last && seen.sharers >= ranks_per_core_ && seen.now > core_left_at_ + move_ns) return Step::leave_core;
  // The awaited rank may be next in line for this core, and spinning would keep it waiting. If its core is unknown,
  // that has to be assumed.
  const std::int64_t spin_ns = !is_crowded ? spin_ns_ : seen.are_cores_known ? spin_ns_long_ : spin_ns_crowded;
  if (seen.sharers == 0 && seen.quiet_ns < spin_ns) return Step::spin;
  return seen.quiet_ns < yield_ns_ && !is_crowded ? Step::yield : Step::sleep;
}

void SpinPolicy::on_yielded(std::int64_t now, std::int64_t away_ns) {
  // Another process ran here for milliseconds and will again. With a core for every rank, spin from now on and then
  // sleep: a sleeping thread is scheduled sooner than one that yields. With fewer cores it most likely was a rank.
  if (away_ns > yield_ns_long && spin_ns_long_ != 0) crowded_until_ = now + away_ns + crowded_ns;
}

}  // namespace unisono::engine
