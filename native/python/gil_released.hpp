// GilReleased: without the GIL, for as long as something below Python takes.
//
// Knows how a thread comes back to Python, and when it must not. At the end of the interpreter Python ends a thread
// that comes back by unwinding its stack; through C++ that is the end of the process, with an abort. So before the
// interpreter ends, it says that nobody comes back any more: those on their way are awaited, all others stay.

#pragma once

#include <Python.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace unisono {

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { reacquire(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  // Once, when the module is loaded: of those on their way none is in a forked child.
  static void prepare() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { returning_.store(0); });
    (void)once;
  }

  // From now on only the calling thread comes back. It has the GIL, and has it again afterwards.
  static void forbid_reacquire() {
    last_ = pthread_self();
    // seq_cst, as below: whoever does not see this is seen among those who return.
    is_last_.store(true);
    PyThreadState* state = PyEval_SaveThread();
    // Each of them needs the GIL once. Whoever has it for two seconds is not ours to wait for.
    for (int looks = 0; returning_.load() != 0 && looks < 20'000; ++looks) {
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
