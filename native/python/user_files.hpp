// Which files are the user's, so that reports show the user's line: core/call_site.py has the rule.

#pragma once

#include <unordered_map>

#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

class UserFiles {
 public:
  void set_rule(nb::object is_users);
  // Whether a code object is from such a file.
  bool has(PyObject* code);

 private:
  // A program may compile code under new names without end.
  static constexpr size_t names_max = 4096;
  nb::handle rule_;
  PyObject* last_ = nullptr;                   // the user's code that was seen last
  std::unordered_map<PyObject*, bool> known_;  // by the name, of which a module has one
};
extern UserFiles user_files;

}  // namespace unisono
