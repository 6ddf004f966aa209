// The kernels themselves, as plain loops that the compiler vectorises. CMake compiles this file once per
// instruction set, with UNISONO_ISA naming the namespace that the result is published in.
//
// Everything but that one table stays in the unnamed namespace, and nothing of the standard library's templates
// is used: an inline function shared with another file could be merged by the linker into the copy that was
// compiled for a newer CPU, and then crash the older one.

#include "kernels/kernels.hpp"

#if defined(__AVX2__) && defined(__F16C__)
#define UNISONO_AVX2
#include <immintrin.h>
#endif

#define UNISONO_STRING_(x) #x
#define UNISONO_STRING(x) UNISONO_STRING_(x)

// dst is disjoint from an operand or exactly the same, so no iteration depends on another. The compiler cannot
// know that; its own overlap check would send every in-place call to the scalar loop.
#if defined(__clang__)
#define UNISONO_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNISONO_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace unisono {
namespace {

using std::byte;
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// Alignment and aliasing are the caller's: memcpy promises the compiler neither, and costs nothing.
template <class T>
T load(const byte* from, size_t index) {
  T value;
  __builtin_memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(byte* to, size_t index, T value) {
  __builtin_memcpy(to + index * sizeof(T), &value, sizeof(T));
}

template <class T, T (*op)(T, T)>
[[gnu::noinline]] void plain_each(byte* dst, const byte* a, const byte* b, size_t count) {
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) store<T>(dst, i, op(load<T>(a, i), load<T>(b, i)));
}

// Stores that straddle cache lines cost up to a sixth of the time, and NumPy's large arrays start 16 bytes into
// one: a few elements first, then the rest from the start of a line. A page is where that begins to pay.
template <class T, T (*op)(T, T)>
void each(byte* dst, const byte* a, const byte* b, size_t count) {
  constexpr size_t line_bytes = 64, page_bytes = 4096;
  const auto address = reinterpret_cast<std::uintptr_t>(dst);
  const bool pays = count * sizeof(T) >= page_bytes && address % sizeof(T) == 0;
  const size_t head = pays ? (line_bytes - address % line_bytes) % line_bytes / sizeof(T) : 0;
  if (head != 0) plain_each<T, op>(dst, a, b, head);
  const size_t offset = head * sizeof(T);
  plain_each<T, op>(dst + offset, a + offset, b + offset, count - head);
}

// ---- integers: unsigned where the sign makes no difference, since unsigned arithmetic may wrap ----

// `1u *`: uint16 would be promoted to int, whose product may overflow.
template <class U>
U wrapping_sum(U a, U b) {
  return static_cast<U>(1u * a + b);
}
template <class U>
U wrapping_prod(U a, U b) {
  return static_cast<U>(1u * a * b);
}
template <class T>
T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T larger(T a, T b) {
  return a < b ? b : a;
}
template <class U>
U bits_and(U a, U b) {
  return a & b;
}
template <class U>
U bits_or(U a, U b) {
  return a | b;
}
template <class U>
U bits_xor(U a, U b) {
  return a ^ b;
}
template <class U>
U truth_and(U a, U b) {
  return (a != 0) & (b != 0);
}
template <class U>
U truth_or(U a, U b) {
  return (a | b) != 0;
}
template <class U>
U truth_xor(U a, U b) {
  return (a != 0) ^ (b != 0);
}

// ---- float32 and float64 ----

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = uint32_t;
  static constexpr type nan = 0x7fc00000u;
};
template <>
struct Bits<double> {
  using type = uint64_t;
  static constexpr type nan = 0x7ff8000000000000u;
};

template <class T>
typename Bits<T>::type bits(T value) {
  return __builtin_bit_cast(typename Bits<T>::type, value);
}
template <class T>
T from_bits(typename Bits<T>::type value) {
  return __builtin_bit_cast(T, value);
}

template <class T>
T one_nan(T value) {
  return value == value ? value : from_bits<T>(Bits<T>::nan);
}

template <class T>
T raw_sum(T a, T b) {
  return a + b;
}
template <class T>
T raw_prod(T a, T b) {
  return a * b;
}
template <class T>
T float_sum(T a, T b) {
  return one_nan<T>(raw_sum<T>(a, b));
}
template <class T>
T float_prod(T a, T b) {
  return one_nan<T>(raw_prod<T>(a, b));
}

// Equal operands have equal bits unless they are zeros; then `or` finds the negative one and `and` the positive.
template <class T>
T float_min(T a, T b) {
  const T chosen = from_bits<T>(bits<T>(a < b ? a : b) | bits<T>(b < a ? b : a));
  return (a == a) & (b == b) ? chosen : from_bits<T>(Bits<T>::nan);
}
template <class T>
T float_max(T a, T b) {
  const T chosen = from_bits<T>(bits<T>(a > b ? a : b) & bits<T>(b > a ? b : a));
  return (a == a) & (b == b) ? chosen : from_bits<T>(Bits<T>::nan);
}

#if defined(UNISONO_AVX2)
// The same by hand. Choosing the one NaN for each element as above is two more instructions that wait for memory,
// and in arrays beyond the caches they cost 7 %. NaN is rare: ask once for two vectors, and choose only if so.
inline bool any_nan(__m256 x, __m256 y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)) != 0; }
inline bool any_nan(__m256d x, __m256d y) { return _mm256_movemask_pd(_mm256_cmp_pd(x, y, _CMP_UNORD_Q)) != 0; }

inline __m256 one_nan(__m256 x) {
  return _mm256_blendv_ps(_mm256_set1_ps(from_bits<float>(Bits<float>::nan)), x, _mm256_cmp_ps(x, x, _CMP_EQ_OQ));
}
inline __m256d one_nan(__m256d x) {
  return _mm256_blendv_pd(_mm256_set1_pd(from_bits<double>(Bits<double>::nan)), x, _mm256_cmp_pd(x, x, _CMP_EQ_OQ));
}

// The instructions give their second operand if the two are equal or either is NaN. So `or` keeps a NaN: its
// exponent has all bits set. `and` would not; the comparison puts one back.
inline __m256 raw_min(__m256 a, __m256 b) { return _mm256_or_ps(_mm256_min_ps(a, b), _mm256_min_ps(b, a)); }
inline __m256d raw_min(__m256d a, __m256d b) { return _mm256_or_pd(_mm256_min_pd(a, b), _mm256_min_pd(b, a)); }
inline __m256 raw_max(__m256 a, __m256 b) {
  const __m256 chosen = _mm256_and_ps(_mm256_max_ps(a, b), _mm256_max_ps(b, a));
  return _mm256_or_ps(chosen, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
inline __m256d raw_max(__m256d a, __m256d b) {
  const __m256d chosen = _mm256_and_pd(_mm256_max_pd(a, b), _mm256_max_pd(b, a));
  return _mm256_or_pd(chosen, _mm256_cmp_pd(a, b, _CMP_UNORD_Q));
}

template <class Vector, Vector (*op)(Vector, Vector), class T, T (*op_of_one)(T, T)>
void two_vectors_each(byte* dst, const byte* a, const byte* b, size_t count) {
  constexpr size_t lanes = sizeof(Vector) / sizeof(T);
  const size_t vectors = count / lanes / 2 * 2;
  for (size_t i = 0; i < vectors; i += 2) {
    Vector x = op(load<Vector>(a, i), load<Vector>(b, i));
    Vector y = op(load<Vector>(a, i + 1), load<Vector>(b, i + 1));
    if (any_nan(x, y)) [[unlikely]] {
      x = one_nan(x);
      y = one_nan(y);
    }
    store(dst, i, x);
    store(dst, i + 1, y);
  }
  UNISONO_INDEPENDENT
  for (size_t i = vectors * lanes; i < count; ++i) store<T>(dst, i, op_of_one(load<T>(a, i), load<T>(b, i)));
}

#define UNISONO_BY_HAND(T, Vector, name)                                                        \
  template <>                                                                                   \
  void plain_each<T, float_##name<T>>(byte * dst, const byte* a, const byte* b, size_t count) { \
    two_vectors_each<Vector, raw_##name, T, float_##name<T>>(dst, a, b, count);                 \
  }
UNISONO_BY_HAND(float, __m256, sum)
UNISONO_BY_HAND(float, __m256, prod)
UNISONO_BY_HAND(float, __m256, min)
UNISONO_BY_HAND(float, __m256, max)
UNISONO_BY_HAND(double, __m256d, sum)
UNISONO_BY_HAND(double, __m256d, prod)
UNISONO_BY_HAND(double, __m256d, min)
UNISONO_BY_HAND(double, __m256d, max)
#endif

template <class T, size_t components>
void divide(byte* x, size_t count, int64_t divisor) {
  const T by = static_cast<T>(divisor);
  for (size_t i = 0; i < components * count; ++i) store<T>(x, i, one_nan<T>(load<T>(x, i) / by));
}

// ---- complex numbers: pairs of floats, real part first ----

template <class T>
void complex_sum(byte* dst, const byte* a, const byte* b, size_t count) {
  each<T, float_sum<T>>(dst, a, b, 2 * count);
}

template <class T>
void complex_prod(byte* dst, const byte* a, const byte* b, size_t count) {
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    const T a_re = load<T>(a, 2 * i), a_im = load<T>(a, 2 * i + 1);
    const T b_re = load<T>(b, 2 * i), b_im = load<T>(b, 2 * i + 1);
    store<T>(dst, 2 * i, one_nan<T>(a_re * b_re - a_im * b_im));
    store<T>(dst, 2 * i + 1, one_nan<T>(a_re * b_im + a_im * b_re));
  }
}

// ---- float16 and bfloat16: bits in the low half of a uint32, arithmetic in float32; narrow() sees to NaN ----

struct BFloat16 {
  static constexpr uint16_t nan = 0x7fc0, infinity = 0x7f80;

  [[gnu::always_inline]] static float widen(uint32_t half) { return from_bits<float>(half << 16); }

  [[gnu::always_inline]] static uint32_t narrow(float value) {
    const uint32_t wide = bits(one_nan(value));
    return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

struct Float16 {
  static constexpr uint16_t nan = 0x7e00, infinity = 0x7c00;
  static constexpr int32_t rebias = 112 << 23;  // float32's exponent bias is 112 more

  // Magnitudes are signed, as the comparisons that SSE2 has.
  [[gnu::always_inline]] static float widen(uint32_t half) {
    const int32_t magnitude = half & 0x7fff;
    // Infinity and NaN are raised by as much again, to float32's all-ones exponent.
    const int32_t normal = (magnitude << 13) + (magnitude < infinity ? rebias : 2 * rebias);
    const uint32_t subnormal = bits(static_cast<float>(magnitude) * 0x1p-24f);
    return from_bits<float>((magnitude < 0x400 ? subnormal : static_cast<uint32_t>(normal)) | (half & 0x8000) << 16);
  }

  [[gnu::always_inline]] static uint32_t narrow(float value) {
    constexpr int32_t smallest_normal = 113 << 23;      // 2^-14
    constexpr int32_t rounds_to_infinity = 0x477ff000;  // 65520
    const uint32_t wide = bits(value);
    const int32_t magnitude = wide & 0x7fffffff;
    const int32_t normal = (magnitude - rebias + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Next to 0.5 a float32 has steps of 2^-24, float16's smallest: the addition rounds as it must.
    const uint32_t subnormal = bits(from_bits<float>(magnitude) + 0.5f) - bits(0.5f);
    const uint32_t finite = magnitude < smallest_normal ? subnormal : static_cast<uint32_t>(normal);
    const uint32_t number = (magnitude < rounds_to_infinity ? finite : infinity) | (wide >> 16 & 0x8000);
    return value == value ? number : nan;
  }
};

// Two halves in one word, each in its place: nothing has to be moved between lanes to reach 32 bits and back.
// Too long for the compiler to inline unasked, and a loop that calls is not vectorised.
template <class Half, float (*op)(float, float)>
[[gnu::always_inline]] inline uint32_t on_pair(uint32_t a, uint32_t b) {
  const uint32_t low = Half::narrow(op(Half::widen(a & 0xffff), Half::widen(b & 0xffff)));
  const uint32_t high = Half::narrow(op(Half::widen(a >> 16), Half::widen(b >> 16)));
  return low | high << 16;
}

template <class Half, float (*op)(float, float)>
void half_each(byte* dst, const byte* a, const byte* b, size_t count) {
  each<uint32_t, on_pair<Half, op>>(dst, a, b, count / 2);
  if (count % 2 != 0) {
    const uint32_t last = on_pair<Half, op>(load<uint16_t>(a, count - 1), load<uint16_t>(b, count - 1));
    store<uint16_t>(dst, count - 1, static_cast<uint16_t>(last));
  }
}

template <class Half>
void half_divide(byte* x, size_t count, int64_t divisor) {
  const float by = static_cast<float>(divisor);
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i)
    store<uint16_t>(x, i, static_cast<uint16_t>(Half::narrow(Half::widen(load<uint16_t>(x, i)) / by)));
}

template <class Half>
void half_widen(byte* dst, const byte* src, size_t count) {
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) store<float>(dst, i, one_nan(Half::widen(load<uint16_t>(src, i))));
}

template <class Half>
void half_narrow(byte* dst, const byte* src, size_t count) {
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) store<uint16_t>(dst, i, static_cast<uint16_t>(Half::narrow(load<float>(src, i))));
}

#if defined(UNISONO_AVX2)
// float16 by the CPU's own conversions, eight at a time. A shorter rest is padded and goes the same way.
constexpr size_t block = 8;

// Call `step(first, count)` for whole blocks and once for the rest. The steps are inlined, so that the compiler
// sees a constant count in the first call.
template <class Step>
void in_blocks(size_t count, Step step) {
  size_t i = 0;
  for (; i + block <= count; i += block) step(i, block);
  if (i < count) step(i, count - i);
}

inline __m256 load_halves(const byte* from, size_t first, size_t count) {
  __m128i halves = {};
  __builtin_memcpy(&halves, from + first * sizeof(uint16_t), count * sizeof(uint16_t));
  return _mm256_cvtph_ps(halves);
}

inline void store_halves(byte* to, size_t first, size_t count, __m256 values) {
  const __m128i halves = _mm256_cvtps_ph(one_nan(values), _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(to + first * sizeof(uint16_t), &halves, count * sizeof(uint16_t));
}

template <__m256 (*op)(__m256, __m256)>
void by_conversion(byte* dst, const byte* a, const byte* b, size_t count) {
  in_blocks(count, [=](size_t first, size_t some) __attribute__((always_inline)) {
    store_halves(dst, first, some, op(load_halves(a, first, some), load_halves(b, first, some)));
  });
}

template <>
void half_each<Float16, raw_sum<float>>(byte* dst, const byte* a, const byte* b, size_t count) {
  by_conversion<raw_sum<__m256>>(dst, a, b, count);
}

template <>
void half_each<Float16, raw_prod<float>>(byte* dst, const byte* a, const byte* b, size_t count) {
  by_conversion<raw_prod<__m256>>(dst, a, b, count);
}

template <>
void half_divide<Float16>(byte* x, size_t count, int64_t divisor) {
  const __m256 by = _mm256_set1_ps(static_cast<float>(divisor));
  in_blocks(count, [=](size_t first, size_t some) __attribute__((always_inline)) {
    store_halves(x, first, some, load_halves(x, first, some) / by);
  });
}

template <>
void half_widen<Float16>(byte* dst, const byte* src, size_t count) {
  in_blocks(count, [=](size_t first, size_t some) __attribute__((always_inline)) {
    const __m256 wide = one_nan(load_halves(src, first, some));
    __builtin_memcpy(dst + first * sizeof(float), &wide, some * sizeof(float));
  });
}

template <>
void half_narrow<Float16>(byte* dst, const byte* src, size_t count) {
  in_blocks(count, [=](size_t first, size_t some) __attribute__((always_inline)) {
    __m256 wide = {};
    __builtin_memcpy(&wide, src + first * sizeof(float), some * sizeof(float));
    store_halves(dst, first, some, wide);
  });
}
#endif

// Order needs no arithmetic: with the magnitude bits of negative numbers flipped, the bits compare as integers,
// and -0.0 comes just below +0.0. Flipping again gives the number back.
inline int16_t ordered(int16_t half) { return static_cast<int16_t>(half ^ ((half >> 15) & 0x7fff)); }

template <class Half, int16_t (*choose)(int16_t, int16_t)>
int16_t half_choose(int16_t a, int16_t b) {
  const bool numbers = ((a & 0x7fff) <= Half::infinity) & ((b & 0x7fff) <= Half::infinity);
  return numbers ? ordered(choose(ordered(a), ordered(b))) : static_cast<int16_t>(Half::nan);
}

// ---- pairs (value, index): the order of either is that of integers ----

template <class T>
struct IntegerOrder {
  using Bits = T;
  static constexpr T lowest = 0;  // not used: no integer is NaN
  static T clean(T value) { return value; }
  static T key(T value) { return value; }
  static bool is_nan(T) { return false; }
};

// As `ordered` above: no number has the lowest key, and the one NaN is above infinity.
template <class T, T infinity, T nan>
struct FloatOrder {
  using Bits = T;
  static constexpr T lowest = static_cast<T>(T(1) << (8 * sizeof(T) - 1));
  static constexpr T magnitude = static_cast<T>(~lowest);
  static T clean(T bits) { return (bits & magnitude) > infinity ? nan : bits; }
  static T key(T bits) { return static_cast<T>(bits ^ ((bits >> (8 * sizeof(T) - 1)) & magnitude)); }
  static bool is_nan(T bits) { return bits == nan; }
};

template <class Order, bool largest>
void locate_each(byte* dst, const byte* a, const byte* b, size_t count) {
  using T = typename Order::Bits;
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    const T a_value = Order::clean(load<T>(a, 2 * i)), a_index = Order::clean(load<T>(a, 2 * i + 1));
    const T b_value = Order::clean(load<T>(b, 2 * i)), b_index = Order::clean(load<T>(b, 2 * i + 1));
    // NaN wins: it is the highest key already, and for a minimum it gets the lowest.
    const T a_key = !largest && Order::is_nan(a_value) ? Order::lowest : Order::key(a_value);
    const T b_key = !largest && Order::is_nan(b_value) ? Order::lowest : Order::key(b_value);
    const bool is_better = largest ? b_key > a_key : b_key < a_key;
    const bool is_lower = (a_key == b_key) & (Order::key(b_index) < Order::key(a_index));
    const bool takes_b = is_better | is_lower;
    store<T>(dst, 2 * i, takes_b ? b_value : a_value);
    store<T>(dst, 2 * i + 1, takes_b ? b_index : a_index);
  }
}

// ---- the table ----

struct Row {
  Reduce at[op_count];
};

template <class U>
constexpr Row bool_row() {
  constexpr Reduce both = each<U, truth_and<U>>, any = each<U, truth_or<U>>, one = each<U, truth_xor<U>>;
  return {{nullptr, nullptr, both, any, both, any, one, both, any, one}};
}

template <class T, class U>
constexpr Row integer_row() {
  return {{each<U, wrapping_sum<U>>, each<U, wrapping_prod<U>>, each<T, smaller<T>>, each<T, larger<T>>,
           each<U, bits_and<U>>, each<U, bits_or<U>>, each<U, bits_xor<U>>, each<U, truth_and<U>>, each<U, truth_or<U>>,
           each<U, truth_xor<U>>, locate_each<IntegerOrder<T>, true>, locate_each<IntegerOrder<T>, false>}};
}

// Floats have no bitwise and logical operations.
template <class Order>
constexpr Row float_row_of(Reduce sum, Reduce prod, Reduce min, Reduce max) {
  return {{sum, prod, min, max, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, locate_each<Order, true>,
           locate_each<Order, false>}};
}

template <class Half>
constexpr Row half_row() {
  return float_row_of<FloatOrder<int16_t, Half::infinity, Half::nan>>(
      half_each<Half, raw_sum<float>>, half_each<Half, raw_prod<float>>,
      each<int16_t, half_choose<Half, smaller<int16_t>>>, each<int16_t, half_choose<Half, larger<int16_t>>>);
}

template <class T, class Signed>
constexpr Row float_row() {
  constexpr auto infinity = static_cast<Signed>(Bits<T>::nan & Bits<T>::nan << 1);
  return float_row_of<FloatOrder<Signed, infinity, static_cast<Signed>(Bits<T>::nan)>>(
      each<T, float_sum<T>>, each<T, float_prod<T>>, each<T, float_min<T>>, each<T, float_max<T>>);
}

template <class T>
constexpr Row complex_row() {
  return {{complex_sum<T>, complex_prod<T>}};
}

constexpr Kernels make_kernels() {
  const Row rows[dtype_count] = {
      bool_row<uint8_t>(),
      integer_row<int8_t, uint8_t>(),
      integer_row<int16_t, uint16_t>(),
      integer_row<int32_t, uint32_t>(),
      integer_row<int64_t, uint64_t>(),
      integer_row<uint8_t, uint8_t>(),
      integer_row<uint16_t, uint16_t>(),
      integer_row<uint32_t, uint32_t>(),
      integer_row<uint64_t, uint64_t>(),
      half_row<Float16>(),
      half_row<BFloat16>(),
      float_row<float, int32_t>(),
      float_row<double, int64_t>(),
      complex_row<float>(),
      complex_row<double>(),
  };
  Kernels made = {};
  made.isa = UNISONO_STRING(UNISONO_ISA);
  for (size_t dtype = 0; dtype < dtype_count; ++dtype)
    for (size_t op = 0; op < op_count; ++op) made.reduce[dtype][op] = rows[dtype].at[op];

  constexpr auto f16 = static_cast<size_t>(DType::float16), bf16 = static_cast<size_t>(DType::bfloat16);
  made.divide[f16] = half_divide<Float16>;
  made.divide[bf16] = half_divide<BFloat16>;
  made.divide[static_cast<size_t>(DType::float32)] = divide<float, 1>;
  made.divide[static_cast<size_t>(DType::float64)] = divide<double, 1>;
  made.divide[static_cast<size_t>(DType::complex64)] = divide<float, 2>;
  made.divide[static_cast<size_t>(DType::complex128)] = divide<double, 2>;
  made.widen[f16] = half_widen<Float16>;
  made.widen[bf16] = half_widen<BFloat16>;
  made.narrow[f16] = half_narrow<Float16>;
  made.narrow[bf16] = half_narrow<BFloat16>;
  return made;
}

}  // namespace

namespace UNISONO_ISA {
extern constexpr Kernels kernels = make_kernels();
}

}  // namespace unisono
