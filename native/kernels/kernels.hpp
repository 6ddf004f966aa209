// The arithmetic of reductions: which kernels exist, and one table of them per instruction set.
//
// The numbers of element types and operations are those of unisono/core/dtypes.py and ops.py.
//
// What every kernel promises, on every instruction set, in the vector body and in the tail alike:
//   - The bits written depend only on the bits read and their order: never on length, alignment or machine.
//     (A thread that flushes subnormals, as torch.set_flush_denormal makes it do, gets what it asked for.)
//   - Starts may be unaligned. dst may be exactly a or exactly b; the caller has ruled out partial overlap.
//   - Integers wrap around. land, lor and lxor give 0 or 1; a bool byte other than 0 counts as true.
//   - float16 and bfloat16 compute in float32 and round to nearest even, subnormals included.
//   - Every NaN written is the type's one positive quiet NaN (that of np.nan), whatever went in. Hardware and
//     compilers are free to choose which operand's NaN survives an addition; this takes the choice away.
//   - min and max give NaN if either operand is NaN, and hold -0.0 to be smaller than +0.0 (IEEE 754-2019
//     minimum and maximum), so on floats too they are commutative and associative down to the bit.
//   - maxloc and minloc take pairs (value, index). The value is that of max and min, the index that of the operand
//     it came from, and of equal values (two NaN are equal) the lower index. A NaN as an index is above all others.
//   - A complex product is (ac - bd) + (ad + bc)i in that order of operations, without C's Annex G recovery
//     of infinities from NaN: as NumPy, and it vectorises.

#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// unisono.core.dtypes.DTYPES, in that order.
enum class DType : std::uint8_t {
  boolean,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
};
inline constexpr std::size_t dtype_count = 15;
inline constexpr std::size_t itemsizes[dtype_count] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};

// unisono.core.ops.OpCode.
enum class Op : std::uint8_t { sum, prod, min, max, band, bor, bxor, land, lor, lxor, maxloc, minloc };
inline constexpr std::size_t op_count = 12;

// The bytes of one item of a reduction, which nothing may cut: an element, or the pair of maxloc and minloc. `op` is
// negative where nothing is reduced.
constexpr std::size_t item_bytes(std::size_t dtype, std::int32_t op) {
  return itemsizes[dtype] * (op >= static_cast<std::int32_t>(Op::maxloc) ? 2 : 1);
}

// dst[i] = a[i] op b[i], for `count` items
using Reduce = void (*)(std::byte* dst, const std::byte* a, const std::byte* b, std::size_t count);
// x[i] = x[i] / divisor, a true division; the divisor is first rounded to the type of the computation.
using Divide = void (*)(std::byte* x, std::size_t count, std::int64_t divisor);
// dst[i] = the value of src[i] in another type
using Convert = void (*)(std::byte* dst, const std::byte* src, std::size_t count);

// The kernels of one instruction set; nullptr where an operation has no meaning for a type.
struct Kernels {
  const char* isa;
  Reduce reduce[dtype_count][op_count];
  Divide divide[dtype_count];
  Convert widen[dtype_count];   // float16 or bfloat16 to float32
  Convert narrow[dtype_count];  // float32 to float16 or bfloat16
};

// One definition per compilation of kernels_isa.cpp.
namespace baseline {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
#endif

}  // namespace unisono
