// The module unisono._native: one bind function per noun, nothing else.

#include "python/bind.hpp"

NB_MODULE(_native, m) {
  m.doc() = "The native side of unisono: moves bytes and reduces. It decides nothing.";
  // A process may end while a thread of it still holds a communicator: that is no leak worth words.
  nanobind::set_leak_warnings(false);
  unisono::GilReleased::prepare();
  m.def("forbid_reacquire", &unisono::GilReleased::forbid_reacquire);
  // Registered before all that use the module, and so called after them.
  nanobind::module_::import_("atexit").attr("register")(m.attr("forbid_reacquire"));
  unisono::bind_bell(m);
  unisono::bind_kernels(m);
  unisono::bind_engine(m);
  unisono::bind_hot_path(m);
  unisono::bind_mailbox(m);
  unisono::bind_hot_messages(m);
}
