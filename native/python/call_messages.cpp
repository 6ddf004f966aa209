// Calls of the verbs between two ranks: their arguments, their operations and their results.

#include <sched.h>

#include "engine/engine.hpp"
#include "python/call.hpp"
#include "python/object_payload.hpp"

namespace unisono {

using namespace engine;

// ---- arguments ----

std::int64_t Call::tag_of_user(PyObject* tag, bool takes_any) const {
  if (tag == nullptr) return takes_any ? -1 : 0;
  if (takes_any && tag == group_.any.ptr()) return -1;
  const std::int64_t number = index_of(tag);
  if (number < 0 || static_cast<uint64_t>(number) >= user_tags) throw LeftToReference();
  return number;
}

void Call::prepare_message(const Given& given, bool is_started) {
  const Settings& settings = group_.completions.engine().settings;
  tag_ = tag_of_user(given[Parameter::tag], !spec_.has(Fact::sends));
  if (spec_.has(Fact::sends)) {
    PyObject* const data = given[Parameter::x];
    if (data == nullptr) throw LeftToReference();
    dst_ = rank_of(given[Parameter::dst]);
    if (!group_.is_introduced(static_cast<size_t>(dst_))) throw LeftToReference();
    if (spec_.has(Fact::objects))
      x_.hold(pack_object(data, settings.recv_bytes_max).bytes);
    else
      group_.arguments.see(data, "data", false, x_);
    if (x_.nbytes() > settings.message_bytes_max) throw LeftToReference();
  }
  if (!spec_.has(Fact::receives)) return;
  PyObject* const src = given[Parameter::src];
  if (src == nullptr && spec_.has(Fact::sends)) throw LeftToReference();
  src_ = src == nullptr || src == group_.any.ptr() ? any_source : rank_of(src);
  if (spec_.has(Fact::probes)) {
    PyObject* const timeout = given[Parameter::timeout];
    is_poll_ = timeout != nullptr && timeout != Py_None && timeout_ns_ == 0;
    if (is_poll_ && is_started) throw LeftToReference();
  } else if (spec_.has(Fact::unsized)) {
    // No thread may be there to supply memory for a started one, and an object is not received into an object.
    takes_memory_ = is_started || spec_.has(Fact::objects);
  } else {
    prepare_buffer(given);
  }
}

void Call::prepare_buffer(const Given& given) {
  PyObject* const buf = given[Parameter::out];
  if (buf == nullptr) throw LeftToReference();
  group_.arguments.see(buf, "buf", true, out_);
  if (out_.is_number()) throw LeftToReference();
  const bool overlap = x_.is_given() && x_.count != 0 && out_.count != 0 && x_.data < out_.data + out_.nbytes() &&
                       out_.data < x_.data + x_.nbytes();
  if (overlap) throw LeftToReference();
}

// ---- running ----

void Call::begin_send() {
  SendOperation& op = group_.completions.make_send();
  operations_[started_] = &op;
  handles_[started_++] = op.handle;
  op.is_watched = true;
  op.context = group_.context;
  op.tag = static_cast<uint64_t>(tag_);
  op.data = x_.data;
  op.nbytes = x_.nbytes();
  op.header = nullptr;
  op.header_bytes = 0;
  op.dtype = x_.dtype;
  op.lane = Lane::bulk;
  op.sync = false;
  op.outcome = Outcome::closed;
  if (!group_.completions.start(op, group_.rank_map->to_global(dst_))) op.phase = Operation::Phase::ended;
}

void Call::begin_receive() {
  ReceiveOperation& op = group_.completions.make_receive();
  operations_[started_] = &op;
  handles_[started_++] = op.handle;
  op.is_watched = true;
  op.context = group_.context;
  op.source = src_ == any_source ? any_source : group_.rank_map->to_global(src_);
  op.any_tag = tag_ < 0;
  op.tag = static_cast<uint64_t>(tag_);
  op.into = out_.data;
  op.capacity = out_.is_given() ? out_.nbytes() : 0;
  op.dtype = out_.dtype;
  op.is_probe = spec_.has(Fact::probes);
  op.is_open_ended = spec_.has(Fact::unsized);
  op.takes_memory = takes_memory_;
  op.in_order = false;
  op.outcome = Outcome::closed;
  if (!group_.completions.start(op)) op.phase = Operation::Phase::ended;
}

// The memory is that of the result, so that nothing is copied. While the lock is released, the message may be withdrawn
// and the receive matched with another, so memory is valid for one request number only.
void Call::supply_memory() {
  Engine& engine = group_.completions.engine();
  auto& receive = static_cast<ReceiveOperation&>(*operations_[0]);
  uint64_t request, nbytes;
  {
    const Hold held = engine.hold();
    if (!wants_memory()) return;
    request = receive.memory_requests;
    nbytes = receive.matched.nbytes;
  }
  Result made;
  try {
    made.object = new_bytes(nbytes);
    made.data = reinterpret_cast<byte*>(PyBytes_AS_STRING(made.object.ptr()));
  } catch (nb::python_error&) {
    // The receive ends without memory, as one that Python carries does.
  }
  const Hold held = engine.hold();
  if (!wants_memory() || receive.memory_requests != request) return;
  receive.needs_memory = false;
  if (made.data == nullptr) return engine.give_up(receive);
  std::swap(result_, made);
  receive.into = result_.data;
  engine.supply(receive);
}

void Call::take_received(ReceiveOperation& receive) {
  source_ = receive.matched.source;
  matched_tag_ = receive.matched.tag;
  matched_bytes_ = receive.matched.nbytes;
  received_ = std::move(receive.own);
  if (!receive.header_held.empty()) header_.swap(receive.header_held);
}

bool Call::withdraw() {
  {
    const Hold held = group_.completions.engine().hold();
    if (has_ended() || !group_.completions.cancel(handles_[0])) return false;
    started_ = 0;
  }
  // A program that asks again and again lets others have the GIL and the core.
  if (++group_.idle_probes % 8 == 0) {
    const GilReleased released;
    sched_yield();
  }
  return true;
}

std::vector<std::tuple<bool, std::int32_t, std::int64_t>> Call::messages_under_way() const {
  std::vector<std::tuple<bool, std::int32_t, std::int64_t>> found;
  if (is_collective()) return found;
  const Hold held = group_.completions.engine().hold();
  for (unsigned i = 0; i < started_; ++i) {
    if (operations_[i]->phase == Operation::Phase::ended) continue;
    const bool is_send = !operations_[i]->is_receive;
    const std::int32_t rank = is_send ? dst_ : src_;
    found.emplace_back(is_send, rank == any_source ? rank : group_.rank_map->to_global(rank), tag_);
  }
  return found;
}

// As Python adopts it: (kind, handle, peer, tag, buffer, dtype).
nb::object Call::message_of(unsigned index) const {
  const bool is_receive = operations_[index]->is_receive;
  const Argument& argument = is_receive ? out_ : x_;
  nb::object memory = nb::none();
  if (argument.is_given()) {
    memory = nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(argument.data),
                                               static_cast<Py_ssize_t>(argument.nbytes()),
                                               is_receive ? PyBUF_WRITE : PyBUF_READ));
    if (!memory.is_valid()) throw nb::python_error();
  }
  return nb::make_tuple(is_receive ? "receive" : "send", handles_[index], is_receive ? src_ : dst_, tag_, memory,
                        argument.dtype);
}

// ---- results ----

nb::object Call::received() {
  if (spec_.has(Fact::probes)) return status();
  if (!header_.empty()) {
    const std::int32_t rank = src_ != any_source ? src_ : group_.rank_map->to_local(source_);
    adoption_.attr("check_introduction")(nb::bytes(header_.data(), header_.size()), rank);
  }
  if (spec_.has(Fact::objects)) return received_object();
  if (!spec_.has(Fact::unsized)) return status();
  if (received_.get() == nullptr && matched_bytes_ != 0) return std::move(result_.object);
  return bytes_object(received_.get(), matched_bytes_);
}

nb::object Call::received_object() {
  try {
    return unpack_object(std::move(received_), matched_bytes_);
  } catch (nb::python_error& error) {
    error.restore();
  }
  return unpacked(nullptr);
}

// The object that was made of what came; if none could be made, the error names the call that received it.
nb::object Call::unpacked(PyObject* made) const {
  if (made != nullptr) return nb::steal(made);
  const nb::python_error error;
  const nb::object number = is_collective() ? nb::object(nb::int_(sequence_)) : nb::none();
  const nb::object raised = adoption_.attr("located")(nb::handle(spec_.word), nb::borrow(error.value()), number);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  throw nb::python_error();
}

nb::object Call::status() const {
  nb::object values = nb::steal(PyTuple_New(3));
  PyTuple_SET_ITEM(values.ptr(), 0, PyLong_FromLong(src_ != any_source ? src_ : group_.rank_map->to_local(source_)));
  PyTuple_SET_ITEM(values.ptr(), 1, PyLong_FromUnsignedLongLong(matched_tag_));
  PyTuple_SET_ITEM(values.ptr(), 2, PyLong_FromUnsignedLongLong(matched_bytes_));
  const nb::object only = nb::steal(PyTuple_Pack(1, values.ptr()));
  // Past the constructor that a named tuple has in Python.
  PyObject* const made = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(group_.status.ptr()), only.ptr(), nullptr);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace unisono
