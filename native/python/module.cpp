// The module unisono._native.

#include "python/bind.hpp"

NB_MODULE(_native, m) {
  m.doc() = "The native engine of unisono: moves bytes, matches messages, runs programs and reduces.";
  // A process may exit while one of its threads still holds a communicator: nanobind should not warn of that.
  nanobind::set_leak_warnings(false);
  unisono::GilReleased::prepare();
  m.def("forbid_reacquire", &unisono::GilReleased::forbid_reacquire);
  // Registered before any user of the module, and so called after all of theirs.
  nanobind::module_::import_("atexit").attr("register")(m.attr("forbid_reacquire"));
  unisono::bind_completion_eventfd(m);
  unisono::bind_codec(m);
  unisono::bind_kernels(m);
  unisono::bind_local_world(m);
  unisono::bind_program(m);
  unisono::bind_engine(m);
  unisono::bind_call_log(m);
  unisono::bind_mailbox(m);
  unisono::bind_rpc_frame(m);
  unisono::bind_verbs(m);
}
