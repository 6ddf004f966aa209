// A torch tensor on the CPU, seen without a call into Python: torch 2.10 and later hand out DLPack's C functions.
//
// torch is never imported: a program that passes a tensor has imported it. What is not seen here (an older torch,
// another device or layout, gaps in memory, a type without a number) goes to Python's buffers.view.

#pragma once

#include <cstdint>

#include "python/bind.hpp"

namespace unisono {

namespace nb = nanobind;

// A tensor or parameter of torch; other subclasses are Python's.
bool is_tensor(PyObject* object);

struct TensorView {
  static constexpr int dims_max = 32;
  std::byte* data;
  uint8_t dtype;
  int nd;
  Py_ssize_t shape[dims_max];
};

// Whether a tensor lies in a row in the memory of this process, as its program sees it.
bool view_tensor(PyObject* tensor, TensorView& seen);

// A tensor of an array's memory, and the reverse. bfloat16 has no type in NumPy: its array is one of uint16.
nb::object tensor_of(nb::handle array, uint8_t dtype);
nb::object array_of(nb::handle tensor);

}  // namespace unisono
