// Scratch memory of runs: blocks that are taken and given back all the time, and so are kept for the next.
//
// Knows sizes. Does not know who uses a block. Fresh memory costs a page fault every 4 KiB, more than copying it.

#pragma once

#include <bit>
#include <memory>
#include <new>
#include <vector>

#include "base/types.hpp"

namespace unisono::engine {

class Scratch {
 public:
  struct Block {
    std::unique_ptr<byte[]> memory;
    size_t bytes = 0;
    byte* at() const { return memory.get(); }
  };

  // At least so many bytes; an empty block without memory.
  Block take(size_t bytes) {
    const size_t shelf = shelf_of(bytes);
    if (!shelves_[shelf].empty()) {
      Block block = std::move(shelves_[shelf].back());
      shelves_[shelf].pop_back();
      idle_bytes_ -= block.bytes;
      return block;
    }
    const size_t size = size_t{1} << shelf;
    return {std::unique_ptr<byte[]>(new (std::nothrow) byte[size]), size};
  }

  void give_back(Block block) {
    if (block.memory == nullptr || idle_bytes_ + block.bytes > idle_bytes_max) return;
    idle_bytes_ += block.bytes;
    shelves_[shelf_of(block.bytes)].push_back(std::move(block));
  }

 private:
  // What a step of training uses again and again; more is given back to the system.
  static constexpr size_t idle_bytes_max = 16 * 1024 * 1024;
  static constexpr size_t shelf_min = 10;

  static size_t shelf_of(size_t bytes) {
    const auto width = static_cast<size_t>(std::bit_width(bytes > 1 ? bytes - 1 : size_t{1}));
    return width < shelf_min ? shelf_min : width;
  }

  std::vector<Block> shelves_[65];
  size_t idle_bytes_ = 0;
};

}  // namespace unisono::engine
