#include "python/user_files.hpp"

#include <utility>

namespace unisono {

UserFiles user_files;

void UserFiles::set_rule(nb::object is_users) {
  rule_ = is_users.release();
  Py_XDECREF(std::exchange(last_, nullptr));
  for (const auto& [name, is_one] : known_) Py_DECREF(name);
  known_.clear();
}

bool UserFiles::has(PyObject* code) {
  if (code == last_ || !rule_.is_valid()) return true;
  PyObject* const name = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  auto known = known_.find(name);
  if (known == known_.end()) {
    const bool is_one = nb::cast<bool>(rule_(nb::handle(name)));
    if (known_.size() == names_max) set_rule(nb::borrow(rule_));
    known = known_.emplace(Py_NewRef(name), is_one).first;
  }
  if (known->second) {
    Py_XDECREF(std::exchange(last_, Py_NewRef(code)));
  }
  return known->second;
}

}  // namespace unisono
