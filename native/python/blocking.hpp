// Whether the calling thread may block. It may not while it runs an inline handler of a remote call, because it may be
// a thread that waits for an answer itself: see unisono/core/runtime.py.

#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

inline thread_local bool is_blocking_forbidden = false;

// Throws a Python error, a UsageError, if the thread may not block.
inline void check_may_block() {
  if (!is_blocking_forbidden) [[likely]]
    return;
  nanobind::module_::import_("unisono.core.runtime").attr("refuse_blocking")();
}

}  // namespace unisono
