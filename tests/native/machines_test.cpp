// The tables of state machines, and what the tests of the machines themselves stand on.

#include <signal.h>
#include <sys/wait.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/digest.hpp"
#include "connect/handshake.hpp"
#include "engine/failure_detector.hpp"
#include "engine/mailbox.hpp"
#include "engine_cases.hpp"
#include "link/cooperative_copy.hpp"
#include "link/shm_link.hpp"
#include "link/tcp_link.hpp"
#include "messaging/rendezvous_receive.hpp"

namespace unisono::engine {
namespace {

// Every row of a machine's table is in the array, every other pair is refused, and every state can be reached.
template <class State, class Event, class Table>
void check_machine(const Table& table, std::initializer_list<State> starts, const char* what) {
  size_t listed = 0;
  std::vector<bool> reached(Table::state_count);
  std::vector<State> next = starts;
  for (const State start : starts) reached[static_cast<size_t>(start)] = true;
  while (!next.empty()) {
    const State state = next.back();
    next.pop_back();
    for (size_t e = 0; e < Table::event_count; ++e) {
      const auto event = static_cast<Event>(e);
      if (!table.allows(state, event)) continue;
      ++listed;
      const State to = table.next(state, event);
      if (!reached[static_cast<size_t>(to)]) next.push_back(to);
      reached[static_cast<size_t>(to)] = true;
    }
  }
  check(std::find(reached.begin(), reached.end(), false) == reached.end(), what);
  check(listed == table.row_count, what);
}

}  // namespace

void test_machines() {
  check_machine<Reading, ReadEvent>(read_transitions, {Reading::ready}, "the reading half of a connection is whole");
  check_machine<Writing, WriteEvent>(write_transitions, {Writing::open}, "the writing half of a connection is whole");
  static_assert(!read_transitions.allows(Reading::ended, ReadEvent::end_of_stream), "a stream ends once");
  static_assert(!write_transitions.allows(Writing::closed, WriteEvent::full), "nothing is written after the end");

  check_machine<HandshakeState, HandshakeEvent>(handshake_transitions, {HandshakeState::due, HandshakeState::accepted},
                                                "the handshake is whole on both sides");
  static_assert(!handshake_transitions.allows(HandshakeState::await_hello, HandshakeEvent::welcome),
                "no peer is admitted without a proof");
  static_assert(!handshake_transitions.allows(HandshakeState::tls_accept, HandshakeEvent::message),
                "nothing is read before TLS is done");

  check_machine<Leader, LeaderEvent>(leader_transitions, {Leader::absent}, "the mailbox leader is whole");
  static_assert(!leader_transitions.allows(Leader::polling, LeaderEvent::succeed), "a present leader is not replaced");
  static_assert(!leader_transitions.allows(Leader::resting, LeaderEvent::succeed), "nor one that rests");

  check_machine<CopyState, CopyEvent>(copy_transitions, {CopyState::unasked}, "the cooperative copy is whole");
  static_assert(!copy_transitions.allows(CopyState::draining, CopyEvent::reset),
                "a buffer is not reused while written");
  static_assert(!copy_transitions.allows(CopyState::fenced, CopyEvent::claim), "nothing is claimed after the fence");
  check_machine<GuardPage, GuardEvent>(guard_transitions, {GuardPage::absent}, "the guard page is whole");
  static_assert(guard_transitions.next(GuardPage::shut, GuardEvent::shut) == GuardPage::shut, "it never opens again");

  check_machine<OfferWord, OfferEvent>(offer_transitions, {OfferWord::free}, "the offer word is whole");
  // A claim and a withdrawal exclude each other, and only what was claimed can be finished.
  for (uint32_t from = 0; from < offer_word_count; ++from) {
    std::atomic<uint32_t> word{from};
    const bool is_open =
        from == static_cast<uint32_t>(OfferWord::offered) || from == static_cast<uint32_t>(OfferWord::queued);
    check(change_offer(word, OfferEvent::claim) == is_open, "an offer can be claimed while it is open");
    check(!is_open || !change_offer(word, OfferEvent::withdraw), "a claimed offer cannot be withdrawn");
    word = from;
    check(change_offer(word, OfferEvent::withdraw) == is_open, "an offer can be withdrawn while it is open");
    check(!is_open || !change_offer(word, OfferEvent::claim), "a withdrawn offer cannot be claimed");
    word = from;
    check(change_offer(word, OfferEvent::finish) == (from == static_cast<uint32_t>(OfferWord::reading)),
          "a claimed offer can be finished, no other");
  }
  std::atomic<uint32_t> wild{77};
  check(!change_offer(wild, OfferEvent::claim) && wild == 77, "a word that is no state allows nothing");

  using Rendezvous = RendezvousReceive;
  check_machine<Rendezvous::State, Rendezvous::Event>(Rendezvous::transitions, {Rendezvous::State::free},
                                                      "the receiving side of a rendezvous is whole");
  static_assert(!Rendezvous::transitions.allows(Rendezvous::State::reading, Rendezvous::Event::withdraw),
                "a message that is read cannot be withdrawn");
  static_assert(!Rendezvous::transitions.allows(Rendezvous::State::streaming, Rendezvous::Event::read),
                "a message that streams is not read as well");
}

// RFC 3720, B.4; and in two pieces as in one.
void test_checksum() {
  const auto* digits = reinterpret_cast<const std::byte*>("123456789");
  check(crc32c(0, digits, 9) == 0xe3069283, "the checksum is CRC32C");
  check(crc32c(crc32c(0, digits, 4), digits + 4, 5) == 0xe3069283, "a checksum goes on");
  const std::vector<std::byte> zeros(32), ones(32, std::byte{0xff});
  check(crc32c(0, zeros.data(), 32) == 0x8a9136aa && crc32c(0, ones.data(), 32) == 0x62a8ab43, "CRC32C of long words");
}

// A rank that computes or waits for a core is slow; one that is stopped is not.
void test_starved() {
  const pid_t busy = fork();
  if (busy == 0)
    for (;;) cpu_pause();
  for (int i = 0; i < 5000 && !is_starved(busy); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  check(is_starved(busy), "a busy process could run");
  kill(busy, SIGSTOP);
  int status;
  check(waitpid(busy, &status, WUNTRACED) == busy && WIFSTOPPED(status), "it was stopped");
  check(!is_starved(busy), "a stopped process could not run");
  kill(busy, SIGKILL);
  waitpid(busy, &status, 0);
  check(!is_starved(busy), "nor one that is gone");
}

// While signs of life may lie unread, silence does not count; but not for ever.
void test_behind() {
  const Settings settings = test_settings();
  FailureDetector detector;
  std::int64_t now = 7 * second;
  detector.start(settings, now);
  const std::int64_t beat = detector.beat_at() - now;
  const auto next = [&](std::int64_t passed, bool has_caught_up) {
    return detector.begin_beat(now += passed, has_caught_up);
  };
  check(next(beat, true) == beat, "the time since the last heartbeat counts");
  check(next(100 * beat, true) == beat + beat / 4, "but not time in which this rank was not scheduled");
  const std::int64_t most = starved_silences_max * settings.silence_ns;
  std::int64_t behind = 0;
  for (; behind + beat <= most; behind += beat)
    check(next(beat, false) == 0, "nothing counts for a rank that is behind");
  check(next(beat, false) == beat, "for a minute");
  check(next(beat, true) == beat && next(beat, false) == 0, "a rank that has caught up may be behind again");
}

}  // namespace unisono::engine
