// Asks the CPU once which instruction sets it has.

#include "kernels/isa.hpp"

#include <atomic>
#include <cstring>
#include <vector>

namespace unisono {
namespace {

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> usable = {&baseline::kernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) usable.push_back(&avx2::kernels);
#endif
  return usable;
}

const std::vector<const Kernels*> usable = detect();

// relaxed: the tables are constants, and every one gives the same bits
std::atomic<const Kernels*> active = usable.back();

}  // namespace

std::span<const Kernels* const> usable_kernels() { return usable; }

const Kernels& active_kernels() { return *active.load(std::memory_order_relaxed); }

bool use_kernels(const char* isa) {
  for (const Kernels* kernels : usable) {
    if (std::strcmp(kernels->isa, isa) == 0) {
      active.store(kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace unisono
