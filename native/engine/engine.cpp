#include "engine/engine.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "base/cores.hpp"
#include "engine/fork_registry.hpp"

namespace unisono::engine {
namespace {

// Bytes per direct read. A piece that is reduced after it was read must stay in the cache; one that is read to its
// target may be longer, because each costs 2 us, until the other links are due: 300 us.
constexpr size_t scratch_bytes = 256 * 1024, piece_bytes = 4 * 1024 * 1024;
// Bytes read per round of progress, however many messages are read: the same thread sends heartbeats.
constexpr uint64_t turn_bytes_max = 4 * piece_bytes;
constexpr std::int64_t tick_ns = millisecond;
constexpr int quiet_ticks = 2;
// Interval at which a spinning caller polls for hang-ups and new links, which rings do not show.
constexpr std::int64_t events_ns = 200'000, events_ns_connecting = 2'000;

}  // namespace

Engine::Engine(std::int32_t rank, std::int32_t size, const std::string& directory, std::string secret,
               const Settings& given, std::shared_ptr<LocalWorld> local)
    : rank(rank),
      size(size),
      connector_(*this, poller_, policy_),
      local_(std::move(local)),
      scratch_(new byte[scratch_bytes]) {
  if (size < 1 || rank < 0 || rank >= size) throw std::runtime_error("allowed: 0 <= rank < size");
  if (local_ != nullptr && local_->size() != size) throw std::runtime_error("allowed: the size of the local world");
  settings = given;
  settings.silence_ns = std::min(settings.silence_ns, silence_ns_max);
  if (!poller_.open()) throw std::runtime_error(failure("cannot create an epoll instance"));
  if (!presence_.open()) throw std::runtime_error(failure("no shared memory for a presence page"));
  for (std::int32_t r = 0; r < size; ++r) peers_.push_back(std::make_unique<Peer>(*this, r, r == rank));
  peers_[rank]->state = Peer::State::open;
  if (local_ == nullptr)
    connector_.open(rank, size, directory, std::move(secret), settings, presence_);
  else
    users_ = std::make_unique<Users>();
  detector_.start(settings, now_ns());
  // The last step that can fail: nothing else refers to this object before.
  start_thread();
  register_engine(*this);
  if (local_ == nullptr) return;
  const Hold held(mutex_);
  local_->enter(rank, poller_.wake(), presence_);
}

void Engine::start_thread() {
  // Signals are delivered to threads that run Python.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  try {
    thread_ = std::make_unique<std::thread>([this] { run(); });
  } catch (const std::system_error& failed) {
    error = failed.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) throw std::runtime_error(failure("cannot start the engine's thread", error));
  pthread_setname_np(thread_->native_handle(), "unisono-engine");
}

Engine::~Engine() {
  if (is_forked()) {
    (void)thread_.release();  // there is no such thread here
    return;
  }
  close(0);
  unregister_engine(*this);
}

void Engine::after_fork_in_child() {
  is_forked_.store(true, std::memory_order_relaxed);
  // The poller first: the parent shares its kernel object and still needs the entries.
  poller_.close();
  connector_.close(true);
  presence_.close();
  open_.clear();
  for (auto& peer : peers_) peer->link.reset();
  mutex_.unlock();
}

void Engine::connect(const std::vector<Card>& cards) {
  if (cards.size() != peers_.size()) throw std::runtime_error("allowed: one card per rank");
  if (!connector_.is_ready())
    throw std::runtime_error("links are encrypted, and this rank has no credentials: call secure before connect");
  connector_.set_cards(cards);
  int ranks_here = 0;
  for (size_t i = 0; i < cards.size(); ++i) {
    Peer& peer = *peers_[i];
    peer.card = cards[i];
    peer.is_same_host = connector_.is_here(cards[i]);
    ranks_here += peer.is_same_host;
  }
  is_connected_ = true;
  spin_.set_host(ranks_here, cores());
  if (settings.neighbours)
    for (std::int64_t step = 1; step < size; step *= 2)
      for (const std::int64_t other : {(rank + step) % size, (rank - step + size) % size}) {
        Peer& peer = *peers_[other];
        if (peer.state == Peer::State::unopened) open_link(peer);
      }
  // Sends that were started earlier waited for the cards.
  for (auto& peer : peers_)
    if (peer->state == Peer::State::unopened && peer->has_backlog()) open_link(*peer);
}

// ---- operations ----

bool Engine::start(Send& send, std::int32_t dst) {
  if (is_closing_) return false;
  if (users_ != nullptr) users_->note(false);
  peers_[dst]->send(send);
  note_timer();
  return true;
}

bool Engine::start(Receive& receive) {
  if (is_closing_) return false;
  receive.incoming = nullptr;
  receive.is_unwanted = false;
  if (inbox.serve(receive)) {
    note_timer();
    return true;
  }
  if (receive.source != any_source && peers_[receive.source]->state == Peer::State::down) {
    receive.end(Outcome::peer_down, receive.source);
    return true;
  }
  inbox.post(receive);
  return true;
}

bool Engine::cancel(Receive& receive) {
  if (!receive.is_posted()) {
    receive.is_unwanted = receive.incoming != nullptr;
    return false;
  }
  inbox.withdraw(receive);
  return true;
}

bool Engine::has_pending(uint64_t tag_bit_ignored) const {
  const auto waits = [&](const Receive* receive) { return receive->any_tag || (receive->tag & tag_bit_ignored) == 0; };
  const std::vector<Receive*> posted = inbox.all_posted();
  return std::any_of(posted.begin(), posted.end(), waits) ||
         std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& p) { return p->has_backlog() || p->awaits_answer(); });
}

void Engine::give_up(Receive& receive) { receive.incoming->peer->rendezvous.give_up(*receive.incoming); }

// ---- progress ----

bool Engine::progress() {
  bool moved = false;
  // One epoll call for all sockets instead of a read of each.
  if (!policy_.busy_poll) poll_events();
  if (connector_.has_due()) [[unlikely]]
    connector_.connect_due();
  if (local_ != nullptr && local_->has_arrivals(rank)) [[unlikely]]
    take_arrivals();
  cork();
  moved |= connector_.poll();
  for (size_t i = 0; i < open_.size(); ++i) {
    Peer& peer = *open_[i];
    moved |= peer.link->poll();
    if (peer.has_backlog()) moved |= peer.flush();
    if (peer.link->over() != nullptr) [[unlikely]] {
      const Link& link = *peer.link;
      if (!peer.verdict.empty())
        lose(peer, gave_up_on_us(peer.verdict), false);
      else
        lose(peer, std::string(link.is_hung_up() ? "" : "broke the protocol: ") + link.over(), link.has_left());
      --i;
      moved = true;
    }
  }
  uncork();
  if (!readers_.empty()) [[unlikely]]
    moved |= read_pieces();
  if (!deferred_.empty()) [[unlikely]] {
    // One piece of each, then the links have their turn.
    for (size_t turns = deferred_.size(); turns > 0 && !deferred_.empty(); --turns) deferred_.pop_front()->work();
    moved = true;
  }
  moves_ += moved;
  return moved;
}

void Engine::push() {
  if (policy_.links != 0)
    for (Peer* peer : open_) peer->link->push();
  connector_.push();
  note_timer();
}

void Engine::note_timer() {
  // What was sent has a timer, of which a sleeping thread does not know yet.
  if (sleeps_until_ != 0 && connector_.expiry() < sleeps_until_) wake_sleeper();
}

void Engine::add(DeferredWork& deferred) {
  if (deferred.deferred_hook.is_in) return;
  deferred_.push_back(deferred);
  wake_sleeper();
}

bool Engine::read_pieces() {
  bool moved = false;
  uint64_t bytes = 0;
  // One piece of each, then the links have their turn.
  for (size_t turns = readers_.size(); turns > 0 && bytes < turn_bytes_max && !readers_.empty(); --turns) {
    RendezvousReceive& offer = *readers_.front();
    readers_.remove(offer);
    readers_.push_back(offer);
    const uint64_t before = offer.received;
    bytes += std::min<uint64_t>(piece_bytes, offer.nbytes - before);
    Peer& peer = *offer.peer;
    if (const char* fault = peer.read_piece(offer, scratch_.get(), scratch_bytes, piece_bytes); fault != nullptr) {
      lose(peer, fault, false);
      return true;
    }
    moved |= offer.received != before;
  }
  return moved;
}

bool Engine::share_copies() {
  for (Peer* peer : open_)
    if (peer->copy_for_receiver(piece_bytes)) return true;
  return false;
}

void Engine::wake_waiters() {
  if (is_sleeping_.load(std::memory_order_relaxed)) poller_.wake_poller();
  if (waiters_ != 0) moved_.notify_all();
}

void Engine::poll_events() {
  Poller::Events events;
  const int count = poller_.wait(events, 0);
  if (count > 0) poller_.dispatch(events, count);
}

void Engine::enter_polling() {
  is_polled_.store(true, std::memory_order_relaxed);
  presence_.publish_core();
  // Peers do not wake a rank that is awake: a background thread that sleeps in epoll must take note.
  if (presence_.wake_up() && rest_ == Rest::epoll) poller_.wake_poller();
}

// Take over from a background caller, which notices by the changed turn.
void Engine::take_over() {
  if (is_sleeping_.exchange(false, std::memory_order_relaxed)) poller_.interrupt_in_flight();
}

void Engine::leave_polling() {
  if (!is_background_) ++polls_;
  is_polled_.store(false, std::memory_order_relaxed);
  if (rest_ == Rest::epoll) poller_.wake_poller();
  if (rest_ == Rest::deep) background_.notify_one();
  if (waiters_ != 0) moved_.notify_all();
}

// What a caller does after a while without progress: spin on, change the core, yield or sleep.
void Engine::back_off(std::int64_t quiet_ns, Hold& held, std::int64_t now, std::int64_t deadline) {
  if (now - events_polled_at_ > (connector_.is_busy() ? events_ns_connecting : events_ns)) {
    events_polled_at_ = now;
    poll_events();
  }
  const std::int32_t core = presence_.publish_core();
  SpinPolicy::Seen seen{.now = now, .quiet_ns = quiet_ns, .sharers = 0, .is_last = true, .are_cores_known = true};
  for (const Peer* peer : open_) {
    if (policy_.has_sockets() && peer->link->core() < 0) seen.are_cores_known = false;
    if (peer->link->core() != core) continue;
    ++seen.sharers;
    seen.is_last &= peer->rank < rank;
  }
  switch (spin_.next(seen)) {
    case SpinPolicy::Step::spin: return;
    case SpinPolicy::Step::leave_core:
      spin_.on_core_left(now);
      held.unlock();
      leave_core(core);
      held.lock();
      return;
    case SpinPolicy::Step::yield: {
      held.unlock();
      sched_yield();
      const std::int64_t away = now_ns() - now;
      held.lock();
      return spin_.on_yielded(now, away);
    }
    case SpinPolicy::Step::sleep: sleep_for_events(held, std::min(deadline, now + second));
  }
}

void Engine::sleep_for_events(Hold& held, std::int64_t until) {
  presence_.fall_asleep();
  if (progress()) {
    presence_.wake_up();
    return;
  }
  is_sleeping_.store(true, std::memory_order_relaxed);
  sleeps_until_ = std::min(until, connector_.expiry());
  const std::int64_t left = sleeps_until_ - now_ns();
  const uint64_t turn = turn_;
  const bool is_background = is_background_;
  held.unlock();
  Poller::Events events;
  const int count = is_background ? poller_.wait_interruptible(events, left) : poller_.wait(events, left);
  held.lock();
  if (turn != turn_) {
    poller_.dispatch(events, count);
    // The event that ended this sleep was meant for the new caller.
    if (count > 0 && is_sleeping_.load(std::memory_order_relaxed)) poller_.wake_poller();
    return;
  }
  is_sleeping_.store(false, std::memory_order_relaxed);
  sleeps_until_ = 0;
  presence_.wake_up();
  poller_.dispatch(events, count);
}

void Engine::run() {
  Poller::Events events;
  int quiet = 0;
  uint64_t polls = 0;
  while (!is_stopping_.load(std::memory_order_relaxed)) {
    const std::int64_t now = now_ns();
    if (now < detector_.beat_at() && is_polled_.load(std::memory_order_relaxed) &&
        !is_sleeping_.load(std::memory_order_relaxed)) {
      // A caller spins and makes progress.
      quiet = 0;
      const timespec tick{0, tick_ns};
      nanosleep(&tick, nullptr);
      continue;
    }
    // Before taking the lock: a caller that holds it and is not scheduled must not make this rank look dead.
    if (now >= detector_.beat_at()) presence_.beat();
    Hold held(mutex_);
    if (now >= detector_.beat_at()) beat(now);
    const std::int64_t until = detector_.beat_at() - now;
    if (is_polled_.load(std::memory_order_relaxed)) {
      if (!is_sleeping_.load(std::memory_order_relaxed)) continue;
      // The caller sleeps for events itself; only heartbeats are left to do.
      rest_ = Rest::deep;
      background_.wait_until(held, std::chrono::steady_clock::now() + std::chrono::nanoseconds(until));
      rest_ = Rest::ticking;
      continue;
    }
    const bool is_asleep = presence_.is_asleep();
    rest_ = is_asleep ? Rest::epoll : Rest::ticking;
    sleeps_until_ = std::min({detector_.beat_at(), connector_.expiry(), is_asleep ? never : now + tick_ns});
    const std::int64_t left = sleeps_until_ - now;
    held.unlock();
    const int count = poller_.wait(events, left);
    held.lock();
    rest_ = Rest::ticking;
    sleeps_until_ = 0;
    poller_.dispatch(events, count);
    if (is_polled_.load(std::memory_order_relaxed)) {
      // A caller came meanwhile and sleeps: the event taken here was meant for it.
      if (count > 0 && is_sleeping_.load(std::memory_order_relaxed)) poller_.wake_poller();
      continue;
    }
    if (is_asleep) presence_.wake_up();
    bool moved = false;
    // Heartbeats are due even while messages keep coming.
    while (now_ns() < detector_.beat_at() && progress()) {
      moved = true;
      if (mutex_.is_wanted()) {
        held.unlock();
        mutex_.let_others_in();
        held.lock();
        if (is_polled_.load(std::memory_order_relaxed)) break;
      }
    }
    if (is_polled_.load(std::memory_order_relaxed)) continue;
    // The gap between two calls of a busy caller is not quiet.
    const bool was_polled = std::exchange(polls, polls_) != polls_;
    quiet = (moved && !is_asleep) || was_polled ? 0 : quiet + 1;
    // After a wake-up by a peer: back to sleep at once. While ticking: after some ticks without progress.
    if ((is_asleep && !was_polled) || quiet >= quiet_ticks) {
      presence_.fall_asleep();
      if (progress()) {
        presence_.wake_up();
        quiet = 0;
      }
    }
  }
}

}  // namespace unisono::engine
