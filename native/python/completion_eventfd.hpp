// A bell: threads that know no Python tell it what has happened, and never wait for it.
//
// Knows numbers and an eventfd. Does not know what a number stands for. A foreign library that calls back from its own
// threads is given `ring` and a ticket, which is good for one call; Python takes what was rung when it comes to it.

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
  using Rung = std::pair<std::uint64_t, std::int8_t>;  // number, code

  CompletionEventFd() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  int descriptor() const { return event_.get(); }

  // What `ring` is to be given. The bell lives until every ticket is used.
  std::uint64_t ticket(std::uint64_t number) {
    return reinterpret_cast<std::uint64_t>(new Ticket{shared_from_this(), number});
  }

  static void ring(std::uint64_t ticket, std::int8_t code) noexcept {
    const std::unique_ptr<Ticket> used(reinterpret_cast<Ticket*>(ticket));
    used->bell->note(used->number, code);
  }

  std::vector<Rung> take() {
    eventfd_t count;
    const std::lock_guard lock(mutex_);
    if (rung_.empty()) return {};
    (void)eventfd_read(event_.get(), &count);
    return std::exchange(rung_, {});
  }

 private:
  struct Ticket {
    std::shared_ptr<CompletionEventFd> bell;
    std::uint64_t number;
  };

  void note(std::uint64_t number, std::int8_t code) {
    const std::lock_guard lock(mutex_);
    rung_.emplace_back(number, code);
    // Whoever takes takes all, so that one write is enough for those in between.
    if (rung_.size() == 1) (void)eventfd_write(event_.get(), 1);
  }

  engine::Descriptor event_;
  std::mutex mutex_;
  std::vector<Rung> rung_;
};

}  // namespace unisono
