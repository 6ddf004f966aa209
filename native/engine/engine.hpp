// The engine of one rank: its peers, its background thread, and how callers wait.
//
// Knows who makes progress when, and when a peer is dead. Does not know Python, nor what messages are for.
//
// One thread at a time holds the engine. A caller that waits makes progress itself: it spins, then yields, then
// sleeps for news. While nobody waits, the background thread looks every millisecond; after two quiet looks it
// says on the presence page that this rank sleeps, and sleeps until a doorbell rings or a heartbeat is due. It never
// runs Python and so never waits for it.

#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/poller.hpp"
#include "connect/connector.hpp"
#include "link/presence.hpp"
#include "link/tcp_link.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

// A mutex that knows whether others want it: who holds it for long lets them in.
class Mutex {
 public:
  void lock() {
    if (inner_.try_lock()) [[likely]]
      return;
    contenders_.fetch_add(1, std::memory_order_relaxed);
    inner_.lock();
    contenders_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return inner_.try_lock(); }
  void unlock() { inner_.unlock(); }
  // relaxed: seen late is soon enough
  bool is_wanted() const { return contenders_.load(std::memory_order_relaxed) != 0; }
  void let_others_in();

 private:
  std::mutex inner_;
  std::atomic<int> contenders_{0};
};

using Hold = std::unique_lock<Mutex>;

// A peer that is gone.
struct Down {
  std::int32_t rank;
  std::string cause;
  bool left;
};

// Work that is done a piece at a time, between looks at the links.
class DeferredWork {
 public:
  virtual ~DeferredWork() = default;
  // Do a piece. It is no longer added; whoever has more to do adds itself again.
  virtual void work() = 0;
  // The engine closes: there will be no other turn.
  virtual void drop() = 0;

  ListHook<DeferredWork> chore_hook;
};

class Engine final : public PeerServices, private Host {
 public:
  // Throws std::runtime_error if it cannot listen or has no memory.
  Engine(std::int32_t rank, std::int32_t size, const std::string& directory, std::string secret,
         const Settings& settings);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::int32_t rank;
  const std::int32_t size;

  // Every call below but `hold`, `interrupt_wait` and `close` needs it.
  Hold hold() { return Hold(mutex_); }

  Card card() const { return connector_.card(); }
  // Who this rank is on links with TLS; before `connect`. Throws std::runtime_error.
  void secure(const TlsMaterial& material) { connector_.secure(material); }
  void connect(const std::vector<Card>& cards);

  // Start an operation; it may end before the call returns. False (and nothing happens) once the engine is closed.
  bool start(Send& send, std::int32_t dst);
  bool start(Receive& receive);
  // Take it back; false if it has met its counterpart, and then it ends by itself. A receive that was taken back is
  // not told, a send ends as cancelled.
  bool cancel(Send& send) { return send.peer != nullptr && send.peer->cancel(send); }
  bool cancel(Receive& receive);
  // There is memory now for a receive that answered `later`.
  void supply(Receive& receive) { receive.incoming->peer->supply(*receive.incoming); }
  // There will be none: the message is given up.
  void give_up(Receive& receive);

  // Between the two, short frames wait to go together where that saves calls to the system.
  void gather() { ++manner_.corked; }
  void send_gathered() {
    if (--manner_.corked == 0 && tcp_links_ != 0) push();
  }

  void add(DeferredWork& deferred);
  void remove(DeferredWork& deferred) {
    if (deferred.chore_hook.is_in) chores_.remove(deferred);
  }

  // Make progress until `done()`, or until the deadline. `done` is asked with the lock held. Who does it in the
  // background makes way for any other: then it returns, done or not.
  template <class Done>
  bool wait(Hold& held, Done done, std::int64_t deadline, bool is_background = false);
  bool is_polled() const { return is_polled_.load(std::memory_order_relaxed); }
  // How often callers have made progress.
  uint64_t polls() const { return polls_; }
  // A few rounds of progress, for one who expects to be done at once; it gives up as soon as others want to do
  // something, or there is much to do.
  template <class Done>
  void poll_briefly(Done done);
  // One round of progress. True if something moved.
  bool progress();
  // Whoever ends an operation calls this: another thread may be waiting for it.
  void wake_waiters();

  const Peer& peer(std::int32_t of) const { return *peers_[of]; }
  void set_on_down(void (*call)(void*, const Down&), void* self) {
    on_down_ = call;
    on_down_self_ = self;
  }

  // Called at every heartbeat while messages wait whose senders do not: see Inbox::ahead.
  void set_on_unmet(void (*call)(void*), void* self) {
    on_unclaimed_ = call;
    on_unclaimed_self_ = self;
  }

  // Take leave: flush what was started within the time, tell the others, end the rest.
  void close(std::int64_t flush_ns);
  bool is_closed() const { return is_closed_; }
  bool is_forked() const { return is_forked_.load(std::memory_order_relaxed); }
  // How many callers the connector turned away.
  uint64_t refused() const { return connector_.refused(); }
  std::vector<std::string> take_refusals() { return connector_.take_refusals(); }

  // -- PeerServices
  void open_link(Peer& peer) override;
  void start_reading(RendezvousReceive& offer) override {
    readers_.push_back(offer);
    wake_sleeper();
  }
  void stop_reading(RendezvousReceive& offer) override { readers_.remove(offer); }
  void on_news(uint64_t gone, std::string cause, bool left) override;

  // -- fork: see engine.cpp
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  enum class Rest : uint8_t { ticking, epoll, deep };  // how the background thread rests
  class HalfOpenLink;

  // -- Host
  Admission admit(std::int32_t from, Medium medium, Lane lane) override;
  void on_connection(NewConnection connection) override;
  void on_refused(std::int32_t to, const std::string& cause, Admission ruling) override;
  bool is_given_up(std::int32_t by) override { return peers_[by]->state == Peer::State::down && !peers_[by]->left; }
  void on_answer(std::int32_t from, bool is_given_up) override;

  void opened(Peer& peer, std::unique_ptr<Link> link);
  void lose(Peer& peer, const std::string& cause, bool left);
  // Why a peer is lost that has given us up.
  std::string gave_us_up(const std::string& why) const { return "gave rank " + std::to_string(rank) + " up: " + why; }
  void push();
  bool read_pieces();
  // Take work off a peer that reads our memory, while there is nothing else to do.
  bool help();
  void look_for_news();
  void beat(std::int64_t now);
  void run();
  // Whoever sleeps for news has something to do.
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
  Connector connector_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> open_;
  std::unordered_map<std::int32_t, std::unique_ptr<HalfOpenLink>> half_open_links_;
  IntrusiveList<RendezvousReceive, &RendezvousReceive::hook> readers_;
  IntrusiveList<DeferredWork, &DeferredWork::chore_hook> chores_;
  std::unique_ptr<byte[]> scratch_;
  size_t tcp_links_ = 0;
  SocketPolicy manner_;
  bool is_connected_ = false;
  bool is_closed_ = false;
  bool is_closing_ = false;  // nothing may be started any more
  bool is_leaving_ = false;  // nobody may call any more
  std::int64_t spin_ns_ = 0;
  std::int64_t spin_ns_long_ = 0;
  unsigned patience_ = 4;  // rounds without anything new before a look at the clock
  std::int64_t yield_ns_ = 0;
  std::int64_t looked_at_ = 0;
  std::int64_t crowded_until_ = 0;
  std::int64_t moved_at_ = 0;
  size_t share_ = 1;  // how many ranks of this host a core has to serve
  void (*on_down_)(void*, const Down&) = nullptr;
  void* on_down_self_ = nullptr;
  void (*on_unclaimed_)(void*) = nullptr;
  void* on_unclaimed_self_ = nullptr;

  // relaxed everywhere: hints that are read without the lock, decided with it
  std::atomic<bool> is_polled_{false};    // a caller makes progress
  std::atomic<bool> is_sleeping_{false};  // that caller sleeps
  std::atomic<bool> is_forked_{false};
  std::atomic<bool> is_stopping_{false};
  Rest rest_ = Rest::ticking;
  size_t waiters_ = 0;
  uint64_t polls_ = 0;          // how often a caller has made progress
  uint64_t turn_ = 0;           // whose turn it is to make progress: changes when a caller takes over
  bool is_background_ = false;  // who makes progress does it in the background
  std::condition_variable_any moved_;
  std::condition_variable_any background_;
  std::int64_t beat_ns_ = 0;
  std::int64_t beat_at_ = 0;
  std::int64_t judged_at_ = 0;
  std::unique_ptr<std::thread> thread_;
};

template <class Done>
bool Engine::wait(Hold& held, Done done, std::int64_t deadline, bool is_background) {
  if (done()) return true;
  while (is_polled_.load(std::memory_order_relaxed)) {
    if (is_background) return false;
    if (is_background_) {
      take_over();
      break;
    }
    // Somebody else makes progress, and tells when something ended or when it leaves.
    ++waiters_;
    const std::int64_t left = deadline - now_ns();
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(left < 10 * millisecond ? left : 10 * millisecond);
    moved_.wait_until(held, until);
    --waiters_;
    if (done()) return true;
    if (now_ns() >= deadline || is_closed_) return false;
  }
  enter_polling();
  const uint64_t turn = ++turn_;
  is_background_ = is_background;
  std::int64_t quiet_since = 0;
  bool is_done = false;
  for (unsigned rounds = 1;; ++rounds) {
    bool moved = progress();
    if ((is_done = done())) break;
    if (is_closed_) break;
    if (!moved && !is_background) moved = help();
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
    } else if (rounds % patience_ != 0) {
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
  if (done() || is_closed_) return;
  if (is_polled_.load(std::memory_order_relaxed)) {
    if (!is_background_) return;
    take_over();
  }
  enter_polling();
  ++turn_;
  is_background_ = false;
  for (unsigned rounds = 3 * patience_ / 2; rounds > 0; --rounds) {
    const bool moved = progress();
    if (done() || !readers_.empty() || !chores_.empty() || mutex_.is_wanted() || is_closed_) break;
    if (!moved) cpu_pause();
  }
  leave_polling();
}

}  // namespace unisono::engine
