// Scratch memory of runs: a pool of blocks by size. Fresh memory would cost a page fault every 4 KiB, which takes
// longer than copying 4 KiB.

#pragma once

#include <bit>
#include <memory>
#include <new>
#include <vector>

#include "base/huge_pages.hpp"
#include "base/types.hpp"

namespace unisono::engine {

class Scratch {
 public:
  struct Block {
    std::unique_ptr<byte[]> memory;
    size_t bytes = 0;
    byte* at() const { return memory.get(); }
  };

  // A block of at least `bytes`; an empty one if there is no memory.
  Block take(size_t bytes) {
    const size_t size_class = size_class_of(bytes);
    if (!free_[size_class].empty()) {
      Block block = std::move(free_[size_class].back());
      free_[size_class].pop_back();
      idle_bytes_ -= block.bytes;
      return block;
    }
    const size_t size = size_t{1} << size_class;
    Block block{std::unique_ptr<byte[]>(new (std::nothrow) byte[size]), size};
    if (block.at() != nullptr) ask_for_huge_pages(block.at(), size);
    return block;
  }

  void give_back(Block block) {
    if (block.memory == nullptr || idle_bytes_ + block.bytes > idle_bytes_max) return;
    idle_bytes_ += block.bytes;
    free_[size_class_of(block.bytes)].push_back(std::move(block));
  }

 private:
  // Kept between runs: what a training step uses again and again. The rest goes back to the system.
  static constexpr size_t idle_bytes_max = 64 * 1024 * 1024;
  static constexpr size_t size_class_min = 10;

  static size_t size_class_of(size_t bytes) {
    const auto width = static_cast<size_t>(std::bit_width(bytes > 1 ? bytes - 1 : size_t{1}));
    return width < size_class_min ? size_class_min : width;
  }

  std::vector<Block> free_[65];
  size_t idle_bytes_ = 0;
};

}  // namespace unisono::engine
