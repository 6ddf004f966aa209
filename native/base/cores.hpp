// The cores of this machine that a thread may use.

#pragma once

namespace unisono::engine {

int cores();
// Move the calling thread to another of its cores. The scheduler puts a woken thread on its waker's core, so two ranks
// that wake each other would stay on one core, however many there are.
void leave_core(int core);

}  // namespace unisono::engine
