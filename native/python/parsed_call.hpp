// The arguments of a collective and what was decided for it, whatever runs it: the engine (Call) or a library
// (LibraryCall).

#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "python/fused_arrays.hpp"
#include "python/native_group.hpp"
#include "python/op_names.hpp"
#include "python/part_counts.hpp"
#include "python/verb_spec.hpp"

namespace unisono {

// fingerprint.COUNT_ANY
inline constexpr uint64_t count_any = (uint64_t{1} << engine::Fingerprint::count_bits) - 1;

class Announcement;

// What a call has beside the rest if its ranks do not know each other's lengths.
struct Announced {
  bool all_announce = false;  // every rank sends a row, not only root
  bool is_gathered = false;   // only root gets these rows
  size_t rows = 0;            // that this rank gets
  size_t lengths = 0;         // in a row
  size_t row_bytes = 0;
  std::unique_ptr<Argument[]> parts;  // the arrays of this rank
  size_t part_count = 0;
  std::unique_ptr<Argument[]> outs;                    // where what comes is to go, by rank; none: to new memory
  nb::object given_outs;                               // the user's list of them
  PyObject* algorithm = nullptr;                       // the name that was given; a decision keeps it
  std::vector<uint64_t> counts;                        // elements of all parts, by row
  nb::object value;                                    // what this rank gave instead of arrays
  nb::list packed{nb::steal<nb::list>(nb::handle())};  // the same as buffers, what of it is not in the row
  std::vector<std::span<const engine::byte>> pieces;   // the memory of these buffers
  std::vector<nb::object> whole;                       // the immutable objects that pieces are all of; or none
  nb::object fn;                                       // of an all_reduce_object
  nb::object result;
  // The second stage.
  bool is_second = false;
  uint64_t bytes = 0;                         // of all parts of all ranks
  nb::object sent;                            // the parts of this rank in one piece, or whose memory they are
  std::vector<engine::BufferPart> sent_from;  // where they lie, if not in one piece
  Result received;                            // memory for what comes
  std::vector<nb::object> received_in;        // the same by sender, if each part becomes an object where it arrives
  std::vector<engine::BufferPart> received_at;
  Argument plain;  // the kind of array to make of it, if this rank gave none
};

class ParsedCall {
 public:
  ParsedCall(VerbGroup& group, const VerbSpec& spec, nb::handle adoption)
      : verb_group_(group), spec_(spec), adoption_(adoption) {}
  ParsedCall(const ParsedCall&) = delete;
  ParsedCall& operator=(const ParsedCall&) = delete;

 protected:
  void prepare_collective(const Given& given);
  void read_timeout(PyObject* timeout);
  std::int32_t rank_of(PyObject* rank) const;
  void find_decision(const Given& given);
  const Decision* decision_for(const DecisionKey& key, const Given& given, std::span<const Py_ssize_t> shape);
  const Decision* decide(const DecisionKey& key, const Given& given, uint8_t dtype, std::span<const Py_ssize_t> shape);
  const Decision* keep_decision(const DecisionKey& key, uint8_t given_dtype, nb::handle decided);
  uint32_t hash_of_call() const;
  bool shows_all() const;
  void find_target(const Given& given);
  void find_site();
  void check_root_is_writable(PyObject* x) const;
  void widen();
  static engine::ResultMemory widened(uint8_t dtype, const engine::byte* from, uint64_t count, uint64_t more);
  static void divide(const Decision& decision, uint8_t dtype, engine::byte* target, uint64_t count, engine::byte* wide);
  void check_out(const Py_ssize_t* shape, int nd) const;
  bool is_own_slot() const;
  void fill_with_identity();
  bool is_root() const { return root_ == verb_group_.rank; }
  bool has_result() const { return !spec_.has(Fact::root_only) || is_root(); }
  // Whether the result takes the place of what was given.
  bool is_in_place() const { return spec_.has(Fact::in_place) && has_result(); }
  // Whether this rank is the root of a broadcast, which gets what it gave.
  bool is_broadcast_here() const { return spec_.broadcasts() && is_root(); }
  unsigned stage() const { return announced_ && announced_->is_second; }
  // The result of a collective that has ended well.
  PyObject* give();
  // All counts of an even collective are one.
  engine::Counts counts() const {
    if (stage() != 0) return {announced_->counts.data(), announced_->counts.size(), announced_->counts.size() == 1};
    if (parts_.has_value()) return parts_->items();
    const bool is_empty = spec_.has(Fact::empty);
    return {&count_, is_empty ? 0u : 1u, !is_empty};
  }

  VerbGroup& verb_group_;
  const VerbSpec& spec_;
  nb::handle adoption_;
  Argument x_, out_;
  Result result_;
  std::optional<PartCounts> parts_;   // of a reduce_scatter_v
  std::optional<FusedArrays> fused_;  // of an all_reduce_many: x stands for them, and each bundle has its decision
  std::optional<Announced> announced_;
  engine::ResultMemory wide_;  // see `widen`
  uint64_t wide_count_ = 0;
  const Decision* decision_ = nullptr;
  engine::Fingerprint fingerprint_;
  nb::object code_;  // where the program calls it, until it is in the log
  int instruction_ = 0;
  std::int16_t op_ = OpNames::none;
  uint64_t count_ = 0;     // items of one rank
  std::int32_t root_ = 0;  // a rank of the group
  std::int64_t timeout_ns_ = -1;
  engine::byte* target_ = nullptr;  // where the result is made
  uint64_t target_count_ = 0;
  bool is_result_scalar_ = false;
};

}  // namespace unisono
