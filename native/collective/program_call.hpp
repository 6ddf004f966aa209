// A program with the counts of a call and the ranks of its group, cached for the next call of the same shape.

#pragma once

#include <memory>
#include <vector>

#include "collective/rank_map.hpp"
#include "collective/run.hpp"

namespace unisono::engine {

struct ProgramCall {
  std::shared_ptr<const Program> program;
  std::vector<uint64_t> counts;
  bool is_even = false;
  uint64_t piece_elements = UINT64_MAX;
  std::shared_ptr<const RankMap> rank_map;  // none: ranks are peers

  Counts given() const { return {counts.data(), counts.size(), is_even}; }
  std::int32_t peer_of(const Line& line) const {
    return rank_map == nullptr ? line.peer : rank_map->to_global(line.peer);
  }
  // What of a stage it knows. It must live until the run is bound.
  Stage stage() const {
    Stage stage;
    stage.counts = counts.data();
    stage.counts_n = counts.size();
    stage.is_even = is_even;
    stage.piece_elements = piece_elements;
    stage.peers = rank_map == nullptr ? nullptr : rank_map->translation();
    return stage;
  }
};

}  // namespace unisono::engine
