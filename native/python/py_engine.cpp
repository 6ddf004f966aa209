#include "python/py_engine.hpp"

#include <nanobind/stl/string.h>

#include <cmath>
#include <utility>

#include "engine/pingpong.hpp"
#include "kernels/isa.hpp"
#include "python/fingerprint_bytes.hpp"

namespace unisono {

using namespace engine;

std::int64_t in_ns(double seconds) {
  return seconds >= 1e9 ? std::int64_t{1'000'000'000} * second : seconds > 0 ? std::llround(seconds * 1e9) : 0;
}

// The address and length of a contiguous buffer. The Python caller keeps its owner until the operation has ended.
class PyEngine::View {
 public:
  View(nb::handle owner, int flags) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  byte* data() const { return static_cast<byte*>(view_.buf); }
  uint64_t size() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_;
};

CardTuple PyEngine::card() const {
  const Card c = engine_.card();
  return {c.host, c.unix_path, c.address, c.port, c.pid};
}

void PyEngine::connect(const std::vector<CardTuple>& tuples) {
  check();
  std::vector<Card> cards;
  for (const auto& [host, path, address, port, pid] : tuples) cards.push_back({host, path, address, port, pid});
  if (cards.size() != static_cast<size_t>(engine_.size)) throw nb::value_error("allowed: one card per rank");
  const Hold held = engine_.hold();
  engine_.connect(cards);
}

void PyEngine::secure(const std::vector<std::string>& names, nb::bytes key, nb::bytes certificate,
                      nb::bytes authority) {
  check();
  const auto text = [](nb::bytes& given) { return std::string(given.c_str(), given.size()); };
  TlsMaterial material{text(key), text(certificate), text(authority), names};
  const Hold held = engine_.hold();
  engine_.secure(material);
}

std::int64_t PyEngine::send(uint64_t id, std::int32_t dst, uint64_t context, uint64_t tag, nb::handle data,
                            uint8_t dtype, nb::bytes header, uint8_t lane, bool sync) {
  check();
  check_rank(dst);
  if (header.size() > header_bytes_max) throw nb::value_error("the header is too long");
  if (lane >= lane_count) throw nb::value_error("no such lane");
  const View view(data, PyBUF_SIMPLE);
  const Hold held = engine_.hold();
  SendOperation& op = completions_.make_send();
  op.id = id;
  op.context = context;
  op.tag = tag;
  op.data = view.data();
  op.nbytes = view.size();
  op.header_held.assign(header.c_str(), header.size());
  op.header = reinterpret_cast<const byte*>(op.header_held.data());
  op.header_bytes = static_cast<uint16_t>(header.size());
  op.dtype = dtype;
  op.lane = static_cast<Lane>(lane);
  op.sync = sync;
  const bool is_open = completions_.start(op, dst);
  if (is_open && op.phase != Operation::Phase::ended) return static_cast<std::int64_t>(op.handle);
  const Outcome outcome = is_open ? op.outcome : Outcome::closed;
  completions_.recycle(op);
  return -static_cast<std::int64_t>(outcome);
}

nb::object PyEngine::receive(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag, nb::handle into,
                             uint8_t dtype, bool in_order) {
  check();
  std::optional<View> view;
  if (!into.is_none()) view.emplace(into, PyBUF_WRITABLE);
  return start(id, src, context, tag, [&](ReceiveOperation& op) {
    op.into = view ? view->data() : nullptr;
    op.capacity = view ? view->size() : 0;
    op.is_open_ended = !view;
    op.takes_memory = op.is_probe = false;
    op.in_order = in_order;
    op.dtype = dtype;
  });
}

nb::object PyEngine::probe(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag) {
  check();
  return start(id, src, context, tag, [](ReceiveOperation& op) {
    op.into = nullptr;
    op.is_open_ended = op.in_order = false;
    op.is_probe = true;
  });
}

nb::object PyEngine::run(uint64_t id, const ProgramCall& call, uint64_t context, uint64_t tag, uint8_t dtype,
                         std::int32_t op, nb::handle in, nb::handle out, nb::bytes header, size_t window,
                         uint64_t row_bytes) {
  check();
  const std::shared_ptr<const Program>& program = call.program;
  for (const Line& line : program->lines) check_rank(call.peer_of(line));
  if (dtype >= dtype_count || op >= static_cast<std::int32_t>(op_count)) throw nb::value_error("no such dtype or op");
  const Fingerprint fingerprint = fingerprint_of(header);
  Stage stage = call.stage();
  stage.context = context;
  stage.tag = tag;
  stage.dtype = dtype;
  stage.itemsize = item_bytes(dtype, op);
  stage.kernel = op < 0 ? nullptr : active_kernels().reduce[dtype][op];
  stage.window = window > 0 ? window : 1;
  stage.row_bytes = row_bytes;
  if (program->reduces && stage.kernel == nullptr) throw nb::value_error("the operation is not defined for the dtype");
  std::optional<View> in_view, out_view;
  uint64_t counts[buffer_count];
  program->buffer_counts(call.given(), counts);
  stage.in = buffer_of(counts[static_cast<size_t>(Buffer::in)], in, PyBUF_SIMPLE, stage.itemsize, in_view);
  stage.out = buffer_of(counts[static_cast<size_t>(Buffer::out)], out, PyBUF_WRITABLE, stage.itemsize, out_view);
  Run* run;
  {
    const Hold held = engine_.hold();
    run = &completions_.make_run();
    run->id = id;
    run->fingerprint = fingerprint;
    completions_.start(*run, [&] { run->begin(program, stage); });
    if (run->phase != Operation::Phase::ended || run->is_undispatched) return nb::int_(run->handle);
  }
  nb::object result = tuple_of(*run);
  const Hold held = engine_.hold();
  completions_.recycle(*run);
  return result;
}

nb::object PyEngine::adopt(uint64_t id, std::int64_t handle) {
  Operation* op;
  {
    const Hold held = engine_.hold();
    op = completions_.watched(static_cast<uint64_t>(handle));
    if (op == nullptr) throw nb::value_error("no such operation");
    if (completions_.unwatch(*op, id)) return nb::int_(handle);
  }
  nb::object result = tuple_of(*op);
  const Hold held = engine_.hold();
  completions_.recycle(*op);
  return result;
}

std::vector<std::int32_t> PyEngine::awaited(std::int64_t handle) {
  const Hold held = engine_.hold();
  const Run* run = completions_.run_of(static_cast<uint64_t>(handle));
  return run != nullptr ? run->awaited() : std::vector<std::int32_t>();
}

bool PyEngine::cancel(std::int64_t handle) {
  check();
  const Hold held = engine_.hold();
  return completions_.cancel(static_cast<uint64_t>(handle));
}

nb::list PyEngine::wait(double timeout, uint64_t interrupts_seen, bool is_dispatcher) {
  check();
  return completions_for(!is_dispatcher, [&](Hold& held) {
    completions_.wait(held, timeout >= 1e8 ? never : now_ns() + in_ns(timeout), interrupts_seen, is_dispatcher);
    return !completions_.is_empty() && (is_dispatcher || completions_.begin_dispatch());
  });
}

nb::list PyEngine::pump(double timeout) {
  check();
  return completions_for(true, [&](Hold& held) {
    completions_.wait_as_pump(held, now_ns() + in_ns(timeout));
    return !completions_.is_empty() && completions_.begin_dispatch();
  });
}

nb::list PyEngine::more(bool is_last) {
  return completions_for(is_last,
                         [&](Hold&) { return is_last ? !completions_.end_dispatch() : !completions_.is_empty(); });
}

void PyEngine::ignore_context(uint64_t context) {
  const Hold held = engine_.hold();
  engine_.inbox.ignore_context(context);
}

void PyEngine::end_context(uint64_t context) {
  if (engine_.is_forked()) return;
  const Hold held = engine_.hold();
  engine_.inbox.end_context(context);
}

bool PyEngine::end_unused_context(uint64_t context) {
  if (engine_.is_forked()) return false;
  const Hold held = engine_.hold();
  if (engine_.inbox.has_unexpected(context)) return false;
  engine_.inbox.end_context(context);
  return true;
}

uint64_t PyEngine::interrupt_count() {
  const Hold held = engine_.hold();
  return completions_.interrupt_count();
}

void PyEngine::interrupt_wait() {
  if (engine_.is_forked()) return;
  const Hold held = engine_.hold();
  completions_.interrupt_wait();
}

void PyEngine::close(double flush_s) {
  if (engine_.is_forked()) return;
  const GilReleased release;
  engine_.close(in_ns(flush_s));
}

uint64_t PyEngine::refused() {
  const Hold held = engine_.hold();
  return engine_.refused();
}

std::vector<std::string> PyEngine::take_refusals() {
  if (engine_.is_forked()) return {};
  const Hold held = engine_.hold();
  return engine_.take_refusals();
}

std::tuple<std::string, bool> PyEngine::down_of(std::int32_t rank) {
  check_rank(rank);
  const Hold held = engine_.hold();
  return {engine_.peer(rank).cause, engine_.peer(rank).left};
}

std::vector<std::string> PyEngine::links() {
  const Hold held = engine_.hold();
  std::vector<std::string> names;
  for (std::int32_t r = 0; r < engine_.size; ++r) {
    const Peer& peer = engine_.peer(r);
    const char* state[] = {"unopened", "opening", "", "down"};
    if (r == engine_.rank)
      names.emplace_back("self");
    else if (peer.state == Peer::State::open && peer.link != nullptr)
      names.push_back(std::string(peer.link->name()) + (peer.link->can_read() ? "+read" : ""));
    else
      names.emplace_back(state[static_cast<size_t>(peer.state)]);
  }
  return names;
}

double PyEngine::ping(std::int32_t peer, size_t nbytes, int rounds, bool is_first) {
  check();
  check_rank(peer);
  const GilReleased release;
  return ping_pong(engine_, peer, nbytes, rounds, is_first);
}

void PyEngine::check() const {
  if (engine_.is_forked()) [[unlikely]]
    throw ForkedError();
}

void PyEngine::check_rank(std::int32_t rank) const {
  if (rank < 0 || rank >= engine_.size) throw nb::value_error("no such rank");
}

byte* PyEngine::buffer_of(uint64_t count, nb::handle given, int flags, uint64_t itemsize, std::optional<View>& view) {
  if (count == 0) return nullptr;
  view.emplace(given, flags);
  if (view->size() / itemsize != count || view->size() % itemsize != 0)
    throw nb::value_error("the length of a buffer is not the program's");
  return view->data();
}

template <class Prepare>
nb::object PyEngine::start(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag, Prepare prepare) {
  if (src != any_source) check_rank(src);
  ReceiveOperation* op;
  {
    const Hold held = engine_.hold();
    op = &completions_.make_receive();
    op->id = id;
    op->source = src;
    op->context = context;
    op->tag = static_cast<uint64_t>(tag);
    op->any_tag = tag < 0;
    prepare(*op);
    if (!completions_.start(*op)) {
      op->outcome = Outcome::closed;
      op->phase = Operation::Phase::ended;
    }
    if (op->phase != Operation::Phase::ended || op->is_undispatched) return nb::int_(op->handle);
  }
  nb::object result = tuple_of(*op);
  const Hold held = engine_.hold();
  completions_.recycle(*op);
  return result;
}

template <class May>
nb::list PyEngine::completions_for(bool ends_if_empty, May may_dispatch) {
  nb::list result;
  if (!take_completions(result, may_dispatch) || !ends_if_empty) return result;
  // All entries were operations that needed memory: look again.
  while (result.size() == 0 && take_completions(result, [this](Hold&) { return !completions_.end_dispatch(); }))
    continue;
  return result;
}

template <class May>
bool PyEngine::take_completions(nb::list& result, May may_dispatch) {
  std::vector<CompletionQueue::Completion> taken;
  {
    const GilReleased release;
    Hold held = engine_.hold();
    if (!may_dispatch(held)) return false;
    taken = completions_.take();
    for (CompletionQueue::Completion& one : taken)
      if (one.operation != nullptr) one.operation->is_undispatched = false;
  }
  std::vector<Operation*> ended;
  for (CompletionQueue::Completion& one : taken) {
    if (one.operation == nullptr) {
      if (const CompletionQueue::Unclaimed* const u = one.unclaimed.get(); u != nullptr)
        result.append(
            nb::make_tuple(-2, u->context, u->source, u->sequence, nb::bytes(u->header.data(), u->header.size())));
      else
        result.append(nb::make_tuple(-1, one.down.rank, one.down.cause, one.down.left));
    } else if (one.operation->phase == Operation::Phase::ended) {
      result.append(tuple_of(*one.operation));
      ended.push_back(one.operation);
    } else {
      supply_memory(static_cast<ReceiveOperation&>(*one.operation));
    }
  }
  if (ended.empty()) return true;
  const Hold held = engine_.hold();
  for (Operation* op : ended) completions_.recycle(*op);
  return true;
}

void PyEngine::supply_memory(ReceiveOperation& op) {
  uint64_t request, nbytes;
  {
    const Hold held = engine_.hold();
    if (!op.needs_memory) return;
    request = op.memory_requests;
    nbytes = op.matched.nbytes;
  }
  PyObject* memory = PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
  if (memory == nullptr) PyErr_Clear();
  byte* at = memory != nullptr ? reinterpret_cast<byte*>(PyByteArray_AsString(memory)) : nullptr;
  PyObject* unused = memory;
  {
    const Hold held = engine_.hold();
    if (op.needs_memory && op.memory_requests == request) {
      op.needs_memory = false;
      if (at == nullptr) {
        engine_.give_up(op);
      } else {
        unused = static_cast<PyObject*>(std::exchange(op.owner, memory));  // of a withdrawn message
        op.into = at;
        engine_.supply(op);
      }
    }
  }
  Py_XDECREF(unused);
}

nb::object PyEngine::tuple_of(Operation& op) {
  const int outcome = static_cast<int>(op.outcome);
  if (op.is_run) {
    const auto& run = static_cast<Run&>(op);
    if (op.outcome == Outcome::done) return nb::make_tuple(op.id, outcome);
    const Run::Failure& f = run.failure;
    return nb::make_tuple(
        op.id, outcome,
        nb::make_tuple(f.peer, f.is_header, f.came, f.awaited, nb::bytes(f.header.data(), f.header.size())));
  }
  if (!op.is_receive) return nb::make_tuple(op.id, outcome, nb::none(), nb::none());
  auto& receive = static_cast<ReceiveOperation&>(op);
  nb::object data = nb::none();
  nb::object owner = nb::steal(static_cast<PyObject*>(std::exchange(receive.owner, nullptr)));
  if (owner.is_valid() && receive.into == reinterpret_cast<byte*>(PyByteArray_AsString(owner.ptr())))
    data = owner;
  else if (receive.is_open_ended && op.outcome == Outcome::done)
    data = nb::bytes(reinterpret_cast<const char*>(receive.into), receive.into != nullptr ? receive.matched.nbytes : 0);
  if (!receive.is_matched || (op.outcome != Outcome::done && op.outcome != Outcome::refused))
    return nb::make_tuple(op.id, outcome, nb::none(), data);
  const Envelope& e = receive.matched;
  return nb::make_tuple(op.id, outcome,
                        nb::make_tuple(e.source, e.context, e.tag, e.nbytes, e.dtype,
                                       nb::bytes(receive.header_held.data(), receive.header_held.size())),
                        data);
}

}  // namespace unisono
