#include "python/part_counts.hpp"

namespace unisono {
namespace {

// What `operator.index` makes of an object.
std::int64_t whole_number(PyObject* object) {
  const nb::object number = PyLong_CheckExact(object) ? nb::borrow(object) : nb::steal(PyNumber_Index(object));
  int overflow = 0;
  const std::int64_t value = number.is_valid() ? PyLong_AsLongLongAndOverflow(number.ptr(), &overflow) : -1;
  if (!number.is_valid()) PyErr_Clear();
  if (overflow != 0 || value < 0) throw LeftToReference();
  return value;
}

void read_items(PyObject* given, std::vector<std::int64_t>& rows) {
  // A copy: an item's __index__ may change the list.
  const nb::object items = nb::steal(PySequence_Tuple(given));
  if (!items.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
    PyErr_Clear();
    throw LeftToReference();
  }
  const Py_ssize_t number = PyTuple_GET_SIZE(items.ptr());
  rows.reserve(static_cast<size_t>(number));
  for (Py_ssize_t i = 0; i < number; ++i) rows.push_back(whole_number(PyTuple_GET_ITEM(items.ptr(), i)));
}

}  // namespace

void PartCounts::read(PyObject* given, const Argument& x, std::int32_t ranks, uint64_t width) {
  if (PyIter_Check(given) != 0) throw LeftToReference();  // it can be read only once
  read_items(given, rows_);
  if (x.nd == 0 || rows_.size() != static_cast<size_t>(ranks)) throw LeftToReference();
  row_elements_ = 1;
  for (int i = 1; i < x.nd; ++i) row_elements_ *= x.shape[i];
  std::int64_t left = x.shape[0];
  items_.reserve(rows_.size());
  for (const std::int64_t rows : rows_) {
    if (rows < 0 || rows > left) throw LeftToReference();
    left -= rows;
    const auto elements = static_cast<uint64_t>(rows * row_elements_);
    if (elements % width != 0) throw LeftToReference();
    items_.push_back(elements / width);
  }
  if (left != 0) throw LeftToReference();
}

}  // namespace unisono
