// The ranks of a communicator and the peers they stand for: the one place where they are translated, both ways.
//
// A peer is what the engine calls a rank; it is the rank in the world.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace unisono::engine {

class RankMap {
 public:
  // `peers` by rank.
  explicit RankMap(std::vector<std::int32_t> peers) : peers_(std::move(peers)) {
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      const std::int32_t peer = peers_[rank];
      if (peer < 0) throw std::invalid_argument("no such rank");
      if (static_cast<size_t>(peer) >= ranks_.size()) ranks_.resize(static_cast<size_t>(peer) + 1, none);
      if (ranks_[static_cast<size_t>(peer)] != none) throw std::invalid_argument("a rank is named twice");
      ranks_[static_cast<size_t>(peer)] = static_cast<std::int32_t>(rank);
      is_same_ = is_same_ && static_cast<size_t>(peer) == rank;
    }
  }

  static constexpr std::int32_t none = -1;

  std::int32_t size() const { return static_cast<std::int32_t>(peers_.size()); }
  bool has_rank(std::int64_t rank) const { return rank >= 0 && rank < size(); }
  std::int32_t to_global(std::int32_t rank) const { return peers_[static_cast<size_t>(rank)]; }
  // `none` for a peer that is no member.
  std::int32_t to_local(std::int64_t peer) const {
    return peer >= 0 && static_cast<size_t>(peer) < ranks_.size() ? ranks_[static_cast<size_t>(peer)] : none;
  }
  const std::vector<std::int32_t>& peers() const { return peers_; }
  // Peers by rank, for loops; nullptr if every rank is its own peer.
  const std::int32_t* translation() const { return is_same_ ? nullptr : peers_.data(); }

 private:
  std::vector<std::int32_t> peers_, ranks_;
  bool is_same_ = true;
};

}  // namespace unisono::engine
