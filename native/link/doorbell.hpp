// How one side of a shared-memory link wakes the other, and learns of its end.

#pragma once

#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <string>

#include "base/poller.hpp"
#include "base/system.hpp"

namespace unisono::engine {

class Doorbell {
 public:
  virtual ~Doorbell() = default;
  // Wake the peer, which announced on its presence page that it sleeps.
  virtual void ring() = 0;
  // Whether the peer's process runs, and its process id still means that process. Only a guess unless `is_certain`.
  virtual bool is_alive() const = 0;
  virtual bool is_certain() const = 0;
  // Whether the peer has hung up. acquire: what it published before is visible.
  bool has_ended() const { return ended_->load(std::memory_order_acquire); }
  // A rank of this process cannot die or be silent by itself: its end is that it leaves.
  virtual bool shares_process() const { return false; }
  int pid() const { return pid_; }

 protected:
  const std::atomic<bool>* ended_ = nullptr;
  int pid_ = 0;
};

// Between processes: a unix socket. A byte on it wakes the peer, and its end is the peer's end.
class SocketDoorbell final : public Doorbell, public Watcher {
 public:
  // nullptr, and `why`, if the system refuses.
  static std::unique_ptr<SocketDoorbell> open(Poller& poller, Descriptor socket, std::string& why);
  ~SocketDoorbell() override;
  SocketDoorbell(const SocketDoorbell&) = delete;
  SocketDoorbell& operator=(const SocketDoorbell&) = delete;

  void ring() override;
  bool is_alive() const override;
  bool is_certain() const override { return static_cast<bool>(pidfd_); }
  void on_ready(uint32_t events) override;

 private:
  explicit SocketDoorbell(Poller& poller) : poller_(poller) { ended_ = &is_ended_; }

  Poller& poller_;
  Descriptor socket_;
  Descriptor pidfd_;
  uint64_t watch_ = 0;
  uint64_t pid_watch_ = 0;
  std::atomic<bool> is_ended_{false};  // the socket or the pidfd reported the peer's end
};

// Within a process: the wake-up descriptor of the peer's poller, and a flag per side.
class LocalDoorbell final : public Doorbell {
 public:
  struct Flags {
    std::atomic<bool> has_ended[2] = {};
  };
  LocalDoorbell(std::shared_ptr<Flags> flags, unsigned own, std::shared_ptr<const Descriptor> peers_wake)
      : flags_(std::move(flags)), own_(own), peers_wake_(std::move(peers_wake)) {
    ended_ = &flags_->has_ended[1 - own];
    pid_ = getpid();
  }
  ~LocalDoorbell() override {
    // release: what this side published before is visible to a side that sees its end
    flags_->has_ended[own_].store(true, std::memory_order_release);
    ring();
  }
  LocalDoorbell(const LocalDoorbell&) = delete;
  LocalDoorbell& operator=(const LocalDoorbell&) = delete;

  void ring() override { Poller::wake_by(*peers_wake_); }
  bool is_alive() const override { return true; }
  bool is_certain() const override { return true; }
  bool shares_process() const override { return true; }

 private:
  std::shared_ptr<Flags> flags_;
  const unsigned own_;
  std::shared_ptr<const Descriptor> peers_wake_;
};

}  // namespace unisono::engine
