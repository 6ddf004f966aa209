// A program bound to the counts of a call: pieces of at most a given length, and what each waits for.
//
// Bound into vectors that are used again, so a run that is used again allocates nothing. If no step is longer than a
// piece, the steps are the pieces and the tables of the program are used as they are. Else a piece waits for those
// earlier ones that it has elements in common with, which are found by division.

#pragma once

#include <algorithm>

#include "collective/program.hpp"

namespace unisono::engine {

struct Piece {
  Step step;
  bool left;
  Buffer dst_buf, src_buf;
  uint32_t line;
  uint32_t of;   // the step that it is a piece of
  uint64_t dst;  // in elements, as all that follows
  uint64_t src;
  uint64_t count;  // 0: a step that is empty for these counts; it moves nothing, and others may wait for it
};

class BoundProgram {
 public:
  void bind(const Program& program, const Counts& counts, uint64_t piece_elements);

  std::vector<Piece> pieces;
  std::vector<uint32_t> waits;  // how many pieces each awaits
  uint64_t counts[buffer_count] = {};
  bool has_empty = false;

  uint32_t first_piece(uint32_t step) const { return is_cut_ ? base_[step] : step; }
  uint32_t piece_number(uint32_t step) const { return is_cut_ ? base_[step + 1] - base_[step] : 1; }
  // Whether one of these steps has elements.
  bool moves(const std::vector<uint32_t>& steps) const {
    return std::any_of(steps.begin(), steps.end(), [&](uint32_t s) { return pieces[first_piece(s)].count != 0; });
  }
  // Call with each piece that awaits this one, as often as it does.
  template <class Visit>
  void for_each_after(const Program& program, uint32_t index, Visit visit) const {
    const uint32_t step = pieces[index].of;
    for (uint32_t i = program.after_at[step]; i < program.after_at[step + 1]; ++i) {
      const Edge& edge = program.after[i];
      if (!is_cut_) {
        visit(edge.later);
        continue;
      }
      const auto [first, last] = overlap(pieces[index], edge);
      for (uint32_t later = first; later < last; ++later) visit(later);
    }
  }

 private:
  void cut(const Program& program, uint64_t piece_elements);
  std::pair<uint32_t, uint32_t> overlap(const Piece& piece, const Edge& edge) const;

  bool is_cut_ = false;
  uint64_t piece_elements_ = 0;
  std::vector<uint64_t> atoms_, points_;
  std::vector<Piece> whole_;    // the steps before they were cut
  std::vector<uint32_t> base_;  // the first piece of each step, and the end
};

}  // namespace unisono::engine
