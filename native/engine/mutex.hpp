// The engine's lock: a mutex that knows whether other threads want it, so that a thread that holds it for long can let
// them in.

#pragma once

#include <sched.h>

#include <atomic>
#include <mutex>

#include "base/system.hpp"

namespace unisono::engine {

class Mutex {
 public:
  void lock() {
    if (inner_.try_lock()) [[likely]]
      return;
    contenders_.fetch_add(1, std::memory_order_relaxed);
    inner_.lock();
    contenders_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return inner_.try_lock(); }
  void unlock() { inner_.unlock(); }
  // relaxed: a late answer is soon enough
  bool is_wanted() const { return contenders_.load(std::memory_order_relaxed) != 0; }
  // Without the lock: wait until a contender has it, but for a few microseconds at most.
  void let_others_in() {
    for (int i = 0; i < 1000 && is_wanted(); ++i) {
      if (i % 16 == 15)
        sched_yield();
      else
        cpu_pause();
    }
  }

 private:
  std::mutex inner_;
  std::atomic<int> contenders_{0};
};

using Hold = std::unique_lock<Mutex>;

}  // namespace unisono::engine
