// The hot path of messages: blocking sends and receives, from the raw arguments to the result without Python.
//
// Knows arguments (hot_argument.hpp) of the plain types, a rank and a tag. Does not know objects, timeouts, ANY source
// or errors: whatever is not plain goes to Python, and so does a message that does not end well or soon. It is then
// first taken back here, so that Python makes the call as if it were new; one that was met meanwhile ends here.
//
// The order of locks is that of bind_engine.cpp: the GIL, then the engine's.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "collective/call_log.hpp"
#include "engine/completion_queue.hpp"
#include "kernels/isa.hpp"
#include "python/bind.hpp"
#include "python/fast_argument.hpp"

namespace unisono {

engine::CompletionQueue& completions_of(nb::handle engine);

namespace {

using namespace engine;

// After this a message is Python's: it sees to signals, stalls and news.
constexpr std::int64_t patience_ns = 50 * millisecond;
// Up to this a call first looks for its end with the GIL held; see bind_hot_path.cpp.
constexpr uint64_t glance_bytes = 16 * 1024;

// When the call began that this thread makes anew in Python, until Python has asked; 0: none.
thread_local std::int64_t begun_ns = 0;

class FastMessages {
 public:
  FastMessages(nb::object engine, nb::object call_log, uint64_t context, std::vector<std::int32_t> members,
               nb::object array_type, nb::object empty, nb::list dtypes, nb::object status, nb::object any,
               bool is_introduced)
      : call_log(nb::cast<CallLog&>(call_log)),
        completions(completions_of(engine)),
        context(context),
        members(std::move(members)),
        status(std::move(status)),
        any(std::move(any)),
        arguments(std::move(array_type), std::move(empty)),
        is_introduced_(this->members.size(), is_introduced),
        engine_(std::move(engine)),
        call_log_(std::move(call_log)) {
    if (!PyType_Check(this->status.ptr()) ||
        !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(this->status.ptr()), &PyTuple_Type))
      throw nb::type_error("allowed: a status that is a tuple");
    for (const std::int32_t member : this->members)
      if (member < 0 || member >= completions.engine().size) throw nb::value_error("no such rank");
    for (const nb::handle dtype : dtypes) dtypes_.push_back(nb::borrow(dtype));
    if (dtypes_.size() > dtype_count)
      throw nb::value_error("allowed: a NumPy type, or None, by the number of the dtype");
  }

  // The code of an array's type; `untyped` if it is none of the plain ones.
  uint8_t code_of(const ArrayObject& array) const {
    for (size_t code = 0; code < dtypes_.size(); ++code)
      if (dtypes_[code].ptr() == array.descr) return static_cast<uint8_t>(code);
    return untyped;
  }
  bool is_introduced(size_t rank) const { return is_introduced_[rank]; }
  void introduce(size_t rank) {
    if (rank >= members.size()) throw nb::value_error("no such rank");
    is_introduced_[rank] = true;
  }

  CallLog& call_log;
  CompletionQueue& completions;
  const uint64_t context;
  const std::vector<std::int32_t> members;
  const nb::object status, any;
  const Arguments arguments;
  // For tests: calls that ended here, and that Python had to make anew.
  uint64_t ended = 0, handed_over = 0;

 private:
  std::vector<bool> is_introduced_;  // the group has told a peer who it is
  std::vector<nb::object> dtypes_;
  nb::object engine_, call_log_;  // kept for the references above
};

// What both directions share.
class HotMessage : public FastCall {
 public:
  HotMessage(nb::object path, nb::object slow, nb::object check_header)
      : FastCall(std::move(slow), std::move(check_header)),
        path(nb::cast<FastMessages&>(path)),
        path_(std::move(path)) {}

 protected:
  struct Given {
    Argument what;
    const ArrayObject* array = nullptr;
    uint64_t nbytes = 0;
    uint8_t dtype = untyped;
    size_t rank = 0;
    std::int64_t tag = -1;  // -1: any
  };

  bool parse(PyObject* const* args, size_t nargsf, PyObject* names, PyObject* rank_word, int flags, bool takes_any,
             Given& given) const;
  bool wait(const Operation& operation, uint64_t handle) const;
  // Let Python make the call, as if it were new but for the time that it has taken so far.
  PyObject* hand_over(PyObject* const* args, size_t nargsf, PyObject* names) {
    ++path.handed_over;
    PyObject* const result = PyErr_CheckSignals() != 0 ? nullptr : call_slow(args, nargsf, names);
    begun_ns = 0;
    return result;
  }

  FastMessages& path;

 private:
  nb::object path_;
};

// (array, rank[, tag]) with the last two by name or place.
bool HotMessage::parse(PyObject* const* args, size_t nargsf, PyObject* names, PyObject* rank_word, int flags,
                       bool takes_any, Given& given) const {
  static PyObject* const tag_word = interned("tag");
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (count < 1 || count > 3) return false;
  PyObject* rank = count > 1 ? args[1] : nullptr;
  PyObject* tag = count > 2 ? args[2] : nullptr;
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const word = PyTuple_GET_ITEM(names, i);
    PyObject*& place = word == rank_word ? rank : tag;
    if ((word != rank_word && word != tag_word) || place != nullptr) return false;
    place = args[count + i];
  }
  if (!path.arguments.see(args[0], given.what)) return false;
  given.array = &as_array(given.what.array);
  if ((given.array->flags & flags) != flags) return false;
  given.dtype = path.code_of(*given.array);
  if (given.dtype == untyped) return false;
  given.nbytes = itemsizes[given.dtype];
  for (int i = 0; i < given.array->nd; ++i) given.nbytes *= static_cast<uint64_t>(given.array->dimensions[i]);
  int overflow = 0;
  if (rank == nullptr || !PyLong_CheckExact(rank)) return false;
  const long number = PyLong_AsLongAndOverflow(rank, &overflow);
  if (overflow != 0 || number < 0 || static_cast<size_t>(number) >= path.members.size()) return false;
  given.rank = static_cast<size_t>(number);
  if (tag == nullptr || (takes_any && tag == path.any.ptr())) return true;
  if (!PyLong_CheckExact(tag)) return false;
  given.tag = PyLong_AsLongAndOverflow(tag, &overflow);
  return overflow == 0 && given.tag >= 0 && static_cast<uint64_t>(given.tag) < user_tags;
}

// Wait with the GIL let go until it ends. False if it was taken back instead, and is no longer ours.
bool HotMessage::wait(const Operation& operation, uint64_t handle) const {
  CallLog::InFlightCall flight{CallLog::no_sequence, path.completions, handle};
  path.call_log.flights.push_back(&flight);
  bool has_ended = true;
  {
    const GilReleased released;
    Engine& engine = path.completions.engine();
    Hold held = engine.hold();
    begun_ns = now_ns();
    path.completions.wait_for(held, operation, begun_ns + patience_ns, flight.is_recalled);
    if (operation.phase != Operation::Phase::ended) {
      has_ended = !path.completions.cancel(handle);
      // It was met: nobody may touch the memory when we return.
      while (has_ended && operation.phase != Operation::Phase::ended && !engine.is_closed())
        engine.wait(held, [&] { return operation.phase == Operation::Phase::ended; }, now_ns() + second);
    }
  }
  std::erase(path.call_log.flights, &flight);
  return has_ended;
}

class HotSend final : public HotMessage {
 public:
  using HotMessage::HotMessage;

  PyObject* call(PyObject* const* args, size_t nargsf, PyObject* names) override {
    static PyObject* const dst_word = interned("dst");
    Given given;
    if (path.completions.engine().is_forked() || !path.call_log.fast_path_open ||
        !parse(args, nargsf, names, dst_word, is_contiguous | is_aligned, false, given) ||
        !path.is_introduced(given.rank))
      return call_slow(args, nargsf, names);
    bool has_ended, is_done = false;
    SendOperation* op;
    uint64_t handle;
    {
      const Hold held = path.completions.engine().hold();
      op = &path.completions.make_send();
      handle = op->handle;
      op->is_watched = true;
      op->context = path.context;
      op->tag = given.tag < 0 ? 0 : static_cast<uint64_t>(given.tag);
      op->data = given.array->data;
      op->nbytes = given.nbytes;
      op->header = nullptr;
      op->header_bytes = 0;
      op->dtype = given.dtype;
      op->lane = Lane::bulk;
      op->sync = false;
      op->outcome = Outcome::closed;
      has_ended = !path.completions.start(*op, path.members[given.rank]);
      has_ended = has_ended || op->phase == Operation::Phase::ended;
      if (has_ended) {
        is_done = op->outcome == Outcome::done;
        path.completions.recycle(*op);
      }
    }
    if (!has_ended && wait(*op, handle)) {
      const Hold held = path.completions.engine().hold();
      is_done = op->outcome == Outcome::done;
      path.completions.recycle(*op);
    }
    if (is_done) {
      begun_ns = 0;
      ++path.ended;
      Py_RETURN_NONE;
    }
    return hand_over(args, nargsf, names);
  }
};

class HotReceive final : public HotMessage {
 public:
  using HotMessage::HotMessage;

  PyObject* call(PyObject* const* args, size_t nargsf, PyObject* names) override {
    static PyObject* const src_word = interned("src");
    Given given;
    if (path.completions.engine().is_forked() || !path.call_log.fast_path_open ||
        !parse(args, nargsf, names, src_word, is_contiguous | is_aligned | is_writeable, true, given) ||
        given.what.is_number())
      return call_slow(args, nargsf, names);
    Met met;
    bool has_ended;
    ReceiveOperation* op;
    uint64_t handle;
    {
      const Hold held = path.completions.engine().hold();
      op = &path.completions.make_receive();
      handle = op->handle;
      op->is_watched = true;
      op->context = path.context;
      op->source = path.members[given.rank];
      op->any_tag = given.tag < 0;
      op->tag = static_cast<uint64_t>(given.tag);
      op->into = given.array->data;
      op->capacity = given.nbytes;
      op->dtype = given.dtype;
      op->is_probe = op->is_open_ended = op->in_order = false;
      op->outcome = Outcome::closed;
      has_ended = !path.completions.start(*op);
      if (!has_ended && given.nbytes <= glance_bytes) path.completions.poll_briefly_for(*op);
      has_ended = has_ended || op->phase == Operation::Phase::ended;
      if (has_ended) met = take(*op);
    }
    if (!has_ended && wait(*op, handle)) {
      const Hold held = path.completions.engine().hold();
      met = take(*op);
    }
    if (met.is_done) {
      begun_ns = 0;
      ++path.ended;
      return status_of(given, met);
    }
    return hand_over(args, nargsf, names);
  }

 private:
  struct Met {
    bool is_done = false;
    uint64_t tag = 0;
    uint64_t nbytes = 0;
    std::string header;
  };

  // With the engine's lock.
  Met take(ReceiveOperation& op) const {
    Met met{op.outcome == Outcome::done, op.met.tag, op.met.nbytes, {}};
    if (met.is_done && !op.header_held.empty()) met.header.swap(op.header_held);
    path.completions.recycle(op);
    return met;
  }

  PyObject* status_of(const Given& given, const Met& met) const {
    if (!met.header.empty()) helper(nb::bytes(met.header.data(), met.header.size()), given.rank);
    nb::object values = nb::steal(PyTuple_New(3));
    PyTuple_SET_ITEM(values.ptr(), 0, PyLong_FromSize_t(given.rank));
    PyTuple_SET_ITEM(values.ptr(), 1, PyLong_FromUnsignedLongLong(met.tag));
    PyTuple_SET_ITEM(values.ptr(), 2, PyLong_FromUnsignedLongLong(met.nbytes));
    const nb::object only = nb::steal(PyTuple_Pack(1, values.ptr()));
    // Past the constructor that a named tuple has in Python.
    return PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(path.status.ptr()), only.ptr(), nullptr);
  }
};

nb::object make_send(nb::object path, nb::object slow, nb::object check_header) {
  return make_callable(std::make_unique<HotSend>(std::move(path), std::move(slow), std::move(check_header)));
}
nb::object make_receive(nb::object path, nb::object slow, nb::object check_header) {
  return make_callable(std::make_unique<HotReceive>(std::move(path), std::move(slow), std::move(check_header)));
}

}  // namespace

void bind_hot_messages(nb::module_& m) {
  nb::class_<FastMessages>(m, "FastMessages")
      .def(nb::init<nb::object, nb::object, uint64_t, std::vector<std::int32_t>, nb::object, nb::object, nb::list,
                    nb::object, nb::object, bool>(),
           nb::arg("engine"), nb::arg("call_log"), nb::kw_only(), nb::arg("context"), nb::arg("members"),
           nb::arg("array_type"), nb::arg("empty"), nb::arg("dtypes"), nb::arg("status"), nb::arg("any"),
           nb::arg("is_introduced"))
      .def("introduce", &FastMessages::introduce)
      .def("take_begun", [](const FastMessages&) { return static_cast<double>(std::exchange(begun_ns, 0)) / 1e9; })
      .def("send", &make_send, nb::arg("slow"), nb::arg("check_header"))
      .def("recv", &make_receive, nb::arg("slow"), nb::arg("check_header"))
      .def_ro("ended", &FastMessages::ended)
      .def_ro("handed_over", &FastMessages::handed_over);
}

}  // namespace unisono
