// The engine as a Python class. It checks every argument and converts completions into tuples.
//
// The order of locks: the GIL, then the engine's. No Python object is created or released with the engine's lock held,
// because that may run any Python code. The engine's own thread never takes the GIL.

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>

#include "collective/program_call.hpp"
#include "engine/completion_queue.hpp"
#include "engine/engine.hpp"
#include "engine/pingpong.hpp"
#include "kernels/isa.hpp"
#include "python/bind.hpp"
#include "python/fingerprint_bytes.hpp"

namespace nb = nanobind;

namespace unisono {
namespace {

using namespace engine;

struct ForkedError : std::runtime_error {
  ForkedError() : std::runtime_error("this engine belongs to the parent process: make a new one after fork") {}
};

using CardTuple = std::tuple<std::string, std::string, std::string, uint16_t, std::int32_t>;

std::int64_t in_ns(double seconds) {
  return seconds >= 1e9 ? std::int64_t{1'000'000'000} * second : seconds > 0 ? std::llround(seconds * 1e9) : 0;
}

// The address and length of a contiguous buffer. The Python caller keeps its owner until the operation has ended.
class View {
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

// A program as Python holds it. Runs share the inner object, whose release never needs the GIL.
struct PyProgram {
  std::shared_ptr<const Program> program;
};

ProgramCall call_of(const PyProgram& given, std::vector<uint64_t> counts, bool is_even, uint64_t piece_elements,
                    std::shared_ptr<RankMap> rank_map) {
  ProgramCall call{given.program, std::move(counts), is_even, piece_elements, std::move(rank_map)};
  if (!call.program->accepts({call.counts.data(), call.counts.size(), is_even}) || piece_elements == 0)
    throw nb::value_error("the counts are not those of the program");
  for (const Line& line : call.program->lines)
    if (call.rank_map != nullptr && !call.rank_map->has_rank(line.peer)) throw nb::value_error("a member is missing");
  return call;
}

class PyEngine {
 public:
  PyEngine(std::int32_t rank, std::int32_t size, const std::string& directory, nb::bytes secret,
           const Settings& settings, std::shared_ptr<LocalWorld> local)
      : engine_(rank, size, directory, std::string(secret.c_str(), secret.size()), settings, std::move(local)),
        completions_(engine_) {}
  ~PyEngine() {
    // Before completions_ goes: closing ends operations that belong to it.
    const GilReleased release;
    engine_.close(0);
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  CardTuple card() const {
    const Card c = engine_.card();
    return {c.host, c.unix_path, c.address, c.port, c.pid};
  }

  void connect(const std::vector<CardTuple>& tuples) {
    check();
    std::vector<Card> cards;
    for (const auto& [host, path, address, port, pid] : tuples) cards.push_back({host, path, address, port, pid});
    if (cards.size() != static_cast<size_t>(engine_.size)) throw nb::value_error("allowed: one card per rank");
    const Hold held = engine_.hold();
    engine_.connect(cards);
  }

  void secure(const std::vector<std::string>& names, nb::bytes key, nb::bytes certificate, nb::bytes authority) {
    check();
    const auto text = [](nb::bytes& given) { return std::string(given.c_str(), given.size()); };
    TlsMaterial material{text(key), text(certificate), text(authority), names};
    const Hold held = engine_.hold();
    engine_.secure(material);
  }

  // The handle of a send; 0 if it is done already; the negative outcome if it failed.
  std::int64_t send(uint64_t id, std::int32_t dst, uint64_t context, uint64_t tag, nb::handle data, uint8_t dtype,
                    nb::bytes header, uint8_t lane, bool sync) {
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

  // The handle of a receive, or its completion if it ended at once.
  nb::object receive(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag, nb::handle into, uint8_t dtype,
                     bool in_order) {
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

  nb::object probe(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag) {
    check();
    return start(id, src, context, tag, [](ReceiveOperation& op) {
      op.into = nullptr;
      op.is_open_ended = op.in_order = false;
      op.is_probe = true;
    });
  }

  // The handle of a run, or its completion if it ended at once. `op` is negative for a program without reductions.
  nb::object run(uint64_t id, const ProgramCall& call, uint64_t context, uint64_t tag, uint8_t dtype, std::int32_t op,
                 nb::handle in, nb::handle out, nb::bytes header, size_t window, uint64_t row_bytes) {
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
    if (program->reduces && stage.kernel == nullptr)
      throw nb::value_error("the operation is not defined for the dtype");
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

  // Adopt an operation of a call: its handle, and its completion will be dispatched; or its completion if it has ended.
  nb::object adopt(uint64_t id, std::int64_t handle) {
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

  CompletionQueue& completions() { return completions_; }

  // The ranks that a run waits for now.
  std::vector<std::int32_t> awaited(std::int64_t handle) {
    const Hold held = engine_.hold();
    const Run* run = completions_.run_of(static_cast<uint64_t>(handle));
    return run != nullptr ? run->awaited() : std::vector<std::int32_t>();
  }

  bool cancel(std::int64_t handle) {
    check();
    const Hold held = engine_.hold();
    return completions_.cancel(static_cast<uint64_t>(handle));
  }

  // Completions, if this thread is to dispatch them; it then calls `more` until that is empty.
  nb::list wait(double timeout, uint64_t interrupts_seen, bool is_dispatcher) {
    check();
    return completions_for(!is_dispatcher, [&](Hold& held) {
      completions_.wait(held, timeout >= 1e8 ? never : now_ns() + in_ns(timeout), interrupts_seen, is_dispatcher);
      return !completions_.is_empty() && (is_dispatcher || completions_.begin_dispatch());
    });
  }

  nb::list pump(double timeout) {
    check();
    return completions_for(true, [&](Hold& held) {
      completions_.wait_as_pump(held, now_ns() + in_ns(timeout));
      return !completions_.is_empty() && completions_.begin_dispatch();
    });
  }

  // Further completions for the thread that dispatches; `is_last` ends the dispatching if there are none.
  nb::list more(bool is_last) {
    return completions_for(is_last,
                           [&](Hold&) { return is_last ? !completions_.end_dispatch() : !completions_.is_empty(); });
  }

  void ignore_context(uint64_t context) {
    const Hold held = engine_.hold();
    engine_.inbox.ignore_context(context);
  }

  void end_context(uint64_t context) {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    engine_.inbox.end_context(context);
  }

  // The same for a context in which nothing was received or sent here; false if messages wait in it.
  bool end_unused_context(uint64_t context) {
    if (engine_.is_forked()) return false;
    const Hold held = engine_.hold();
    if (engine_.inbox.has_unexpected(context)) return false;
    engine_.inbox.end_context(context);
    return true;
  }

  // Whether a completion waits to be dispatched, or a thread is dispatching.
  bool has_undispatched() const { return completions_.has_undispatched(); }

  uint64_t interrupt_count() {
    const Hold held = engine_.hold();
    return completions_.interrupt_count();
  }
  void interrupt_wait() {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    completions_.interrupt_wait();
  }

  void close(double flush_s) {
    if (engine_.is_forked()) return;
    const GilReleased release;
    engine_.close(in_ns(flush_s));
  }

  bool is_forked() const { return engine_.is_forked(); }
  uint64_t refused() {
    const Hold held = engine_.hold();
    return engine_.refused();
  }
  std::vector<std::string> take_refusals() {
    if (engine_.is_forked()) return {};
    const Hold held = engine_.hold();
    return engine_.take_refusals();
  }

  std::tuple<std::string, bool> down_of(std::int32_t rank) {
    check_rank(rank);
    const Hold held = engine_.hold();
    return {engine_.peer(rank).cause, engine_.peer(rank).left};
  }

  std::vector<std::string> links() {
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

  double ping(std::int32_t peer, size_t nbytes, int rounds, bool is_first) {
    check();
    check_rank(peer);
    const GilReleased release;
    return ping_pong(engine_, peer, nbytes, rounds, is_first);
  }

 private:
  void check() const {
    if (engine_.is_forked()) [[unlikely]]
      throw ForkedError();
  }
  void check_rank(std::int32_t rank) const {
    if (rank < 0 || rank >= engine_.size) throw nb::value_error("no such rank");
  }

  static byte* buffer_of(uint64_t count, nb::handle given, int flags, uint64_t itemsize, std::optional<View>& view) {
    if (count == 0) return nullptr;
    view.emplace(given, flags);
    if (view->size() / itemsize != count || view->size() % itemsize != 0)
      throw nb::value_error("the length of a buffer is not the program's");
    return view->data();
  }

  template <class Prepare>
  nb::object start(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag, Prepare prepare) {
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

  // `ends_if_empty`: an empty result means that the dispatching has ended.
  template <class May>
  nb::list completions_for(bool ends_if_empty, May may_dispatch) {
    nb::list result;
    if (!take_completions(result, may_dispatch) || !ends_if_empty) return result;
    // All entries were operations that needed memory: look again.
    while (result.size() == 0 && take_completions(result, [this](Hold&) { return !completions_.end_dispatch(); }))
      continue;
    return result;
  }

  template <class May>
  bool take_completions(nb::list& result, May may_dispatch) {
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

  // A message of unknown length waits at its sender: give it memory that Python will own. While the lock is not held
  // the message may be withdrawn and the receive matched with another one: so the memory is for one request only.
  void supply_memory(ReceiveOperation& op) {
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

  // (id, outcome, envelope or None, data or None)
  static nb::object tuple_of(Operation& op) {
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
      data =
          nb::bytes(reinterpret_cast<const char*>(receive.into), receive.into != nullptr ? receive.matched.nbytes : 0);
    if (!receive.is_matched || (op.outcome != Outcome::done && op.outcome != Outcome::refused))
      return nb::make_tuple(op.id, outcome, nb::none(), data);
    const Envelope& e = receive.matched;
    return nb::make_tuple(op.id, outcome,
                          nb::make_tuple(e.source, e.context, e.tag, e.nbytes, e.dtype,
                                         nb::bytes(receive.header_held.data(), receive.header_held.size())),
                          data);
  }

  Engine engine_;
  CompletionQueue completions_;
};

}  // namespace

engine::CompletionQueue& completions_of(nb::handle engine) { return nb::cast<PyEngine&>(engine).completions(); }

std::shared_ptr<const engine::Program> program_of(nb::handle program) { return nb::cast<PyProgram&>(program).program; }

void bind_engine(nb::module_& m) {
  m.attr("CONTROL_EAGER_BYTES_SHM") = shm_eager_bytes_max(Lane::control);
  m.attr("CONTROL_EAGER_BYTES_SOCKET") = eager_bytes_max_of(Lane::control);
  nb::class_<PyProgram>(m, "Program")
      .def(
          "__init__",
          [](PyProgram* self, const std::vector<Program::CutRow>& cuts, const std::vector<Program::PointRow>& points,
             const std::vector<Program::StepRow>& steps, const std::vector<Program::EdgeRow>& edges,
             const std::array<std::int64_t, 2>& lengths, std::int64_t counts, std::int32_t ranks) {
            new (self) PyProgram{std::make_shared<const Program>(cuts, points, steps, edges, lengths, counts, ranks)};
          },
          nb::arg("cuts"), nb::arg("points"), nb::arg("steps"), nb::arg("edges"), nb::arg("lengths"), nb::arg("counts"),
          nb::arg("ranks"));
  nb::class_<RankMap>(m, "RankMap")
      .def(nb::init<std::vector<std::int32_t>>(), nb::arg("peers"))
      .def("__len__", &RankMap::size)
      .def_prop_ro("peers", [](const RankMap& self) { return nb::tuple(nb::cast(self.peers())); })
      .def("to_global",
           [](const RankMap& self, std::int64_t rank) {
             if (!self.has_rank(rank)) throw nb::index_error("no such rank");
             return self.to_global(static_cast<std::int32_t>(rank));
           })
      .def("within",
           [](nb::handle_t<RankMap> self, const RankMap& outer) -> nb::object {
             if (outer.translation() == nullptr) return nb::borrow(self);
             std::vector<std::int32_t> ranks;
             for (const std::int32_t peer : nb::cast<const RankMap&>(self).peers())
               ranks.push_back(outer.to_local(peer));
             return nb::cast(std::make_shared<RankMap>(std::move(ranks)));
           })
      .def("peers_of",
           [](const RankMap& self, const std::vector<std::int32_t>& ranks) {
             nb::list peers;
             for (const std::int32_t rank : ranks) {
               if (!self.has_rank(rank)) throw nb::index_error("no such rank");
               peers.append(self.to_global(rank));
             }
             return nb::tuple(peers);
           })
      .def("to_local", [](const RankMap& self, std::int64_t peer) -> std::optional<std::int32_t> {
        const std::int32_t rank = self.to_local(peer);
        return rank == RankMap::none ? std::nullopt : std::optional(rank);
      });
  nb::class_<ProgramCall>(m, "ProgramCall")
      .def(
          "__init__",
          [](ProgramCall* self, const PyProgram& program, std::vector<uint64_t> counts, bool is_even,
             uint64_t piece_elements, std::shared_ptr<RankMap> rank_map) {
            new (self) ProgramCall(call_of(program, std::move(counts), is_even, piece_elements, std::move(rank_map)));
          },
          nb::arg("program"), nb::arg("counts"), nb::arg("is_even"), nb::arg("piece_elements"),
          nb::arg("rank_map").none());
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
