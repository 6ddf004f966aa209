// Names of reductions by number, as in core/ops.py.

#pragma once

#include <string>
#include <vector>

#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

class OpNames {
 public:
  static constexpr std::int16_t none = -1;
  void set(const std::vector<std::string>& names);
  // Throws LeftToReference for a user's own and for anything unknown.
  std::int16_t number_of(PyObject* op) const;
  // How many elements are never separated.
  uint64_t width_of(std::int16_t number) const;
  nb::object name_of(std::int16_t number) const { return nb::borrow(words_[static_cast<size_t>(number)]); }

 private:
  std::vector<PyObject*> words_;  // interned, kept for good
  std::int16_t maxloc_ = none, minloc_ = none;
};
extern OpNames op_names;

}  // namespace unisono
