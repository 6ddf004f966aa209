// A program: one rank's plan for all counts: its steps, where their slices begin and end, and what each waits for.
//
// Lengths are formal sums. An *atom* is one element, one of the counts of a call, the longest of them, or an even part
// of another atom; a *point* of a buffer is a sum of atoms. unisono/plans/amounts.py explains them, and
// unisono/backends/native/programs.py makes programs. What a program says is checked here once, for all counts, so
// that a run can trust every index and every length. Immutable, so any number of runs (run.hpp), of several engines
// too, may share one; bound_program.hpp binds it to the counts of a call. Ranks are those of a group.
//
// Does not know memory, types or operations.

#pragma once

#include <array>
#include <span>
#include <utility>
#include <vector>

#include "wire/frame.hpp"

namespace unisono::engine {

enum class Step : uint8_t { send, recv, recv_reduce, copy, reduce };
enum class Buffer : uint8_t { in, out, tmp };
inline constexpr size_t buffer_count = 3;

// The counts of a call, in elements: as many as the collective has, or one that all of them are equal to.
struct Counts {
  const uint64_t* at = nullptr;
  size_t size = 0;
  bool is_even = false;

  uint64_t operator[](size_t index) const { return at[is_even ? 0 : index]; }
};

// Atoms that are made together: one, or the parts of another.
struct Cut {
  enum class Kind : uint8_t { one, count, longest, even };
  Kind kind;
  uint32_t of;  // which count, or the atom that is cut
  uint32_t parts;
};

// The point `base` plus `times` times an atom.
struct Point {
  uint32_t base;
  uint32_t atom;
  uint64_t times;
};

struct SymbolicStep {
  Step step;
  bool left;          // the arriving or second operand stands on the left
  Buffer dst_buf;     // what is written; for a send what is read
  Buffer src_buf;     // copy and reduce: what is read
  uint32_t line;      // send and receive: which peer, an index of Program::lines
  uint32_t dst;       // points
  uint32_t dst_stop;  // source and target are equally long
  uint32_t src;
};

// A later step that waits where one of its slices overlaps one of an earlier step; slice 0 is dst, slice 1 is src.
struct Edge {
  uint32_t later;
  uint8_t earlier_slice;
  uint8_t later_slice;
};

// The messages with one peer, as steps, in the order in which they must be posted.
struct Line {
  std::int32_t peer;
  std::vector<uint32_t> sends;
  std::vector<uint32_t> recvs;
};

struct Program {
  using CutRow = std::array<std::int64_t, 3>;    // (kind, of, parts)
  using PointRow = std::array<std::int64_t, 3>;  // (base, atom, times); the first one follows point 0, which is 0
  // (step, peer, dst_buf, dst, dst_stop, src_buf, src, src_stop, left)
  using StepRow = std::array<std::int64_t, 9>;
  using EdgeRow = std::array<std::int64_t, 4>;  // (earlier, later, earlier slice, later slice)

  // Throws std::runtime_error if it is invalid for some counts. `lengths` are the points at which `in` and `out`
  // end; `count_number` is how many counts a call has.
  Program(const std::vector<CutRow>& cut_rows, const std::vector<PointRow>& point_rows,
          const std::vector<StepRow>& step_rows, const std::vector<EdgeRow>& edge_rows,
          const std::array<std::int64_t, 2>& lengths, std::int64_t count_number, std::int32_t ranks);

  // Whether counts are as many as they should be, and small enough that no sum overflows.
  bool accepts(const Counts& given) const;
  // Whether no step crosses a boundary between the parts of a buffer; `parts` are their elements.
  bool stays_within(Buffer buffer, const Counts& given, std::span<const uint64_t> parts) const;
  // The elements of in, out and tmp.
  void buffer_counts(const Counts& given, uint64_t out[buffer_count]) const;
  // The number of elements of every atom, and where every point lies.
  void evaluate(const Counts& given, std::vector<uint64_t>& atoms, std::vector<uint64_t>& at) const;
  void buffer_counts(const std::vector<uint64_t>& at, uint64_t out[buffer_count]) const;

  std::vector<SymbolicStep> steps;
  std::vector<Line> lines;
  std::vector<Edge> after;  // the steps that wait for step i: after[after_at[i]] up to after[after_at[i + 1]]
  std::vector<uint32_t> after_at;
  std::vector<uint32_t> waits;  // how many edges each step awaits
  std::vector<uint32_t> ready;  // local steps that wait for no other step
  bool reduces = false;

 private:
  using Sum = std::vector<std::pair<uint32_t, std::int64_t>>;  // atoms with their coefficients, ascending

  void add_cut(const CutRow& row);
  void add_point(const PointRow& row);
  void add_step(const StepRow& row, std::vector<std::int32_t>& line_of);
  void add_edges(const std::vector<EdgeRow>& rows);
  Buffer slice_buffer(std::int64_t buf, std::int64_t start, std::int64_t stop);
  Sum difference(uint32_t stop, uint32_t start) const;
  bool is_at_most(uint32_t one, uint32_t other) const;

  std::vector<Cut> cuts_;
  std::vector<Point> points_;
  std::vector<Cut::Kind> kind_of_;                       // by atom
  std::vector<std::pair<uint32_t, uint32_t>> parts_of_;  // by atom: first and number, 0 if it is not cut
  uint32_t lengths_[2] = {};
  std::vector<uint32_t> tmp_stops_;  // tmp ends at the furthest of these points
  size_t count_number_;
  uint64_t count_max_ = 0;
};

}  // namespace unisono::engine
