#include "base/result_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace unisono::engine {
namespace {

constexpr size_t kib = 1024, mib = 1024 * kib;
// From here on memory comes from the system itself: the allocator would return it to the system each time.
constexpr size_t mapped_bytes_min = mib;
// As NumPy does: from here on in huge pages, which another process reads twice as fast. The system gives them for
// addresses that are aligned to them.
constexpr size_t huge_bytes_min = 4 * mib, huge_page = 2 * mib, small_page = 4 * kib;
// Bounds on what is kept: bytes of all blocks, bytes of a single longer one, and blocks. A program that assigns each
// result to the same name needs one block to spare: so a block beyond the first bound is kept, alone.
constexpr size_t kept_bytes_max = 64 * mib, lone_bytes_max = 256 * mib, kept_blocks_max = 16;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t capacity_for(size_t bytes) {
  return rounded(bytes, bytes >= huge_bytes_min ? huge_page : bytes >= mapped_bytes_min ? 64 * kib : 8 * kib);
}

byte* map(size_t capacity) {
  const size_t alignment = capacity >= huge_bytes_min ? huge_page : small_page;
  const size_t extra = alignment == huge_page ? huge_page : 0;
  void* const at = mmap(nullptr, capacity + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  auto* const start = static_cast<byte*>(at);
  byte* const data = start + (-reinterpret_cast<uintptr_t>(start) % alignment);
  if (data != start) munmap(start, static_cast<size_t>(data - start));
  if (byte *const end = start + capacity + extra, *const stop = data + capacity; stop != end)
    munmap(stop, static_cast<size_t>(end - stop));
  if (extra != 0) madvise(data, capacity, MADV_HUGEPAGE);  // advice: the kernel may refuse it
  return data;
}

byte* allocate(size_t capacity) {
  return capacity >= mapped_bytes_min ? map(capacity) : new (std::nothrow) byte[capacity];
}

void release(byte* data, size_t capacity) {
  if (capacity >= mapped_bytes_min)
    munmap(data, capacity);
  else
    delete[] data;
}

}  // namespace

// No thread waits for the lock of the pool: if another one holds it, memory is taken from the system or returned to it.
// So a child process that was forked while a thread held the lock, which then stays locked, only loses the pool.
struct ResultPool {
  std::mutex mutex;
  std::vector<ResultMemory> kept;  // the one that was given back last is at the end
  size_t kept_bytes = 0;

  // Never destroyed: arrays may be dropped until the process has ended.
  static ResultPool& instance() {
    static ResultPool& pool = *new ResultPool();
    return pool;
  }

  // The shortest that is long enough, and not so long that much of it would be wasted; of those the last, which may
  // still be in the cache.
  ResultMemory take(size_t capacity) {
    const std::unique_lock held(mutex, std::try_to_lock);
    if (!held.owns_lock()) return {};
    auto best = kept.end();
    for (auto one = kept.begin(); one != kept.end(); ++one)
      if (one->capacity_ >= capacity && one->capacity_ <= capacity + capacity / 4 &&
          (best == kept.end() || one->capacity_ <= best->capacity_))
        best = one;
    if (best == kept.end()) return {};
    ResultMemory found = std::move(*best);
    kept.erase(best);
    kept_bytes -= found.capacity_;
    return found;
  }

  // False if it is not kept.
  bool keep(byte* data, size_t capacity) {
    if (capacity > lone_bytes_max) return false;
    const std::unique_lock held(mutex, std::try_to_lock);
    if (!held.owns_lock()) return false;
    while (!kept.empty() && (kept.size() == kept_blocks_max || kept_bytes + capacity > kept_bytes_max)) {
      kept_bytes -= kept.front().capacity_;
      release(std::exchange(kept.front().data_, nullptr), kept.front().capacity_);
      kept.erase(kept.begin());
    }
    // Its content does not matter any more, so the system may take its pages. With small pages that
    // takes as long as the page faults that keeping them saves.
    if (capacity >= huge_bytes_min) madvise(data, capacity, MADV_FREE);
    kept.push_back(ResultMemory(data, capacity));
    kept_bytes += capacity;
    return true;
  }

 private:
  ResultPool() { kept.reserve(kept_blocks_max); }
};

ResultMemory ResultMemory::take(size_t bytes) noexcept {
  if (bytes < pooled_bytes_min) {
    byte* const data = new (std::nothrow) byte[std::max<size_t>(bytes, 1)];
    return {data, data != nullptr ? bytes : 0};
  }
  const size_t capacity = capacity_for(bytes);
  if (ResultMemory kept = ResultPool::instance().take(capacity); kept.data_ != nullptr) return kept;
  byte* const data = allocate(capacity);
  return {data, data != nullptr ? capacity : 0};
}

void ResultMemory::reset() noexcept {
  if (data_ == nullptr) return;
  byte* const data = std::exchange(data_, nullptr);
  const size_t capacity = std::exchange(capacity_, 0);
  if (capacity < pooled_bytes_min || !ResultPool::instance().keep(data, capacity)) release(data, capacity);
}

}  // namespace unisono::engine
