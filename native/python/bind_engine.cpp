// The binding of the engine.

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>

#include "python/blocking.hpp"
#include "python/py_engine.hpp"

namespace unisono {

using namespace engine;

engine::CompletionQueue& completions_of(nb::handle engine) { return nb::cast<PyEngine&>(engine).completions(); }

void bind_engine(nb::module_& m) {
  m.attr("CONTROL_EAGER_BYTES_SHM") = shm_eager_bytes_max(Lane::control);
  m.attr("CONTROL_EAGER_BYTES_SOCKET") = eager_bytes_max_of(Lane::control);
  m.attr("SIGNAL_CHECK_S") = static_cast<double>(signal_check_ns) / 1e9;
  nb::exception<ForkedError>(m, "ForkedError", PyExc_RuntimeError);
  nb::class_<PyEngine>(m, "Engine")
      .def(
          "__init__",
          [](PyEngine* self, std::int32_t rank, std::int32_t size, const std::string& directory, nb::bytes secret,
             uint64_t eager_bytes, uint64_t eager_credit_bytes, uint64_t message_bytes_max, uint64_t recv_bytes_max,
             uint64_t control_eager_bytes, uint64_t control_credit_bytes, uint64_t control_bytes_max,
             uint64_t own_credit_bytes, double silence_s, uint64_t stranger_bytes_max, double stranger_s,
             uint64_t strangers_max, uint64_t strangers_per_address_max, bool shm, bool checksum, bool neighbours,
             bool direct_read, const std::string& bind, uint16_t port, const std::string& host, bool tls,
             uint64_t rekey_records, bool quic, size_t datagram_bytes, size_t socket_buffer_bytes,
             std::shared_ptr<LocalWorld> local) {
            if (rekey_records == 0) throw nb::value_error("rekey_records: allowed: at least 1");
            if (datagram_bytes != 0 && (datagram_bytes < 1200 || datagram_bytes > 64'000))
              throw nb::value_error("datagram_bytes: allowed: 0, or 1200 to 64000");
            Settings settings{};
            settings.eager_bytes = eager_bytes;
            settings.eager_credit_bytes = eager_credit_bytes;
            settings.message_bytes_max = message_bytes_max;
            settings.recv_bytes_max = recv_bytes_max;
            settings.control_eager_bytes = control_eager_bytes;
            settings.control_credit_bytes = control_credit_bytes;
            settings.control_bytes_max = control_bytes_max;
            settings.own_credit_bytes = own_credit_bytes;
            settings.silence_ns = in_ns(silence_s);
            settings.stranger_bytes_max = stranger_bytes_max;
            settings.stranger_ns = in_ns(stranger_s);
            settings.strangers_max = strangers_max;
            settings.strangers_per_address_max = strangers_per_address_max;
            settings.shm = shm;
            settings.checksum = checksum;
            settings.neighbours = neighbours;
            settings.direct_read = direct_read;
            settings.bind = bind;
            settings.port = port;
            settings.host = host;
            settings.tls = tls;
            settings.rekey_records = rekey_records;
            settings.quic = quic;
            settings.datagram_bytes = datagram_bytes;
            settings.socket_buffer_bytes = std::min<size_t>(socket_buffer_bytes, INT_MAX);
            new (self) PyEngine(rank, size, directory, secret, settings, std::move(local));
          },
          nb::arg("rank"), nb::arg("size"), nb::arg("directory"), nb::arg("secret"), nb::kw_only(),
          nb::arg("eager_bytes"), nb::arg("eager_credit_bytes"), nb::arg("message_bytes_max"),
          nb::arg("recv_bytes_max"), nb::arg("control_eager_bytes"), nb::arg("control_credit_bytes"),
          nb::arg("control_bytes_max"), nb::arg("own_credit_bytes"), nb::arg("silence_s"),
          nb::arg("stranger_bytes_max"), nb::arg("stranger_s"), nb::arg("strangers_max"),
          nb::arg("strangers_per_address_max"), nb::arg("shm") = true, nb::arg("checksum") = true,
          nb::arg("neighbours") = false, nb::arg("direct_read") = true, nb::arg("bind") = "127.0.0.1",
          nb::arg("port") = 0, nb::arg("host") = "", nb::arg("tls") = false,
          nb::arg("rekey_records") = Settings{}.rekey_records, nb::arg("quic") = false, nb::arg("datagram_bytes") = 0,
          nb::arg("socket_buffer_bytes") = Settings{}.socket_buffer_bytes, nb::arg("local") = nb::none())
      .def("card", &PyEngine::card)
      .def("secure", &PyEngine::secure, nb::arg("names"), nb::arg("key"), nb::arg("certificate"), nb::arg("authority"))
      .def("connect", &PyEngine::connect, nb::arg("cards"))
      .def("send", &PyEngine::send)
      .def("receive", &PyEngine::receive, nb::arg("id"), nb::arg("src"), nb::arg("context"), nb::arg("tag"),
           nb::arg("into").none(), nb::arg("dtype"), nb::arg("in_order"))
      .def("probe", &PyEngine::probe)
      .def("cancel", &PyEngine::cancel)
      .def("run", &PyEngine::run, nb::arg("id"), nb::arg("call"), nb::arg("context"), nb::arg("tag"), nb::arg("dtype"),
           nb::arg("op"), nb::arg("memory_in").none(), nb::arg("memory_out").none(), nb::arg("header"),
           nb::arg("window"), nb::arg("row_bytes") = 0)
      .def("adopt", &PyEngine::adopt)
      .def("awaited", &PyEngine::awaited)
      .def("wait", &PyEngine::wait)
      .def("pump", &PyEngine::pump)
      .def("more", &PyEngine::more)
      .def("ignore_context", &PyEngine::ignore_context)
      .def("end_context", &PyEngine::end_context)
      .def("end_unused_context", &PyEngine::end_unused_context)
      .def("has_undispatched", &PyEngine::has_undispatched)
      .def("interrupt_count", &PyEngine::interrupt_count)
      .def("interrupt_wait", &PyEngine::interrupt_wait)
      .def("close", &PyEngine::close)
      .def("is_forked", &PyEngine::is_forked)
      .def("refused", &PyEngine::refused)
      .def("take_refusals", &PyEngine::take_refusals)
      .def("down_of", &PyEngine::down_of)
      .def("links", &PyEngine::links)
      .def("ping", &PyEngine::ping);
  m.def("has_quic", &engine::QuicConnector::is_built);
}

}  // namespace unisono
