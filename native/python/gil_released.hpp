// GilReleased: releases the GIL for a scope.
//
// At interpreter shutdown CPython ends a thread that reacquires the GIL by unwinding its stack, and unwinding through
// C++ aborts the process. So before shutdown `forbid_reacquire` waits for threads that are reacquiring, and all later
// ones sleep for ever instead.

#pragma once

#include <Python.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace unisono {

// Below this size the GIL is kept. Releasing it costs 50 to 90 ns without contention, and beside busy Python threads it
// made calls of 1 to 31 KiB up to ten times slower on average, because another thread keeps it for 5 ms. Keeping it
// delays others by 1 us for a float32 sum of this size, and by 32 us for float16 without AVX2, the slowest.
inline constexpr uint64_t gil_release_bytes = 32 * 1024;

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { reacquire(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  // Once, when the module is loaded. A forked child has no thread that is reacquiring.
  static void prepare() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { returning_.store(0); });
    (void)once;
  }

  // From now on only the calling thread may reacquire the GIL. It holds the GIL before and after the call.
  static void forbid_reacquire() {
    last_ = pthread_self();
    // seq_cst, as in reacquire: a thread that does not see this is counted in returning_.
    is_last_.store(true);
    PyThreadState* state = PyEval_SaveThread();
    // Each of them needs the GIL once. After 2 s a foreign thread holds it, which we do not wait for.
    for (int checks = 0; returning_.load() != 0 && checks < 20'000; ++checks) {
      const timespec pause{0, 100'000};
      nanosleep(&pause, nullptr);
    }
    PyEval_RestoreThread(state);
  }

 private:
  static void reacquire(PyThreadState* state) {
    returning_.fetch_add(1);
    if (is_last_.load() && !pthread_equal(last_, pthread_self())) [[unlikely]] {
      returning_.fetch_sub(1);
      for (;;) pause();
    }
    PyEval_RestoreThread(state);
    returning_.fetch_sub(1);
  }

  static inline std::atomic<int> returning_{0};
  static inline std::atomic<bool> is_last_{false};
  static inline pthread_t last_{};

  PyThreadState* state_;
};

}  // namespace unisono
