// Which compilation of the kernels this process uses.

#pragma once

#include <span>

#include "kernels/kernels.hpp"

namespace unisono {

// Every compiled set that this CPU can run, slowest first.
std::span<const Kernels* const> usable_kernels();

// The set in use; when the module is loaded the fastest usable one.
const Kernels& active_kernels();

// Use the set of this name from now on, in the whole process. False if this CPU has none of that name.
bool use_kernels(const char* isa);

}  // namespace unisono
