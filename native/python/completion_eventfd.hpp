// An eventfd with a queue of completions: threads of a foreign library report completions to Python without the GIL.
//
// The library is given `ring` as its callback and a token, which is valid for one call. Python waits for the eventfd
// and takes the completions.

#pragma once

#include <sys/eventfd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "base/system.hpp"

namespace unisono {

class CompletionEventFd : public std::enable_shared_from_this<CompletionEventFd> {
 public:
  using Completion = std::pair<std::uint64_t, std::int8_t>;  // number, code

  CompletionEventFd() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  int descriptor() const { return event_.get(); }

  // The argument of one call of `ring`. This object lives until every token is used.
  std::uint64_t token(std::uint64_t number) {
    return reinterpret_cast<std::uint64_t>(new Token{shared_from_this(), number});
  }

  static void ring(std::uint64_t token, std::int8_t code) noexcept {
    const std::unique_ptr<Token> used(reinterpret_cast<Token*>(token));
    used->owner->note(used->number, code);
  }

  std::vector<Completion> take() {
    eventfd_t count;
    const std::lock_guard lock(mutex_);
    if (completions_.empty()) return {};
    (void)eventfd_read(event_.get(), &count);
    return std::exchange(completions_, {});
  }

 private:
  struct Token {
    std::shared_ptr<CompletionEventFd> owner;
    std::uint64_t number;
  };

  void note(std::uint64_t number, std::int8_t code) {
    const std::lock_guard lock(mutex_);
    completions_.emplace_back(number, code);
    // `take` takes all, so one write is enough until then.
    if (completions_.size() == 1) (void)eventfd_write(event_.get(), 1);
  }

  engine::Descriptor event_;
  std::mutex mutex_;
  std::vector<Completion> completions_;
};

}  // namespace unisono
