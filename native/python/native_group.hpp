// A group as calls see it: its call log and its decisions, and, if the engine runs its calls, its members and its
// started calls.
//
// Every member function needs the GIL: a call is allowed, numbered and entered in the log while no other thread runs
// Python.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/intrusive_list.hpp"
#include "collective/call_log.hpp"
#include "collective/rank_map.hpp"
#include "collective/run.hpp"
#include "engine/completion_queue.hpp"
#include "python/argument.hpp"

namespace unisono {

// What Python decided for one class of calls; immutable.
struct Decision {
  std::shared_ptr<const engine::Program> program;
  nb::object library;               // instead of a program: what calls a library
  engine::Fingerprint fingerprint;  // but for count and hash
  bool is_shape_compared = false;
  bool writes_out = true;         // this rank's program writes the memory of the result
  bool is_synchronizing = false;  // with elements in every block, its end shows that all ranks have called it
  Reduce kernel = nullptr;
  uint64_t itemsize = 1;     // of what is never separated
  std::int64_t divisor = 0;  // of a mean; 0 divides nothing
  std::string identity;      // one element, with which exscan fills the result of rank 0
  uint64_t piece_elements = UINT64_MAX;
  uint8_t dtype = engine::untyped;  // of what travels: float32 for the mean of 16-bit floats
  size_t number = 0;                // in its table
};

// What tells decisions apart. A call site is no part of it.
struct DecisionKey {
  uint8_t verb = 0;
  uint8_t dtype = 0;
  std::int16_t op = -1;
  std::int32_t root = 0;
  PyObject* algorithm = nullptr;  // interned, and never freed once a decision names it
  int size_class = 0;             // of the items of one rank
  int stage = 0;

  bool operator==(const DecisionKey&) const = default;
  size_t hash() const {
    uint64_t h = uint64_t{verb} | uint64_t{dtype} << 8 | static_cast<uint64_t>(static_cast<uint16_t>(op)) << 16 |
                 static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
    h = (h ^ reinterpret_cast<uint64_t>(algorithm) ^ static_cast<uint64_t>(stage) << 56) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 29) * 0xd6e8feb86659fd93u;
    h = (h ^ h >> 32 ^ static_cast<uint64_t>(size_class)) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
  }
};

// Decisions by key, for all groups of one shape: the same size, rank here, hosts, kind of links and config. It grows
// and never evicts: ranks of one group make the same calls, so a decision that was dropped would be made again and
// again.
class DecisionTable {
 public:
  DecisionTable() = default;
  DecisionTable(const DecisionTable&) = delete;
  DecisionTable& operator=(const DecisionTable&) = delete;

  const Decision* find(const DecisionKey& key) const {
    if (slots_.empty()) return nullptr;
    for (size_t at = key.hash();; ++at) {
      const Slot& slot = slots_[at & (slots_.size() - 1)];
      if (slot.decision == nullptr || slot.key == key) return slot.decision.get();
    }
  }
  // Deciding runs Python: another thread may have added the same decision meanwhile, which then counts.
  const Decision* add(const DecisionKey& key, std::unique_ptr<Decision> decision) {
    if (const Decision* const known = find(key); known != nullptr) return known;
    if (used_ * 2 >= slots_.size()) grow();
    Slot& slot = free_slot(key);
    slot.key = key;
    decision->number = used_++;
    slot.decision = std::move(decision);
    return slot.decision.get();
  }

 private:
  struct Slot {
    DecisionKey key;
    std::unique_ptr<const Decision> decision;
  };
  Slot& free_slot(const DecisionKey& key) {
    size_t at = key.hash();
    while (slots_[at & (slots_.size() - 1)].decision != nullptr) ++at;
    return slots_[at & (slots_.size() - 1)];
  }
  void grow() {
    std::vector<Slot> old(slots_.empty() ? 64 : slots_.size() * 2);
    old.swap(slots_);
    for (Slot& slot : old)
      if (slot.decision != nullptr) {
        Slot& moved = free_slot(slot.key);
        moved.key = slot.key;
        moved.decision = std::move(slot.decision);
      }
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

// What a started call (work.hpp) is in the list of its group.
struct StartedLink {
  engine::ListHook<StartedLink> hook;
};
using StartedList = engine::IntrusiveList<StartedLink, &StartedLink::hook>;

// What reading the arguments of a call needs to know of its group, whatever runs the call.
class VerbGroup {
 public:
  // `arguments` is an Arguments and `decisions` a DecisionTable, which groups share.
  VerbGroup(nb::object call_log, nb::object arguments, nb::object decisions, uint64_t fingerprint_seed,
            std::int32_t rank, std::int32_t size, std::optional<double> deadline_s);
  VerbGroup(const VerbGroup&) = delete;
  VerbGroup& operator=(const VerbGroup&) = delete;

  engine::CallLog& call_log;
  const Arguments& arguments;
  DecisionTable& decisions;
  const uint64_t fingerprint_seed;  // of the hash: which group, and what else its members compare of every call
  const std::int32_t rank, size;
  const std::int64_t deadline_ns;  // of every operation that is given none; -1: none
  // For tests: calls that ended here, that Python had to decide, and that Python adopted.
  uint64_t ended = 0, decided = 0, adopted = 0;

 private:
  nb::object call_log_, arguments_, decisions_;  // kept for the references above
};

class NativeGroup : public VerbGroup {
 public:
  // `arguments` is an Arguments and `decisions` a DecisionTable, which groups share.
  NativeGroup(nb::object engine, nb::object call_log, nb::object arguments, nb::object decisions, uint64_t context,
              uint64_t fingerprint_seed, std::shared_ptr<engine::RankMap> rank_map, bool is_introduced, size_t window,
              double stall_s, double message_stall_s, std::optional<double> deadline_s, nb::object status,
              nb::object any);
  ~NativeGroup();
  // Messages that no call here has received although it should have: (rank, number, header) of calls before `sequence`.
  nb::list unclaimed(uint64_t sequence);
  // Whether an unmatched message waits here.
  bool has_unexpected() const;
  // The ranks that have not confirmed yet that they made all calls that ended here (run-ahead).
  std::vector<std::int32_t> unconfirmed_ranks() const;
  // Whether no call is under way or unseen, no rank unconfirmed, and no message waits: the group can be left at once.
  bool is_idle() const;
  bool is_introduced(size_t rank) const { return is_introduced_[rank]; }
  void introduce(size_t rank);
  // A member has left or died.
  void note_gone(size_t rank, bool is_dead);
  // Whether a message from or to this rank may still come or arrive; of any rank: whether Python need not look.
  bool is_reachable(std::int32_t rank) const {
    if (gone_ == 0) [[likely]]
      return true;
    return rank == engine::any_source ? !has_dead_ && gone_ < static_cast<size_t>(size) - 1
                                      : !is_gone_[static_cast<size_t>(rank)];
  }
  // Works whose calls are under way and that no thread looks at: collectives, and messages that cannot go on or, with
  // `all_messages`, all of them. `only_overdue`: those that Python must look at by now, and the pump returns when the
  // next one is due.
  nb::list works_to_adopt(bool only_overdue, bool all_messages);
  // (is a send, peer, tag) of the messages of started calls; -1 is any.
  nb::list messages_under_way() const;
  // A work was dropped that was never waited for.
  void note_dropped(PyObject* verb, PyObject* code, int instruction);
  // (verb, code, instruction, how many) of works that were never waited for.
  nb::list unwaited() const;
  // Count what a collective about to start sends to peers that do not answer; true if it may run ahead of them.
  bool count_run_ahead(const engine::Run& run, uint64_t nbytes);
  // Whether this group makes its first call of a class: true the first time it is asked.
  bool takes_first_call(const Decision& decision);

  engine::CompletionQueue& completions;
  const uint64_t context;
  const std::shared_ptr<const engine::RankMap> rank_map;
  const size_t window;
  const std::int64_t stall_ns;          // how long a collective goes on without Python
  const std::int64_t message_stall_ns;  // how long a thread waits for a message without Python
  const nb::object status, any;
  StartedList started;       // calls that are under way here, or were never waited for
  unsigned idle_probes = 0;  // that found no message

 private:
  std::vector<bool> is_introduced_;  // the group has sent its descriptor to this peer
  // By peer: how many of our calls it may not have made yet. What comes from it in a later call shows that it
  // has.
  std::vector<uint8_t> run_ahead_;
  std::vector<bool> is_called_;  // by the number of a decision
  std::vector<bool> is_gone_;    // by rank of the group
  size_t gone_ = 0;
  bool has_dead_ = false;
  // Works that were dropped, by verb, code object (of which this holds a reference) and instruction.
  std::map<std::tuple<PyObject*, PyObject*, int>, size_t> dropped_;
  nb::object engine_;  // kept for the reference above
};

}  // namespace unisono
