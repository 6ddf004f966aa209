// A program: one rank's plan, cut into pieces of at most one segment, with what each must wait for.
//
// Knows pieces, their order per peer and their dependencies; counts in elements. Immutable, so any number of runs
// (run.hpp), of several engines too, may share one. Does not know memory, types or operations. unisono/plans/execute.py
// makes it; what it says is checked here once, so that a run can trust every index and every length.

#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "wire/frame.hpp"

namespace unisono::engine {

enum class Step : uint8_t { send, recv, recv_reduce, copy, reduce };
enum class Buffer : uint8_t { in, out, tmp };
inline constexpr size_t buffer_count = 3;

struct Piece {
  Step step;
  bool left;       // the arriving or second operand stands on the left
  Buffer dst_buf;  // what is written; for a send what is read
  Buffer src_buf;  // copy and reduce: what is read
  uint32_t line;   // send and receive: which peer, an index of Program::lines
  uint64_t dst;    // in elements, as all that follows
  uint64_t src;
  uint64_t count;
};

// The messages with one peer, in the order in which they must be posted.
struct Line {
  std::int32_t peer;
  std::vector<uint32_t> sends;
  std::vector<uint32_t> recvs;
};

struct Program {
  // (step, peer, dst_buf, dst, src_buf, src, count, left)
  using Row = std::array<std::int64_t, 8>;

  // Throws std::runtime_error if it makes no sense. `before[i]` lists the pieces that piece i waits for.
  Program(const std::vector<Row>& rows, const std::vector<std::vector<uint32_t>>& before,
          const std::array<std::int64_t, buffer_count>& lengths, std::int32_t ranks) {
    require(before.size() == rows.size() && rows.size() < UINT32_MAX, "a list of dependencies per piece");
    for (size_t b = 0; b < buffer_count; ++b) {
      // No product with the size of an element overflows.
      require(lengths[b] >= 0 && lengths[b] < std::int64_t{1} << 48, "lengths from 0 to 2^48");
      counts[b] = static_cast<uint64_t>(lengths[b]);
    }
    require(ranks > 0, "ranks from 1 on");
    std::vector<std::int32_t> line_of(static_cast<size_t>(ranks), -1);
    for (const Row& row : rows) add(row, line_of);
    link(before);
  }

  std::vector<Piece> pieces;
  std::vector<Line> lines;
  std::vector<uint32_t> waits;  // how many pieces each awaits
  std::vector<uint32_t> after;  // who awaits piece i: after[after_at[i]] up to after[after_at[i + 1]]
  std::vector<uint32_t> after_at;
  std::vector<uint32_t> ready;  // local pieces that wait for nobody
  uint64_t counts[buffer_count] = {};
  uint64_t count_max = 0;  // of a piece
  bool reduces = false;

 private:
  static void require(bool holds, const char* allowed) {
    if (!holds) throw std::runtime_error(std::string("no such program; allowed: ") + allowed);
  }

  void add(const Row& row, std::vector<std::int32_t>& line_of) {
    const auto [step, peer, dst_buf, dst, src_buf, src, count, left] = row;
    require(step >= 0 && step <= 4, "steps 0 to 4");
    Piece piece{};
    piece.step = static_cast<Step>(step);
    piece.left = left != 0;
    piece.count = static_cast<uint64_t>(count);
    piece.dst_buf = place(dst_buf, dst, count, piece.dst);
    const auto index = static_cast<uint32_t>(pieces.size());
    if (piece.step == Step::copy || piece.step == Step::reduce) {
      piece.src_buf = place(src_buf, src, count, piece.src);
      const bool is_apart = piece.dst_buf != piece.src_buf || count == 0 || dst + count <= src || src + count <= dst;
      require(is_apart, "copies and reductions between slices that do not overlap");
    } else {
      require(peer >= 0 && static_cast<size_t>(peer) < line_of.size(), "peers below the number of ranks");
      std::int32_t& at = line_of[static_cast<size_t>(peer)];
      if (at < 0) {
        at = static_cast<std::int32_t>(lines.size());
        lines.push_back({static_cast<std::int32_t>(peer), {}, {}});
      }
      piece.line = static_cast<uint32_t>(at);
      (piece.step == Step::send ? lines[piece.line].sends : lines[piece.line].recvs).push_back(index);
    }
    // A plan never writes what the rank contributes: it may be read-only.
    require(piece.step == Step::send || piece.dst_buf != Buffer::in, "writing to out and tmp");
    reduces |= piece.step == Step::reduce || piece.step == Step::recv_reduce;
    count_max = count_max < piece.count ? piece.count : count_max;
    pieces.push_back(piece);
  }

  Buffer place(std::int64_t buf, std::int64_t start, std::int64_t count, uint64_t& at) const {
    require(buf >= 0 && static_cast<size_t>(buf) < buffer_count, "buffers 0 to 2");
    const auto length = static_cast<std::int64_t>(counts[buf]);
    require(start >= 0 && count >= 0 && start <= length && count <= length - start, "slices inside their buffer");
    at = static_cast<uint64_t>(start);
    return static_cast<Buffer>(buf);
  }

  void link(const std::vector<std::vector<uint32_t>>& before) {
    after_at.assign(pieces.size() + 1, 0);
    for (size_t i = 0; i < pieces.size(); ++i) {
      waits.push_back(static_cast<uint32_t>(before[i].size()));
      if (before[i].empty() && (pieces[i].step == Step::copy || pieces[i].step == Step::reduce))
        ready.push_back(static_cast<uint32_t>(i));
      for (const uint32_t earlier : before[i]) {
        require(earlier < i, "waiting for earlier pieces");
        ++after_at[earlier + 1];
      }
    }
    for (size_t i = 0; i < pieces.size(); ++i) after_at[i + 1] += after_at[i];
    after.resize(after_at.back());
    std::vector<uint32_t> next(after_at.begin(), after_at.end() - 1);
    for (size_t i = 0; i < pieces.size(); ++i)
      for (const uint32_t earlier : before[i]) after[next[earlier]++] = static_cast<uint32_t>(i);
  }
};

}  // namespace unisono::engine
