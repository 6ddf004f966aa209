// A ring: frames from one producer to one consumer through shared memory. Neither side trusts what the other one wrote.
//
// The consumer polls one word only, the first of the next frame: it is 0 until the frame is whole. The producer clears
// the word behind a frame before it publishes the frame, so the consumer always finds a 0 to stop at. The consumer
// publishes its position once per eighth of the ring, because only a producer short of room needs it.

#pragma once

#include <atomic>
#include <cstring>

#include "wire/frame.hpp"

namespace unisono::engine {

// The words of a ring beside its frames, each on a cache line of its own.
struct RingWords {
  alignas(line_bytes) std::atomic<uint64_t> head;        // bytes consumed; written by the consumer
  alignas(line_bytes) std::atomic<uint32_t> wants_room;  // 1 while the producer waits for room
};
static_assert(sizeof(RingWords) == 2 * line_bytes);

inline std::atomic<uint32_t>& word_at(byte* at) { return *reinterpret_cast<std::atomic<uint32_t>*>(at); }
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The longest frame that always fits an empty ring, wherever it starts.
inline constexpr size_t ring_frame_bytes_max(size_t capacity) { return capacity / 4; }

class Producer {
 public:
  Producer() = default;
  Producer(RingWords* words, byte* data, size_t capacity) : words_(words), data_(data), capacity_(capacity) {}

  size_t frame_bytes_max() const { return ring_frame_bytes_max(capacity_); }

  // Where a frame of `bytes` (whole cache lines) may be written; nullptr while there is no room.
  byte* reserve(size_t bytes) {
    const bool wraps = at_ + bytes > capacity_;
    const size_t need = bytes + line_bytes + (wraps ? capacity_ - at_ : 0);
    if (tail_ + need - head_ > capacity_ && !look_for_room(need)) return nullptr;
    if (wraps) {
      const size_t rest = capacity_ - at_;
      byte* from = data_ + at_;
      at_ = 0;
      tail_ += rest;
      word_at(data_).store(0, std::memory_order_relaxed);
      // release: a consumer that sees the wrap sees the cleared word at the start
      word_at(from).store(Head::make_word(Kind::wrap, 0, rest / line_bytes), std::memory_order_release);
    }
    return data_ + at_;
  }

  // Make a written frame visible.
  void publish(size_t bytes, uint32_t word) {
    byte* frame = data_ + at_;
    at_ += bytes;
    if (at_ == capacity_) at_ = 0;
    tail_ += bytes;
    word_at(data_ + at_).store(0, std::memory_order_relaxed);
    // seq_cst: precedes our look at the receiver's presence word; the receiver polls after it has changed that word
    word_at(frame).store(word, std::memory_order_seq_cst);
  }

  bool is_broken() const { return is_broken_; }

 private:
  bool look_for_room(size_t need) {
    if (has_room(need)) return true;
    // seq_cst twice: either the consumer sees the request when it publishes its head, or we see that head
    words_->wants_room.store(1, std::memory_order_seq_cst);
    if (!has_room(need)) return false;
    words_->wants_room.store(0, std::memory_order_relaxed);
    return true;
  }

  bool has_room(size_t need) {
    const uint64_t head = words_->head.load(std::memory_order_seq_cst);
    if (head < head_ || head > tail_) {
      is_broken_ = true;
      return false;
    }
    head_ = head;
    return tail_ + need - head_ <= capacity_;
  }

  RingWords* words_ = nullptr;
  byte* data_ = nullptr;
  size_t capacity_ = 0;
  size_t at_ = 0;
  uint64_t tail_ = 0;
  uint64_t head_ = 0;
  bool is_broken_ = false;
};

class Consumer {
 public:
  Consumer() = default;
  Consumer(RingWords* words, byte* data, size_t capacity) : words_(words), data_(data), capacity_(capacity) {}

  enum class Look : uint8_t { nothing, frame, broken };

  bool is_empty() const { return word_at(data_ + at_).load(std::memory_order_acquire) == 0; }

  // Look at the next frame. Its head is copied, so that the producer cannot change it after it was checked.
  Look look(Head& head, const byte*& body) {
    // acquire: the frame was written before its word
    uint32_t word = word_at(data_ + at_).load(std::memory_order_acquire);
    if (word == 0) return Look::nothing;
    if (static_cast<Kind>(word & 0xff) == Kind::wrap) [[unlikely]] {
      if (at_ == 0 || (word >> 16) * line_bytes != capacity_ - at_) return Look::broken;
      head_ += capacity_ - at_;
      at_ = 0;
      word = word_at(data_).load(std::memory_order_acquire);
      if (word == 0) return Look::nothing;
    }
    const byte* frame = data_ + at_;
    std::memcpy(&head, frame, sizeof head);
    head.word = word;
    bytes_ = head.lines() * line_bytes;
    if (bytes_ == 0 || bytes_ > capacity_ - at_) return Look::broken;
    body = frame + sizeof(Head);
    return Look::frame;
  }

  // Bytes of the body of the last frame looked at, padding included.
  size_t body_bytes() const { return bytes_ - sizeof(Head); }

  // Give the frame's room back. True if the producer waits for room and should be woken.
  bool release() {
    at_ += bytes_;
    if (at_ == capacity_) at_ = 0;
    head_ += bytes_;
    if (head_ - published_ < capacity_ / 8) [[likely]]
      return false;
    published_ = head_;
    words_->head.store(head_, std::memory_order_seq_cst);  // precedes the look at the request, see look_for_room
    if (words_->wants_room.load(std::memory_order_seq_cst) == 0) return false;
    words_->wants_room.store(0, std::memory_order_relaxed);
    return true;
  }

 private:
  RingWords* words_ = nullptr;
  byte* data_ = nullptr;
  size_t capacity_ = 0;
  size_t at_ = 0;
  size_t bytes_ = 0;
  uint64_t head_ = 0;
  uint64_t published_ = 0;
};

}  // namespace unisono::engine
