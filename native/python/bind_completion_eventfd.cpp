// The bell as a Python class.

#include "python/completion_eventfd.hpp"

#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

class PyBell {
 public:
  int descriptor() const { return bell_->descriptor(); }
  std::uint64_t ticket(std::uint64_t number) { return bell_->ticket(number); }
  static std::uint64_t ring() { return reinterpret_cast<std::uint64_t>(&CompletionEventFd::ring); }

  nb::list take() {
    nb::list result;
    for (const auto& [number, code] : bell_->take()) result.append(nb::make_tuple(number, int{code}));
    return result;
  }

 private:
  std::shared_ptr<CompletionEventFd> bell_ = std::make_shared<CompletionEventFd>();
};

}  // namespace

void bind_bell(nb::module_& m) {
  nb::class_<PyBell>(m, "CompletionEventFd")
      .def(nb::init<>())
      .def("descriptor", &PyBell::descriptor)
      .def("ticket", &PyBell::ticket)
      .def_static("ring", &PyBell::ring)
      .def("take", &PyBell::take);
}

}  // namespace unisono
