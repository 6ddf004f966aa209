// The poller: waits for events of descriptors (epoll) and dispatches them to their watchers.

#pragma once

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <array>
#include <memory>
#include <unordered_map>

#include "base/system.hpp"
#include "base/types.hpp"

// linux/unistd.h since 5.11; the same number everywhere
#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif

namespace unisono::engine {

class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void on_ready(uint32_t events) = 0;
};

class Poller {
 public:
  using Events = std::array<epoll_event, 64>;

  bool open() {
    epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
    wake_ = std::make_shared<const Descriptor>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    interrupt_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_ || !*wake_ || !interrupt_) return false;
    epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_->get(), &event) == 0;
  }

  // Returns the number of the watch. An event of a closed descriptor finds no watcher, because no number is used twice.
  uint64_t add(int fd, uint32_t events, Watcher& watcher) {
    const uint64_t number = ++numbers_;
    epoll_event event{.events = events, .data = {.u64 = number}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return 0;
    watchers_.emplace(number, &watcher);
    return number;
  }
  void change(int fd, uint64_t number, uint32_t events) {
    epoll_event event{.events = events, .data = {.u64 = number}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
  }
  void remove(int fd, uint64_t number) {
    if (watchers_.erase(number) != 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }

  // Sleep for events, without the engine's lock. A timeout of 0 only looks.
  int wait(Events& events, std::int64_t timeout_ns) const {
    const std::int64_t left = timeout_ns <= 0 ? 0 : timeout_ns < 3600 * second ? timeout_ns : 3600 * second;
    const timespec time{static_cast<time_t>(left / second), static_cast<long>(left % second)};
    int n = static_cast<int>(
        syscall(SYS_epoll_pwait2, epoll_.get(), events.data(), static_cast<int>(events.size()), &time, nullptr, 0));
    // Linux before 5.11 counts milliseconds.
    if (n < 0 && errno == ENOSYS)
      n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                     static_cast<int>((left + millisecond - 1) / millisecond));
    return n < 0 ? 0 : n;
  }
  // The same for a background poller, which `interrupt_in_flight` ends: wake_poller could wake another thread instead.
  int wait_interruptible(Events& events, std::int64_t timeout_ns) const {
    pollfd both[2] = {{epoll_.get(), POLLIN, 0}, {interrupt_.get(), POLLIN, 0}};
    const timespec time{static_cast<time_t>(timeout_ns / second), static_cast<long>(timeout_ns % second)};
    const timespec none{0, 0};
    ppoll(both, 2, timeout_ns > 0 ? &time : &none, nullptr);
    uint64_t drained;
    if (both[1].revents != 0) [[maybe_unused]]
      const ssize_t n = ::read(interrupt_.get(), &drained, sizeof drained);
    return wait(events, 0);
  }
  void interrupt_in_flight() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(interrupt_.get(), &one, sizeof one);
  }
  // Call the watchers, with the engine's lock.
  void dispatch(const Events& events, int count) {
    for (int i = 0; i < count; ++i) {
      const uint64_t number = events[i].data.u64;
      if (number == 0) {
        uint64_t drained;
        [[maybe_unused]] const ssize_t n = ::read(wake_->get(), &drained, sizeof drained);
        continue;
      }
      const auto found = watchers_.find(number);
      if (found != watchers_.end()) found->second->on_ready(events[i].events);
    }
  }

  // Wake a thread that sleeps in `wait`. Callable from any thread.
  void wake_poller() const { wake_by(*wake_); }
  // The same by its descriptor, which other ranks of this process keep: it may outlive the poller.
  std::shared_ptr<const Descriptor> wake() const { return wake_; }
  static void wake_by(const Descriptor& wake) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake.get(), &one, sizeof one);
  }

  void close() {
    epoll_.close();
    wake_ = std::make_shared<const Descriptor>();
    interrupt_.close();
  }

 private:
  Descriptor epoll_;
  std::shared_ptr<const Descriptor> wake_ = std::make_shared<const Descriptor>();
  Descriptor interrupt_;
  uint64_t numbers_ = 0;
  std::unordered_map<uint64_t, Watcher*> watchers_;
};

}  // namespace unisono::engine
