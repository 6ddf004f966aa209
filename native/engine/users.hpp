// The threads that use an engine whose rank shares its process with other ranks. If all threads of a rank
// have ended, it cannot call a collective; ranks that wait for it get Deadlock.

#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <vector>

namespace unisono::engine {

// A thread, kept while something refers to it. `id` may be another thread's once it has ended.
struct UserThread {
  const pthread_t id = pthread_self();
  std::atomic<bool> has_ended{false};

  static const std::shared_ptr<UserThread>& current() {
    struct Owner {
      std::shared_ptr<UserThread> thread = std::make_shared<UserThread>();
      // relaxed: it publishes nothing else
      ~Owner() { thread->has_ended.store(true, std::memory_order_relaxed); }
    };
    thread_local const Owner owner;
    return owner.thread;
  }
};

// Needs the engine's lock.
class Users {
 public:
  struct User {
    std::shared_ptr<const UserThread> thread;
    bool belongs;
  };

  // The calling thread sends; or it belongs to the rank, because it makes a call or waits for an operation.
  void note(bool belongs) {
    const UserThread* me = UserThread::current().get();
    if (me == last_ && last_belongs_ >= belongs) return;
    last_ = me;
    last_belongs_ = belongs;
    for (User& user : users_)
      if (user.thread.get() == me) {
        user.belongs |= belongs;
        last_belongs_ = user.belongs;
        return;
      }
    forget_ended();
    users_.push_back({UserThread::current(), belongs});
  }
  // Whether a thread that belonged to the rank has ended.
  bool has_lost_users() const { return has_lost_users_; }
  const std::vector<User>& living() {
    forget_ended();
    return users_;
  }

 private:
  void forget_ended() {
    std::erase_if(users_, [this](const User& user) {
      if (!user.thread->has_ended.load(std::memory_order_relaxed)) return false;
      has_lost_users_ |= user.belongs;
      if (user.thread.get() == last_) last_ = nullptr;
      return true;
    });
  }

  std::vector<User> users_;
  bool has_lost_users_ = false;
  const UserThread* last_ = nullptr;
  bool last_belongs_ = false;
};

}  // namespace unisono::engine
