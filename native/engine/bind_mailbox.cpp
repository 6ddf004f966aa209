// The mailbox as a Python class: see contract.Mailbox. Readers wait without the GIL.

#include <cmath>

#include "../bind.hpp"
#include "desk.hpp"
#include "mailbox.hpp"

namespace nb = nanobind;

namespace unisono {

engine::Desk& desk_of(nb::handle engine);

namespace {

using namespace engine;

class PyMailbox {
 public:
  PyMailbox(nb::object engine, uint64_t context, uint64_t tag)
      : owner_(std::move(engine)), desk_(desk_of(owner_)), engine_(desk_.engine()) {
    if (engine_.is_forked()) throw nb::value_error("this engine belongs to the parent process");
    const Hold held = engine_.hold();
    box_ = std::make_shared<Mailbox>(engine_, context, tag);
  }
  ~PyMailbox() {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    box_->close();
    // What is still on its way belongs to the engine until it ends.
    if (!box_->is_idle()) desk_.keep(std::move(box_));
  }
  PyMailbox(const PyMailbox&) = delete;
  PyMailbox& operator=(const PyMailbox&) = delete;

  void post(std::int32_t dst, nb::bytes data) {
    if (dst < 0 || dst >= engine_.size) throw nb::value_error("no such rank");
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    // Once it is closed nobody answers, and whoever closed it has said so.
    box_->post(dst, reinterpret_cast<const byte*>(data.c_str()), data.size());
  }

  nb::list take(double timeout, bool is_front) {
    nb::list result;
    if (engine_.is_forked()) return result;
    std::vector<Letter> letters;
    {
      const nb::gil_scoped_release release;
      Hold held = engine_.hold();
      const std::int64_t ns = timeout > 0 ? std::llround(std::min(timeout, 1e8) * 1e9) : 0;
      letters = box_->take(held, now_ns() + ns, is_front);
    }
    for (const Letter& letter : letters)
      result.append(nb::make_tuple(letter.source, nb::bytes(reinterpret_cast<const char*>(letter.data.get()), letter.nbytes)));
    return result;
  }

  void poke(bool is_front) {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    box_->poke(is_front);
  }

  void close() {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    box_->close();
  }

 private:
  nb::object owner_;
  Desk& desk_;
  Engine& engine_;
  std::shared_ptr<Mailbox> box_;
};

}  // namespace

void bind_mailbox(nb::module_& m) {
  nb::class_<PyMailbox>(m, "Mailbox")
      .def(nb::init<nb::object, uint64_t, uint64_t>(), nb::arg("engine"), nb::arg("context"), nb::arg("tag"))
      .def("post", &PyMailbox::post)
      .def("take", &PyMailbox::take)
      .def("poke", &PyMailbox::poke)
      .def("close", &PyMailbox::close);
}

}  // namespace unisono
