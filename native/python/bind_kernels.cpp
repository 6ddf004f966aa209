// The kernels as Python functions. Every argument is checked, so that no call from Python can reach memory outside its
// buffers.

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/isa.hpp"
#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {
namespace {

// A contiguous buffer, held for the length of a call: its owner can neither free nor resize it meanwhile.
class Bytes {
 public:
  Bytes(nb::handle owner, int flags) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

std::size_t parse_code(nb::handle given, std::size_t limit, const char* what) {
  int overflow = 0;
  const long code = PyLong_AsLongAndOverflow(given.ptr(), &overflow);
  if (overflow != 0) throw nb::value_error(("no " + std::string(what) + " has such a code").c_str());
  if (code == -1 && PyErr_Occurred()) throw nb::python_error();
  if (code < 0 || static_cast<std::size_t>(code) >= limit)
    throw nb::value_error(("no " + std::string(what) + " has the code " + std::to_string(code)).c_str());
  return static_cast<std::size_t>(code);
}

template <class Kernel>
Kernel require(Kernel kernel, const char* what, std::size_t dtype) {
  if (kernel == nullptr)
    throw nb::value_error((std::string(what) + " is not defined for dtype " + std::to_string(dtype)).c_str());
  return kernel;
}

std::size_t elements(const Bytes& bytes, std::size_t itemsize) {
  if (bytes.size() % itemsize != 0)
    throw nb::value_error((std::to_string(bytes.size()) + " bytes are not a whole number of elements of " +
                           std::to_string(itemsize) + " bytes")
                              .c_str());
  return bytes.size() / itemsize;
}

void require_equal(std::size_t dst_elements, std::size_t src_elements) {
  if (dst_elements != src_elements)
    throw nb::value_error(("the destination has " + std::to_string(dst_elements) + " elements, an operand " +
                           std::to_string(src_elements))
                              .c_str());
}

bool overlap(const Bytes& x, const Bytes& y) {
  const auto x_first = reinterpret_cast<std::uintptr_t>(x.data()), y_first = reinterpret_cast<std::uintptr_t>(y.data());
  return x_first < y_first + y.size() && y_first < x_first + x.size();
}

void require_separate(bool allowed) {
  if (!allowed) throw nb::value_error("the destination overlaps an operand without being the same memory");
}

template <class Work>
void run(std::size_t bytes, Work work) {
  std::optional<GilReleased> released;
  if (bytes >= gil_release_bytes) released.emplace();
  work();
}

void reduce(nb::handle dst_owner, nb::handle a_owner, nb::handle b_owner, nb::handle dtype_code, nb::handle op_code) {
  const std::size_t dtype = parse_code(dtype_code, dtype_count, "dtype");
  const std::size_t op = parse_code(op_code, op_count, "op");
  const Reduce kernel = require(active_kernels().reduce[dtype][op], "op", dtype);

  // Acquire the buffer of an in-place operand only once: acquiring is half the time of a small call.
  const Bytes dst(dst_owner, PyBUF_WRITABLE);
  std::optional<Bytes> a_own, b_own;
  const Bytes& a = a_owner.is(dst_owner) ? dst : a_own.emplace(a_owner, PyBUF_SIMPLE);
  const Bytes& b = b_owner.is(dst_owner) ? dst : b_own.emplace(b_owner, PyBUF_SIMPLE);
  const std::size_t item = item_bytes(dtype, static_cast<std::int32_t>(op)), count = elements(dst, item);
  for (const Bytes* operand : {&a, &b}) {
    require_equal(count, elements(*operand, item));
    require_separate(operand->data() == dst.data() || !overlap(dst, *operand));
  }
  run(dst.size(), [&] { kernel(dst.data(), a.data(), b.data(), count); });
}

void divide(nb::handle x_owner, std::int64_t divisor, nb::handle dtype_code) {
  const std::size_t dtype = parse_code(dtype_code, dtype_count, "dtype");
  const Divide kernel = require(active_kernels().divide[dtype], "divide", dtype);
  if (divisor < 1) throw nb::value_error(("cannot take a mean of " + std::to_string(divisor)).c_str());
  const Bytes x(x_owner, PyBUF_WRITABLE);
  const std::size_t count = elements(x, itemsizes[dtype]);
  run(x.size(), [&] { kernel(x.data(), count, divisor); });
}

void convert(const Bytes& dst, std::size_t dst_itemsize, const Bytes& src, std::size_t src_itemsize, Convert kernel) {
  const std::size_t count = elements(dst, dst_itemsize);
  require_equal(count, elements(src, src_itemsize));
  require_separate(!overlap(dst, src));
  run(src.size() + dst.size(), [&] { kernel(dst.data(), src.data(), count); });
}

void widen(nb::handle dst_owner, nb::handle src_owner, nb::handle dtype_code) {
  const std::size_t dtype = parse_code(dtype_code, dtype_count, "dtype");
  const Convert kernel = require(active_kernels().widen[dtype], "widen", dtype);
  convert(Bytes(dst_owner, PyBUF_WRITABLE), sizeof(float), Bytes(src_owner, PyBUF_SIMPLE), itemsizes[dtype], kernel);
}

void narrow(nb::handle dst_owner, nb::handle src_owner, nb::handle dtype_code) {
  const std::size_t dtype = parse_code(dtype_code, dtype_count, "dtype");
  const Convert kernel = require(active_kernels().narrow[dtype], "narrow", dtype);
  convert(Bytes(dst_owner, PyBUF_WRITABLE), itemsizes[dtype], Bytes(src_owner, PyBUF_SIMPLE), sizeof(float), kernel);
}

nb::tuple isas() {
  nb::list names;
  for (const Kernels* kernels : usable_kernels()) names.append(kernels->isa);
  return nb::tuple(names);
}

void use_isa(const char* name) {
  if (!use_kernels(name)) throw nb::value_error((std::string("this CPU has no kernels for ") + name).c_str());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("reduce", &reduce, nb::arg("dst"), nb::arg("a"), nb::arg("b"), nb::arg("dtype"), nb::arg("op"),
        "dst = a op b, on contiguous buffers; dst may be a or b.");
  m.def("divide", &divide, nb::arg("x"), nb::arg("n"), nb::arg("dtype"), "x = x / n, in place.");
  m.def("widen", &widen, nb::arg("dst"), nb::arg("src"), nb::arg("dtype"), "float32 dst = src of the half type.");
  m.def("narrow", &narrow, nb::arg("dst"), nb::arg("src"), nb::arg("dtype"), "dst of the half type = float32 src.");
  m.def("isa", [] { return active_kernels().isa; }, "The instruction set in use.");
  m.def("isas", &isas, "Every instruction set that this CPU can run, the plainest first.");
  m.def("use_isa", &use_isa, nb::arg("name"), "Use another instruction set from now on, in the whole process.");
}

}  // namespace unisono
