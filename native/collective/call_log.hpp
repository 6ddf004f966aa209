// The call log of a group: the number of its next collective, what was called under the last numbers, and which calls
// are under way below Python.
//
// Knows numbers, fingerprints, and where in the program each call stands. Does not know what a call does, nor
// compares fingerprints. Every method needs the GIL, so allowing, numbering and entering a call is one atomic step.

#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <vector>

#include "collective/fingerprint.hpp"

namespace unisono::engine {

class CompletionQueue;

class CallLog {
 public:
  // 512 calls: more than any rank can run ahead (240), so every query finds its call.
  static constexpr size_t kept = 512;

  // The line of the program that made a call: its code object, of which the log holds a reference, and the
  // instruction in it. nullptr if unknown.
  struct Site {
    void* code = nullptr;
    int instruction = 0;
  };
  // For reports: the shape of the array of a call, or the lengths into which it is cut, or of its arrays. Of a call
  // that Python has put into words, none.
  struct Lengths {
    bool are_known = false;
    std::vector<std::int64_t> of;
    std::vector<uint8_t> types;  // of each array, if they are several
  };
  struct Entry {
    uint64_t sequence = 0;
    Fingerprint fingerprint;
    Site site;
    Lengths lengths;
  };

  // A call under way below Python, on its caller's stack. A message has no number.
  static constexpr uint64_t no_sequence = UINT64_MAX;
  struct InFlightCall {
    uint64_t sequence;
    CompletionQueue& completions;
    std::span<const uint64_t> handles;  // of its operations
    // relaxed: an interrupt_wait follows, and makes the waiting thread look
    std::atomic<bool> is_interrupted{false};
  };

  // `release` drops a reference to a code object.
  explicit CallLog(void (*release)(void*)) : release_(release) {}
  CallLog(const CallLog&) = delete;
  CallLog& operator=(const CallLog&) = delete;
  ~CallLog() {
    for (const Entry& entry : entries_)
      if (entry.site.code != nullptr) release_(entry.site.code);
  }

  uint64_t next = 0;
  // Calls that ended below Python and whose end has shown that all members made the same call.
  uint64_t agreed = 0;
  // Whether that is true of every call: then no member can wait in a different one of them.
  bool is_agreed() const { return agreed == next; }
  // Nothing has happened that Python must look at before the next call.
  bool fast_path_open = true;
  // The same for messages between two members: these go on among members that are left.
  bool messages_open = true;

  // Takes the reference of the site, and returns the one of the entry that it replaces: dropping it may run any code,
  // so the caller does that when its call may be interrupted.
  [[nodiscard]] void* remember(uint64_t sequence, const Fingerprint& fingerprint, Site site) {
    if (entries_.size() < kept) entries_.emplace_back();  // most groups make few calls
    Entry& entry = entries_[written_++ % kept];
    void* const replaced = entry.site.code;
    entry.sequence = sequence;
    entry.fingerprint = fingerprint;
    entry.site = site;
    entry.lengths.are_known = false;
    return replaced;
  }
  // Of the call that was remembered last.
  Lengths& lengths() { return entries_[(written_ - 1) % kept].lengths; }

  const Entry* find(uint64_t sequence) const {
    for (size_t i = 0; i < size(); ++i)
      if (at(i).sequence == sequence) return &at(i);
    return nullptr;
  }

  size_t size() const { return entries_.size(); }
  // The i-th of those kept, the newest first.
  const Entry& at(size_t i) const { return entries_[(written_ - 1 - i) % kept]; }

  std::vector<InFlightCall*> flights;

 private:
  void (*release_)(void*);
  std::vector<Entry> entries_;  // up to `kept`
  size_t written_ = 0;
};

}  // namespace unisono::engine
