#include "python/op_names.hpp"

#include "python/argument.hpp"

namespace unisono {

using namespace engine;

OpNames op_names;

void OpNames::set(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (name == "maxloc") maxloc_ = static_cast<std::int16_t>(words_.size());
    if (name == "minloc") minloc_ = static_cast<std::int16_t>(words_.size());
    words_.push_back(interned(name.c_str()));
  }
}

uint64_t OpNames::width_of(std::int16_t number) const { return number == maxloc_ || number == minloc_ ? 2 : 1; }

std::int16_t OpNames::number_of(PyObject* op) const {
  if (op == nullptr) return 0;
  for (size_t i = 0; i < words_.size(); ++i)
    if (words_[i] == op) return static_cast<std::int16_t>(i);
  nb::object name = nb::borrow(op);
  if (!PyUnicode_CheckExact(op)) {
    static PyObject* const fn_word = interned("fn");
    static PyObject* const name_word = interned("name");
    const nb::object fn = nb::steal(PyObject_GetAttr(op, fn_word));
    if (!fn.is_valid() || !fn.is_none()) {
      PyErr_Clear();
      throw LeftToReference();
    }
    name = nb::steal(PyObject_GetAttr(op, name_word));
    if (!name.is_valid() || !PyUnicode_CheckExact(name.ptr())) {
      PyErr_Clear();
      throw LeftToReference();
    }
  }
  for (size_t i = 0; i < words_.size(); ++i)
    if (PyUnicode_Compare(words_[i], name.ptr()) == 0) return static_cast<std::int16_t>(i);
  throw LeftToReference();
}

}  // namespace unisono
