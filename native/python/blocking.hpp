// How a thread of Python blocks in the engine: whether it may, and how long without a look for signals. It may not
// while it runs an inline handler of a remote call, because it may be a thread that waits for an answer itself: see
// unisono/core/runtime.py.

#pragma once

#include <nanobind/nanobind.h>

#include "base/system.hpp"

namespace unisono {

// The longest wait without the GIL after which a thread takes it back and looks for signals.
inline constexpr std::int64_t signal_check_ns = 50 * engine::millisecond;

inline thread_local bool is_blocking_forbidden = false;

// Throws a Python error, a UsageError, if the thread may not block.
inline void check_may_block() {
  if (!is_blocking_forbidden) [[likely]]
    return;
  nanobind::module_::import_("unisono.core.runtime").attr("refuse_blocking")();
}

}  // namespace unisono
