// Which compilation of the kernels this machine runs.

#pragma once

#include <span>

#include "kernels/kernels.hpp"

namespace unisono {

// Every compiled set that this CPU can run, the plainest first.
std::span<const Kernels* const> usable_kernels();

// The set in use: at load the last, fastest usable one.
const Kernels& active_kernels();

// Use the set of this name from now on, in the whole process. False if this CPU has none of that name.
bool use_kernels(const char* isa);

}  // namespace unisono
