// What an acceptor answers to a rank that has proven itself.

#pragma once

#include "base/types.hpp"

namespace unisono::engine {

enum class Admission : uint32_t { welcome, crossing, known, unknown, leaving };
inline constexpr uint32_t admission_count = 5;

}  // namespace unisono::engine
