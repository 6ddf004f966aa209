// What a caller does after a while without progress: spin on, change the core, yield or sleep. It decides, and the
// engine does it.

#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono::engine {

class SpinPolicy {
 public:
  enum class Step : uint8_t { spin, leave_core, yield, sleep };
  // What the caller sees.
  struct Seen {
    std::int64_t now;
    std::int64_t quiet_ns;  // time without progress
    size_t sharers;         // ranks on this thread's core
    bool is_last;           // this is the highest of them
    bool are_cores_known;   // of all ranks with a link
  };

  SpinPolicy();
  // The ranks and the cores of this host.
  void set_host(int ranks, int cores);
  // Rounds without progress before a look at the clock.
  unsigned rounds() const { return rounds_; }

  Step next(const Seen& seen) const;
  void on_core_left(std::int64_t now) { core_left_at_ = now; }
  // It yielded at `now`, and others ran for `away_ns`.
  void on_yielded(std::int64_t now, std::int64_t away_ns);

 private:
  std::int64_t spin_ns_;
  std::int64_t spin_ns_long_ = 0;
  std::int64_t yield_ns_;
  unsigned rounds_ = 4;
  size_t ranks_per_core_ = 1;
  std::int64_t crowded_until_ = 0;
  std::int64_t core_left_at_ = 0;
};

}  // namespace unisono::engine
