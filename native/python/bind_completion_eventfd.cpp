// CompletionEventFd as a Python class.

#include "python/completion_eventfd.hpp"

#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

class PyCompletionEventFd {
 public:
  int descriptor() const { return event_->descriptor(); }
  std::uint64_t token(std::uint64_t number) { return event_->token(number); }
  static std::uint64_t ring() { return reinterpret_cast<std::uint64_t>(&CompletionEventFd::ring); }

  nb::list take() {
    nb::list result;
    for (const auto& [number, code] : event_->take()) result.append(nb::make_tuple(number, int{code}));
    return result;
  }

 private:
  std::shared_ptr<CompletionEventFd> event_ = std::make_shared<CompletionEventFd>();
};

}  // namespace

void bind_completion_eventfd(nb::module_& m) {
  nb::class_<PyCompletionEventFd>(m, "CompletionEventFd")
      .def(nb::init<>())
      .def("descriptor", &PyCompletionEventFd::descriptor)
      .def("token", &PyCompletionEventFd::token)
      .def_static("ring", &PyCompletionEventFd::ring)
      .def("take", &PyCompletionEventFd::take);
}

}  // namespace unisono
