#include "collective/bound_program.hpp"

namespace unisono::engine {

void BoundProgram::bind(const Program& program, const Counts& given, uint64_t piece_elements) {
  program.evaluate(given, atoms_, points_);
  program.buffer_counts(points_, counts);
  const size_t number = program.steps.size();
  pieces.resize(number);
  uint64_t longest = 0;
  has_empty = false;
  for (size_t i = 0; i < number; ++i) {
    const SymbolicStep& step = program.steps[i];
    const uint64_t dst = points_[step.dst], count = points_[step.dst_stop] - dst;
    pieces[i] = {step.step, step.left,         step.dst_buf, step.src_buf, step.line, static_cast<uint32_t>(i),
                 dst,       points_[step.src], count};
    longest = std::max(longest, count);
    has_empty |= count == 0;
  }
  is_cut_ = longest > piece_elements;
  if (is_cut_)
    cut(program, piece_elements);
  else
    waits.assign(program.waits.begin(), program.waits.end());
}

void BoundProgram::cut(const Program& program, uint64_t piece_elements) {
  piece_elements_ = piece_elements;
  whole_.swap(pieces);
  pieces.clear();
  base_.clear();
  for (const Piece& step : whole_) {
    base_.push_back(static_cast<uint32_t>(pieces.size()));
    Piece piece = step;
    uint64_t left = step.count;
    do {
      piece.count = std::min(left, piece_elements);
      pieces.push_back(piece);
      piece.dst += piece.count;
      piece.src += piece.count;
      left -= piece.count;
    } while (left != 0);
  }
  base_.push_back(static_cast<uint32_t>(pieces.size()));
  waits.assign(pieces.size(), 0);
  for (uint32_t i = 0; i < pieces.size(); ++i) for_each_after(program, i, [&](uint32_t later) { ++waits[later]; });
}

// The pieces of a later step, from the first up to the last, that have elements in common with a piece.
std::pair<uint32_t, uint32_t> BoundProgram::overlap(const Piece& piece, const Edge& edge) const {
  const Piece& later = whole_[edge.later];
  const uint64_t ours = edge.earlier_slice == 0 ? piece.dst : piece.src;
  const uint64_t theirs = edge.later_slice == 0 ? later.dst : later.src;
  const uint64_t start = std::max(ours, theirs), stop = std::min(ours + piece.count, theirs + later.count);
  if (start >= stop) return {0, 0};
  const uint32_t base = base_[edge.later];
  return {base + static_cast<uint32_t>((start - theirs) / piece_elements_),
          base + static_cast<uint32_t>((stop - 1 - theirs) / piece_elements_) + 1};
}

}  // namespace unisono::engine
