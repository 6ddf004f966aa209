// The call log of a group, and the hash and fields of a fingerprint, for Python.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <set>

#include "collective/call_log.hpp"
#include "collective/run.hpp"
#include "engine/completion_queue.hpp"
#include "python/bind.hpp"
#include "python/fingerprint_bytes.hpp"

namespace nb = nanobind;

namespace unisono {
namespace {

using namespace engine;

void release(void* code) { Py_DECREF(static_cast<PyObject*>(code)); }

// Log a call that Python makes; `code` is None if its line is unknown.
void remember(CallLog& self, uint64_t sequence, nb::bytes data, nb::object code, int instruction,
              const std::optional<std::vector<std::int64_t>>& lengths) {
  const Fingerprint fingerprint = fingerprint_of(data);
  if (!code.is_none() && !PyCode_Check(code.ptr())) throw nb::type_error("not a code object");
  CallLog::Site site;
  if (!code.is_none()) site = {code.release().ptr(), instruction};
  const nb::object replaced = nb::steal(static_cast<PyObject*>(self.remember(sequence, fingerprint, site)));
  if (lengths) self.lengths() = {true, *lengths, {}};
}

// File and line of a call, found only now: most calls are never asked about.
nb::object site_of(const CallLog& self, uint64_t sequence) {
  const CallLog::Entry* const entry = self.find(sequence);
  if (entry == nullptr || entry->site.code == nullptr) return nb::none();
  const nb::object code = nb::borrow(static_cast<PyObject*>(entry->site.code));
  const int line = PyCode_Addr2Line(reinterpret_cast<PyCodeObject*>(code.ptr()), entry->site.instruction);
  return nb::make_tuple(code.attr("co_filename"), line);
}

// The lengths of a call that the engine has made; None if they are not known.
nb::object lengths_of(const CallLog& self, uint64_t sequence) {
  const CallLog::Entry* const entry = self.find(sequence);
  if (entry == nullptr || !entry->lengths.are_known) return nb::none();
  nb::list lengths;
  for (const std::int64_t length : entry->lengths.of) lengths.append(length);
  return nb::tuple(lengths);
}

// The types of the arrays of a call that has several, by number; None if the engine has not made it.
nb::object types_of(const CallLog& self, uint64_t sequence) {
  const CallLog::Entry* const entry = self.find(sequence);
  if (entry == nullptr || !entry->lengths.are_known || entry->lengths.types.empty()) return nb::none();
  nb::list types;
  for (const uint8_t type : entry->lengths.types) types.append(int{type});
  return nb::tuple(types);
}

}  // namespace

void bind_call_log(nb::module_& m) {
  m.def("fingerprint_hash",
        [](uint64_t seed, const std::vector<std::int64_t>& values) { return Fingerprint::hash_of(seed, values); });
  m.def("fingerprint_fields", [](nb::bytes data) {
    const Fingerprint f = fingerprint_of(data);
    return nb::make_tuple(f.verb(), f.dtype(), f.op(), f.algorithm(), f.root(), f.stage(), f.count(), f.hash());
  });
  m.def("fingerprint_with",
        [](nb::bytes data, uint64_t count, uint32_t hash) { return bytes_of(fingerprint_of(data).with(count, hash)); });
  nb::class_<CallLog>(m, "CallLog")
      .def("__init__", [](CallLog* self) { new (self) CallLog(&release); })
      .def_rw("next", &CallLog::next)
      .def_rw("fast_path_open", &CallLog::fast_path_open)
      .def_rw("messages_open", &CallLog::messages_open)
      .def_prop_ro("is_agreed", &CallLog::is_agreed)
      .def("take", [](CallLog& self) { return self.next++; })
      .def("remember", &remember, nb::arg("sequence"), nb::arg("fingerprint"), nb::arg("code").none() = nb::none(),
           nb::arg("instruction") = 0, nb::arg("lengths").none() = nb::none())
      .def("site", &site_of, nb::arg("sequence"))
      .def("lengths", &lengths_of, nb::arg("sequence"))
      .def("types", &types_of, nb::arg("sequence"))
      .def("find",
           [](const CallLog& self, uint64_t sequence) -> nb::object {
             const CallLog::Entry* const found = self.find(sequence);
             if (found == nullptr) return nb::none();
             return bytes_of(found->fingerprint);
           })
      .def("last",
           [](const CallLog& self, size_t count) {
             nb::dict calls;
             for (size_t i = std::min(count, self.size()); i > 0; --i)
               calls[nb::int_(self.at(i - 1).sequence)] = bytes_of(self.at(i - 1).fingerprint);
             return calls;
           })
      .def("__len__", &CallLog::size)
      .def("awaited",
           [](const CallLog& self, uint64_t sequence) {
             std::set<std::int32_t> ranks;  // ascending
             for (const CallLog::InFlightCall* flight : self.flights) {
               if (flight->sequence != sequence) continue;
               const Hold held = flight->completions.engine().hold();
               for (const uint64_t handle : flight->handles)
                 if (const Run* const run = flight->completions.run_of(handle); run != nullptr)
                   for (const std::int32_t rank : run->awaited()) ranks.insert(rank);
             }
             return std::vector(ranks.begin(), ranks.end());
           })
      .def("interrupt_in_flight", [](CallLog& self) {
        for (CallLog::InFlightCall* flight : self.flights) {
          flight->is_interrupted.store(true, std::memory_order_relaxed);
          const Hold held = flight->completions.engine().hold();
          flight->completions.interrupt_wait();
        }
      });
}

}  // namespace unisono
