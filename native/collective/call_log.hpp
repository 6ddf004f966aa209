// The call log of a group: the number of its next collective, what was called under the last numbers, and which calls
// are under way below Python.
//
// Knows numbers and the text of calls. Does not know what a call does, nor who compares the text. Every call needs
// the GIL: so a call is allowed, numbered and entered here in one breath.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "wire/frame.hpp"

namespace unisono::engine {

class CompletionQueue;

using Text = std::shared_ptr<const std::string>;

class CallLog {
 public:
  // Whoever asks about an older call has not met us for long: more than any rank runs ahead.
  static constexpr size_t kept = 64;

  struct Entry {
    uint64_t sequence = 0;
    Text text;
  };

  // A call under way below Python, on the stack of whoever makes it. A message has no number.
  static constexpr uint64_t no_sequence = UINT64_MAX;
  struct InFlightCall {
    uint64_t sequence;
    CompletionQueue& completions;
    uint64_t handle;  // of its operation
    // relaxed: a interrupt_wait follows, and makes the waiting thread look
    std::atomic<bool> is_recalled{false};
  };

  uint64_t next = 0;
  // Nothing has happened that Python must look at before the next call.
  bool fast_path_open = true;

  void remember(uint64_t sequence, Text text) {
    Entry& entry = entries_[written_++ % kept];
    entry.sequence = sequence;
    entry.text = std::move(text);
  }

  const Text* find(uint64_t sequence) const {
    for (size_t i = 0; i < size(); ++i)
      if (at(i).sequence == sequence) return &at(i).text;
    return nullptr;
  }

  size_t size() const { return written_ < kept ? written_ : kept; }
  // The i-th of those kept, the newest first.
  const Entry& at(size_t i) const { return entries_[(written_ - 1 - i) % kept]; }

  std::vector<InFlightCall*> flights;

 private:
  std::array<Entry, kept> entries_;
  size_t written_ = 0;
};

}  // namespace unisono::engine
