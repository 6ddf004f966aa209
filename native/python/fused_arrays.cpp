#include "python/fused_arrays.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "kernels/kernels.hpp"
#include "python/gil_released.hpp"

namespace unisono {

FusedArrays::FusedArrays(const Arguments& arguments, PyObject* given, uint64_t width) : given_(nb::borrow(given)) {
  if (!PyList_Check(given) && !PyTuple_Check(given)) throw LeftToReference();
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
    if (width != 1 && (array.nd == 0 || array.shape[array.nd - 1] != static_cast<Py_ssize_t>(width)))
      throw LeftToReference();
    lengths_.push_back(static_cast<std::int64_t>(array.count));
    Bundle& bundle = bundle_of(array.dtype);
    ++bundle.arrays;
    bundle.count += array.count;
  }
}

FusedArrays::Bundle& FusedArrays::bundle_of(uint8_t dtype) {
  auto place = bundles_.begin();
  while (place != bundles_.end() && place->dtype < dtype) ++place;
  if (place == bundles_.end() || place->dtype != dtype) {
    place = bundles_.emplace(place);
    place->dtype = dtype;
  }
  return *place;
}

template <class Visit>
void FusedArrays::for_each_of(const Bundle& bundle, Visit visit) const {
  for (size_t i = 0; i < number_; ++i)
    if (arrays_[i].dtype == bundle.dtype) visit(arrays_[i]);
}

uint64_t FusedArrays::nbytes() const {
  uint64_t all = 0;
  for (const Bundle& bundle : bundles_) all += bundle.count * itemsizes[bundle.dtype];
  return all;
}

void FusedArrays::types(std::vector<uint8_t>& into) const {
  into.clear();
  for (size_t i = 0; i < number_; ++i) into.push_back(arrays_[i].dtype);
}

std::vector<std::int64_t> FusedArrays::compared() const {
  std::vector<std::int64_t> values;
  values.reserve(2 * number_);
  for (size_t i = 0; i < number_; ++i) {
    values.push_back(arrays_[i].dtype);
    values.push_back(lengths_[i]);
  }
  return values;
}

void FusedArrays::join() {
  std::optional<GilReleased> released;
  if (nbytes() >= gil_release_bytes) released.emplace();
  for (Bundle& bundle : bundles_) {
    if (bundle.arrays == 1) {
      for_each_of(bundle, [&](const Argument& only) { bundle.data = only.data; });
      continue;
    }
    const uint64_t nbytes = bundle.count * itemsizes[bundle.dtype];
    bundle.joined = engine::ResultMemory::take(nbytes);
    bundle.data = bundle.joined.get();
    if (bundle.data == nullptr && nbytes != 0) {
      released.reset();
      PyErr_NoMemory();
      throw nb::python_error();
    }
    engine::byte* into = bundle.data;
    for_each_of(bundle, [&](const Argument& array) {
      if (array.count != 0) std::memcpy(into, array.data, array.nbytes());
      into += array.nbytes();
    });
  }
}

void FusedArrays::part(const Bundle& bundle) const {
  if (bundle.arrays == 1) return;
  std::optional<GilReleased> released;
  if (bundle.count * itemsizes[bundle.dtype] >= gil_release_bytes) released.emplace();
  const engine::byte* from = bundle.data;
  for_each_of(bundle, [&](const Argument& array) {
    if (array.count != 0) std::memcpy(array.data, from, array.nbytes());
    from += array.nbytes();
  });
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
