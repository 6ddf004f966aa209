#include "python/native_group.hpp"

#include <algorithm>

#include "engine/engine.hpp"

namespace unisono {

using namespace engine;

CompletionQueue& completions_of(nb::handle engine);

namespace {

// The consecutive calls after which a sender that runs ahead waits for its receivers. Many, because where ranks share a
// core every wait costs the rank its time slice. The payload of a call is at most what the links send eagerly, and the
// peer's credit bounds the bytes of all calls.
constexpr uint8_t run_ahead_max = 240;

// The longest message of a collective that a peer gets eagerly; 0 before there is a link.
uint64_t eager_bytes_to(const Engine& engine, std::int32_t rank) {
  const Link* const link = engine.peer(rank).link.get();
  if (link == nullptr) return 0;
  return std::min<uint64_t>(link->eager_bytes_max(Lane::bulk),
                            engine.settings.eager_bytes * link->certain_eager_factor());
}

}  // namespace

VerbGroup::VerbGroup(nb::object call_log, nb::object arguments, nb::object decisions, uint64_t fingerprint_seed,
                     std::int32_t rank, std::int32_t size, std::optional<double> deadline_s)
    : call_log(nb::cast<CallLog&>(call_log)),
      arguments(nb::cast<const Arguments&>(arguments)),
      decisions(nb::cast<DecisionTable&>(decisions)),
      fingerprint_seed(fingerprint_seed),
      rank(rank),
      size(size),
      deadline_ns(deadline_s ? static_cast<std::int64_t>(*deadline_s * 1e9) : -1),
      call_log_(std::move(call_log)),
      arguments_(std::move(arguments)),
      decisions_(std::move(decisions)) {
  if (rank < 0 || rank >= size) throw nb::value_error("no such rank");
}

NativeGroup::NativeGroup(nb::object engine, nb::object call_log, nb::object arguments, nb::object decisions,
                         uint64_t context, uint64_t fingerprint_seed, std::shared_ptr<RankMap> rank_map,
                         bool is_introduced, size_t window, double stall_s, double message_stall_s,
                         std::optional<double> deadline_s, nb::object status, nb::object any)
    : VerbGroup(std::move(call_log), std::move(arguments), std::move(decisions), fingerprint_seed,
                rank_map->to_local(completions_of(engine).engine().rank), rank_map->size(), deadline_s),
      completions(completions_of(engine)),
      context(context),
      rank_map(std::move(rank_map)),
      window(window > 0 ? window : 1),
      stall_ns(static_cast<std::int64_t>(stall_s * 1e9)),
      message_stall_ns(static_cast<std::int64_t>(message_stall_s * 1e9)),
      status(std::move(status)),
      any(std::move(any)),
      is_introduced_(static_cast<size_t>(size), is_introduced),
      run_ahead_(static_cast<size_t>(completions.engine().size)),
      is_gone_(static_cast<size_t>(size)),
      engine_(std::move(engine)) {
  if (!PyType_Check(this->status.ptr()) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(this->status.ptr()), &PyTuple_Type))
    throw nb::type_error("allowed: a status that is a tuple");
  for (const std::int32_t peer : this->rank_map->peers())
    if (peer >= completions.engine().size) throw nb::value_error("no such rank");
}

NativeGroup::~NativeGroup() {
  for (const auto& [site, times] : dropped_) Py_XDECREF(std::get<1>(site));
}

void NativeGroup::note_gone(size_t rank, bool is_dead) {
  if (rank >= is_gone_.size()) throw nb::value_error("no such rank");
  has_dead_ = has_dead_ || is_dead;
  if (!is_gone_[rank]) ++gone_;
  is_gone_[rank] = true;
}

void NativeGroup::note_dropped(PyObject* verb, PyObject* code, int instruction) {
  const auto [place, is_new] = dropped_.try_emplace({verb, code, instruction}, 0);
  if (is_new) Py_XINCREF(code);
  ++place->second;
}

nb::list NativeGroup::unclaimed(uint64_t sequence) {
  std::vector<CompletionQueue::Unclaimed> found;
  if (sequence > 0) {
    const Hold held = completions.engine().hold();
    found = completions.unclaimed(context, tag_of(sequence - 1));
  }
  nb::list result;
  for (const CompletionQueue::Unclaimed& one : found)
    result.append(nb::make_tuple(one.source, one.sequence, nb::bytes(one.header.data(), one.header.size())));
  return result;
}

bool NativeGroup::has_unexpected() const {
  const Hold held = completions.engine().hold();
  return completions.engine().inbox.has_unexpected(context);
}

std::vector<std::int32_t> NativeGroup::unconfirmed_ranks() const {
  std::vector<std::int32_t> ranks;
  for (size_t rank = 0; rank < run_ahead_.size(); ++rank)
    if (run_ahead_[rank] != 0) ranks.push_back(static_cast<std::int32_t>(rank));
  return ranks;
}

bool NativeGroup::is_idle() const {
  // Messages that run ahead wait among the unexpected ones.
  return started.empty() && dropped_.empty() &&
         std::all_of(run_ahead_.begin(), run_ahead_.end(), [](uint8_t n) { return n == 0; }) && !has_unexpected();
}

void NativeGroup::introduce(size_t rank) {
  if (rank >= is_introduced_.size()) throw nb::value_error("no such rank");
  is_introduced_[rank] = true;
}

bool NativeGroup::count_run_ahead(const Run& run, uint64_t nbytes) {
  const size_t lines = run.program().lines.size();
  bool may_run_ahead = nbytes != UINT64_MAX;
  const auto ahead_of = [&](size_t line) -> uint8_t& { return run_ahead_[static_cast<size_t>(run.peer(line))]; };
  for (size_t line = 0; line < lines && may_run_ahead; ++line)
    may_run_ahead = run.answers(line) ||
                    (ahead_of(line) < run_ahead_max && nbytes <= eager_bytes_to(completions.engine(), run.peer(line)));
  for (size_t line = 0; line < lines; ++line)
    if (run.answers(line))
      ahead_of(line) = 0;
    else if (run.sends_to(line))
      ahead_of(line) = may_run_ahead ? static_cast<uint8_t>(ahead_of(line) + 1) : 0;
  return may_run_ahead;
}

bool NativeGroup::takes_first_call(const Decision& decision) {
  if (decision.number >= is_called_.size()) is_called_.resize(decision.number + 1);
  const bool is_first = !is_called_[decision.number];
  is_called_[decision.number] = true;
  return is_first;
}

}  // namespace unisono
