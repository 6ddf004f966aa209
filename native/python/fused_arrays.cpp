#include "python/fused_arrays.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "kernels/kernels.hpp"
#include "python/gil_released.hpp"

namespace unisono {

FusedArrays::FusedArrays(const Arguments& arguments, PyObject* given, uint64_t width) : given_(nb::borrow(given)) {
  if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given)) throw LeftToReference();
  items_ = nb::steal(PySequence_Tuple(given));
  if (!items_.is_valid()) throw nb::python_error();
  number_ = static_cast<size_t>(PyTuple_GET_SIZE(items_.ptr()));
  if (number_ == 0) throw LeftToReference();
  arrays_ = std::make_unique<Argument[]>(number_);
  lengths_.reserve(number_);
  for (size_t i = 0; i < number_; ++i) {
    Argument& array = arrays_[i];
    try {
      arguments.see(PyTuple_GET_ITEM(items_.ptr(), static_cast<Py_ssize_t>(i)), "xs", true, array);
    } catch (nb::python_error&) {
      throw LeftToReference();  // it says which one is wrong
    }
    const bool is_whole = width == 1 || (array.nd > 0 && array.shape[array.nd - 1] == static_cast<Py_ssize_t>(width));
    if (array.dtype != arrays_[0].dtype || !is_whole) throw LeftToReference();
    lengths_.push_back(static_cast<std::int64_t>(array.count));
    count_ += array.count;
  }
}

std::vector<std::int64_t> FusedArrays::compared() const {
  std::vector<std::int64_t> values;
  values.reserve(2 * number_);
  for (const std::int64_t length : lengths_) {
    values.push_back(dtype());
    values.push_back(length);
  }
  return values;
}

engine::byte* FusedArrays::join(const Arguments& arguments, Result& result) const {
  if (number_ == 1) return arrays_[0].data;
  const auto length = static_cast<Py_ssize_t>(count_);
  result = arguments.make(arrays_[0], &length, 1);
  std::optional<GilReleased> released;
  if (count_ * itemsizes[dtype()] >= gil_release_bytes) released.emplace();
  engine::byte* into = result.data;
  for (size_t i = 0; i < number_; ++i) {
    if (arrays_[i].count != 0) std::memcpy(into, arrays_[i].data, arrays_[i].nbytes());
    into += arrays_[i].nbytes();
  }
  return result.data;
}

void FusedArrays::part(const engine::byte* joined) const {
  if (number_ == 1) return;
  std::optional<GilReleased> released;
  if (count_ * itemsizes[dtype()] >= gil_release_bytes) released.emplace();
  for (size_t i = 0; i < number_; ++i) {
    if (arrays_[i].count != 0) std::memcpy(arrays_[i].data, joined, arrays_[i].nbytes());
    joined += arrays_[i].nbytes();
  }
}

PyObject* FusedArrays::give_back() const {
  const bool has_number =
      std::any_of(arrays_.get(), arrays_.get() + number_, [](const Argument& array) { return array.is_number(); });
  if (!has_number) return Py_NewRef(given_.ptr());
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(number_)));
  if (!list.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < number_; ++i) {
    PyObject* const one = Arguments::give_back(arrays_[i]);
    if (one == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), one);
  }
  return list.release().ptr();
}

}  // namespace unisono
