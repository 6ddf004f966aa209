// The engine of one rank: its peers, its background thread, and how callers wait.
//
// One thread at a time holds the engine's lock. A caller that waits makes progress itself: it spins, then yields, then
// sleeps for events. While no caller waits, the background thread polls every millisecond; after two polls without
// progress it announces on the presence page that this rank sleeps, and sleeps until a peer wakes it or a heartbeat is
// due. It never runs Python, and so never waits for the GIL.

#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/poller.hpp"
#include "connect/connector.hpp"
#include "connect/local_world.hpp"
#include "engine/failure_detector.hpp"
#include "engine/mutex.hpp"
#include "engine/spin_policy.hpp"
#include "engine/users.hpp"
#include "link/presence.hpp"
#include "link/tcp_link.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

// A peer that is gone.
struct Down {
  std::int32_t rank;
  std::string cause;
  bool left;
};

// Work that is done a piece at a time, between polls of the links.
class DeferredWork {
 public:
  virtual ~DeferredWork() = default;
  // Do a piece. The engine has removed this object, which adds itself again if it has more to do.
  virtual void work() = 0;
  // The engine closes, and `work` will not be called again.
  virtual void drop() = 0;

  ListHook<DeferredWork> deferred_hook;
};

class Engine final : public PeerServices, private ConnectionOwner {
 public:
  // Throws std::runtime_error if it cannot listen or has no memory. A rank of a local world does not listen: its peers
  // are the other ranks of that world.
  Engine(std::int32_t rank, std::int32_t size, const std::string& directory, std::string secret,
         const Settings& settings, std::shared_ptr<LocalWorld> local = nullptr);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::int32_t rank;
  const std::int32_t size;

  // Every call below but `close` needs the lock.
  Hold hold() { return Hold(mutex_); }

  Card card() const { return connector_.card(); }
  // Set this rank's TLS identity, before `connect`. Throws std::runtime_error.
  void secure(const TlsMaterial& material) { connector_.secure(material); }
  void connect(const std::vector<Card>& cards);

  // Start an operation; it may end before the call returns. False (and nothing happens) once the engine is closed.
  bool start(Send& send, std::int32_t dst);
  bool start(Receive& receive);
  // Cancel an operation. False if it was matched; it then ends by itself. A cancelled send ends as cancelled, a
  // cancelled receive without a call of `end`.
  bool cancel(Send& send) { return send.peer != nullptr && send.peer->cancel(send); }
  bool cancel(Receive& receive);
  // There is memory now for a receive that said `defer`.
  void supply(Receive& receive) { receive.incoming->peer->rendezvous.supply(*receive.incoming); }
  // There will be none: the payload is lost.
  void give_up(Receive& receive);

  // Between the two, short frames to sockets wait, so that one system call sends them all.
  void cork() { ++policy_.corked; }
  void uncork() {
    if (--policy_.corked == 0 && policy_.has_sockets()) push();
  }

  void add(DeferredWork& deferred);
  void remove(DeferredWork& deferred) {
    if (deferred.deferred_hook.is_in) deferred_.remove(deferred);
  }

  // Make progress until `done()` or the deadline; returns `done()`, which is called with the lock held. A background
  // caller makes way for any other, and then returns early.
  template <class Done>
  bool wait(Hold& held, Done done, std::int64_t deadline, bool is_background = false);
  bool is_polled() const { return is_polled_.load(std::memory_order_relaxed); }
  // The number of times that a caller finished making progress.
  uint64_t polls() const { return polls_; }
  // A few rounds of progress, for a caller that expects to be done at once. Returns as soon as another thread wants the
  // lock or longer work is due.
  template <class Done>
  void poll_briefly(Done done);
  // One round of progress. True if something moved.
  bool progress();
  // To be called when an operation ends: another thread may wait for it.
  void wake_waiters();

  // The threads that use this rank; nullptr unless it is one of a local world.
  Users* users() { return users_.get(); }
  // How often something moved.
  uint64_t moves() const { return moves_; }
  // Whether a receive waits for its message, but for those with this bit in their tag, or a send for its receive.
  bool has_pending(uint64_t tag_bit_ignored) const;

  const Peer& peer(std::int32_t of) const { return *peers_[of]; }
  void set_on_down(void (*call)(void*, const Down&), void* self) {
    on_down_ = call;
    on_down_self_ = self;
  }

  // Called at every heartbeat while run-ahead messages wait: see Inbox::run_ahead.
  void set_on_unclaimed(void (*call)(void*), void* self) {
    on_unclaimed_ = call;
    on_unclaimed_self_ = self;
  }

  // Flush for up to `flush_ns`, say goodbye, end the remaining operations.
  void close(std::int64_t flush_ns);
  // Without the lock, too: then a late answer is soon enough.
  bool is_closed() const { return is_closed_.load(std::memory_order_relaxed); }
  bool is_forked() const { return is_forked_.load(std::memory_order_relaxed); }
  // The number of callers that the connector refused.
  uint64_t refused() const { return connector_.refused(); }
  std::vector<std::string> take_refusals() { return connector_.take_refusals(); }

  // -- PeerServices
  void open_link(Peer& peer) override;
  void start_reading(RendezvousReceive& offer) override {
    readers_.push_back(offer);
    wake_sleeper();
  }
  void stop_reading(RendezvousReceive& offer) override { readers_.remove(offer); }
  void on_rank_down(uint64_t gone, std::string cause, bool left) override;

  // -- fork: see fork_registry.hpp
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  enum class Rest : uint8_t { ticking, epoll, deep };  // how the background thread sleeps

  // -- ConnectionOwner
  Admission admit(std::int32_t from) override;
  Peer* on_admitted(std::int32_t of) override;
  void on_link(Peer& peer, std::unique_ptr<Link> link) override;
  void on_refused(std::int32_t to, const std::string& cause, Admission admission) override;
  bool is_given_up(std::int32_t by) override { return peers_[by]->state == Peer::State::down && !peers_[by]->left; }
  void on_answer(std::int32_t from, bool is_given_up) override;

  // Throws std::runtime_error.
  void start_thread();
  void take_arrivals();
  void lose(Peer& peer, const std::string& cause, bool left);
  // The cause of a peer that has declared this rank dead.
  std::string gave_up_on_us(const std::string& why) const {
    return "gave rank " + std::to_string(rank) + " up: " + why;
  }
  void push();
  // Something may have been sent: the thread that sleeps must wake up for its timer.
  void note_timer();
  bool read_pieces();
  // Share the copy of a message that a peer reads from our memory, while there is nothing else to do.
  bool share_copies();
  void poll_events();
  void beat(std::int64_t now);
  void run();
  // -- the steps of `close`
  // Wait until everything is sent, and no handshake is under way.
  void flush(Hold& held, std::int64_t flush_ns);
  // End all operations, and send goodbyes.
  void say_goodbyes(Hold& held);
  void await_hang_ups(Hold& held, std::int64_t flush_ns);
  // Make the background thread and every caller leave.
  void stop(Hold& held);
  bool is_each_peer(bool (*is_so)(const Peer&)) const;  // but those that are down
  bool is_each_link(bool (*is_so)(const Link&)) const;
  // Wake the thread that sleeps for events: there is something to do.
  void wake_sleeper() {
    if (rest_ == Rest::epoll || is_sleeping_.load(std::memory_order_relaxed)) poller_.wake_poller();
  }
  void enter_polling();
  void take_over();
  void leave_polling();
  void sleep_for_events(Hold& held, std::int64_t until);
  void back_off(std::int64_t quiet_ns, Hold& held, std::int64_t now, std::int64_t deadline);

  Mutex mutex_;
  Poller poller_;
  Presence presence_;
  SocketPolicy policy_;
  Connector connector_;
  const std::shared_ptr<LocalWorld> local_;
  std::unique_ptr<Users> users_;
  uint64_t moves_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> open_;
  IntrusiveList<RendezvousReceive, &RendezvousReceive::hook> readers_;
  IntrusiveList<DeferredWork, &DeferredWork::deferred_hook> deferred_;
  std::unique_ptr<byte[]> scratch_;
  bool is_connected_ = false;
  bool is_closing_ = false;  // no operation may be started any more
  bool is_leaving_ = false;  // no peer may connect any more
  SpinPolicy spin_;
  std::int64_t events_polled_at_ = 0;
  void (*on_down_)(void*, const Down&) = nullptr;
  void* on_down_self_ = nullptr;
  void (*on_unclaimed_)(void*) = nullptr;
  void* on_unclaimed_self_ = nullptr;

  // relaxed everywhere: hints that are read without the lock and written with it
  std::atomic<bool> is_polled_{false};    // a caller makes progress
  std::atomic<bool> is_sleeping_{false};  // that caller sleeps
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> is_forked_{false};
  std::atomic<bool> is_stopping_{false};
  Rest rest_ = Rest::ticking;
  std::int64_t sleeps_until_ = 0;  // the thread that sleeps for events
  size_t waiters_ = 0;
  uint64_t polls_ = 0;
  uint64_t turn_ = 0;           // changes when another caller takes over making progress
  bool is_background_ = false;  // the caller that makes progress is a background one
  std::condition_variable_any moved_;
  std::condition_variable_any background_;
  FailureDetector detector_;
  std::unique_ptr<std::thread> thread_;
};

template <class Done>
bool Engine::wait(Hold& held, Done done, std::int64_t deadline, bool is_background) {
  if (users_ != nullptr && !is_background) users_->note(true);
  if (done()) return true;
  while (is_polled_.load(std::memory_order_relaxed)) {
    if (is_background) return false;
    if (is_background_) {
      take_over();
      break;
    }
    // Another thread makes progress, and notifies when an operation ended or when it leaves.
    ++waiters_;
    const std::int64_t left = deadline - now_ns();
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(left < 10 * millisecond ? left : 10 * millisecond);
    moved_.wait_until(held, until);
    --waiters_;
    if (done()) return true;
    if (now_ns() >= deadline || is_closed()) return false;
  }
  enter_polling();
  const uint64_t turn = ++turn_;
  is_background_ = is_background;
  std::int64_t quiet_since = 0;
  bool is_done = false;
  for (unsigned rounds = 1;; ++rounds) {
    bool moved = progress();
    if ((is_done = done())) break;
    if (is_closed()) break;
    if (!moved && !is_background) moved = share_copies();
    if (mutex_.is_wanted()) [[unlikely]] {
      held.unlock();
      mutex_.let_others_in();
      held.lock();
      if (turn != turn_) return done();
      if ((is_done = done())) break;
    }
    if (moved) {
      quiet_since = 0;
      if (rounds % 64 != 0) continue;
    } else if (rounds % spin_.rounds() != 0) {
      cpu_pause();
      continue;
    }
    const std::int64_t now = now_ns();
    if (now >= deadline) break;
    if (moved || quiet_since == 0) {
      quiet_since = now;
      continue;
    }
    back_off(now - quiet_since, held, now, deadline);
    if (turn != turn_) return done();
    if ((is_done = done())) break;
  }
  leave_polling();
  return is_done;
}

template <class Done>
void Engine::poll_briefly(Done done) {
  if (users_ != nullptr) users_->note(true);
  if (done() || is_closed()) return;
  if (is_polled_.load(std::memory_order_relaxed)) {
    if (!is_background_) return;
    take_over();
  }
  enter_polling();
  ++turn_;
  is_background_ = false;
  for (unsigned rounds = 3 * spin_.rounds() / 2; rounds > 0; --rounds) {
    const bool moved = progress();
    if (done() || !readers_.empty() || !deferred_.empty() || mutex_.is_wanted() || is_closed()) break;
    if (!moved) cpu_pause();
  }
  leave_polling();
}

}  // namespace unisono::engine
