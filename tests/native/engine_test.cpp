// Rings, wake-ups, rendezvous and completion queues on threads, for the thread sanitizer: a ring with random frames,
// and engines whose threads spin, sleep, wake each other, cancel and leave at random. Exits with 0 if every byte
// arrived in order.
//
// engine_test [one of the tests, such as mailboxes]

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/digest.hpp"
#include "engine/engine.hpp"
#include "engine/pingpong.hpp"
#include "engine_harness.hpp"
#include "link/ring.hpp"
#include "mailbox_harness.hpp"
#include "settings.hpp"
#ifdef UNISONO_QUIC
#include "test_authority.hpp"
#endif

using namespace unisono::engine;

namespace {

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

enum class Links { shm, tcp, quic };

void choose(Links links, Settings& settings) {
  settings.shm = links == Links::shm;
  settings.quic = links == Links::quic;
}

std::vector<std::unique_ptr<Engine>> make_engines(int size, const char* folder, const Settings& settings) {
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<Card> cards;
  for (int rank = 0; rank < size; ++rank) {
    engines.push_back(std::make_unique<Engine>(rank, size, folder, "secret", settings));
    cards.push_back(engines.back()->card());
  }
#ifdef UNISONO_QUIC
  const TestAuthority authority(size);
#endif
  for (auto& engine : engines) {
    const Hold held = engine->hold();
#ifdef UNISONO_QUIC
    if (settings.quic) engine->secure(authority.material(engine->rank));
#endif
    engine->connect(cards);
  }
  return engines;
}

// Frames of random length through one ring; each holds its number in every word.
void test_ring(unsigned seed) {
  constexpr size_t capacity = 4096;
  constexpr uint32_t count = 20'000;
  auto words = std::make_unique<RingWords>();
  words->head = 0;
  words->wants_room = 0;
  std::vector<std::byte> memory(capacity + line_bytes);
  void* start = memory.data();
  size_t room = memory.size();
  auto* data = static_cast<std::byte*>(std::align(line_bytes, capacity, start, room));
  std::memset(data, 0, capacity);

  std::thread producer([&] {
    std::mt19937 random(seed);
    Producer out(words.get(), data, capacity);
    for (uint32_t number = 1; number <= count; ++number) {
      const size_t bytes = line_bytes * (1 + random() % (out.frame_bytes_max() / line_bytes));
      std::byte* at;
      while ((at = out.reserve(bytes)) == nullptr) {
        check(!out.is_broken(), "the ring is sound");
        std::this_thread::yield();
      }
      for (size_t i = 4; i < bytes; i += 4) std::memcpy(at + i, &number, 4);
      out.publish(bytes, Head::make_word(Kind::eager, 0, bytes / line_bytes));
    }
  });
  Consumer in(words.get(), data, capacity);
  for (uint32_t number = 1; number <= count;) {
    Head head;
    const std::byte* body = nullptr;
    const Consumer::Look look = in.look(head, body);
    check(look != Consumer::Look::broken, "no frame is broken");
    if (look == Consumer::Look::nothing) {
      std::this_thread::yield();
      continue;
    }
    for (size_t i = 0; i < in.body_bytes(); i += 4) {
      uint32_t word;
      std::memcpy(&word, body + i, 4);
      check(word == number, "frames arrive whole and in order");
    }
    in.release();
    ++number;
  }
  producer.join();
}

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

void test_machines() {
  check_machine<Reading, ReadEvent>(read_transitions, {Reading::ready}, "the reading half of a connection is whole");
  check_machine<Writing, WriteEvent>(write_transitions, {Writing::open}, "the writing half of a connection is whole");
  static_assert(!read_transitions.allows(Reading::ended, ReadEvent::end_of_stream), "a stream ends once");
  static_assert(!write_transitions.allows(Writing::closed, WriteEvent::full), "nothing is written after the end");

  check_machine<HandshakeState, HandshakeEvent>(handshake_transitions, {HandshakeState::due, HandshakeState::accepted},
                                                "the handshake is whole on both sides");
  static_assert(!handshake_transitions.allows(HandshakeState::await_hello, HandshakeEvent::welcome),
                "nobody is admitted without a proof");
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

// Two engines and two threads each: messages of all kinds with pauses long enough for the engines to fall asleep.
void test_wake_ups(const char* folder, unsigned seed, Links links) {
  Settings settings = test_settings();
  choose(links, settings);
  auto engines = make_engines(2, folder, settings);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    for (uint64_t tag = 0; tag < 2; ++tag)
      threads.emplace_back([&, rank, tag] {
        Engine& engine = *engines[rank];
        std::mt19937 lengths(seed + tag), pauses(seed * 7 + rank * 2 + tag);
        for (int turn = 0; turn < 150; ++turn) {
          const size_t nbytes = turn % 5 == 0 ? 20'000 + lengths() % 300'000 : lengths() % 2000;
          const auto mark = static_cast<std::byte>(turn + rank), theirs = static_cast<std::byte>(turn + 1 - rank);
          std::vector<std::byte> out(nbytes + 1, mark), in(nbytes + 1, std::byte{0});
          PingSend send(engine);
          PingReceive receive(engine, in.data(), nbytes);
          send.context = receive.context = 9;
          send.tag = receive.tag = tag;
          send.data = out.data();
          send.nbytes = nbytes;
          receive.source = 1 - rank;
          if (pauses() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(pauses() % 6));
          Hold held = engine.hold();
          check(engine.start(receive), "the engine is open");
          engine.start(send, 1 - rank);
          const bool is_done =
              engine.wait(held, [&] { return receive.is_done && send.is_done; }, now_ns() + 60 * second);
          check(is_done && receive.outcome == Outcome::done, "every message arrives");
          held.unlock();
          check(std::all_of(in.begin(), in.end() - 1, [&](byte b) { return b == theirs; }), "every byte arrives");
        }
      });
  for (auto& thread : threads) thread.join();
  for (auto& engine : engines) engine->close(second);
}

// Others say that a rank has left, while a greeting with it is under way: what it sends on the link that the greeting
// makes still arrives.
void test_rumour(const char* folder, Links links) {
  Settings settings = test_settings();
  choose(links, settings);
  auto engines = make_engines(2, folder, settings);
  Engine &one = *engines[0], &two = *engines[1];
  std::byte word{7}, got{0};
  PingSend hello(two), answer(one);
  PingReceive receive(two, &got, 1);
  hello.context = answer.context = receive.context = 3;
  hello.data = answer.data = &word;
  hello.nbytes = answer.nbytes = 1;
  receive.source = 0;
  Hold held = two.hold();
  check(two.start(receive) && two.start(hello, 0), "the engine is open");
  check(two.peer(0).state == Peer::State::opening, "a greeting begins");
  two.on_rank_down(0, "left", true);
  check(two.peer(0).state == Peer::State::opening, "a rumour does not end a greeting");
  held.unlock();
  {
    const Hold first = one.hold();
    one.start(answer, 1);
  }
  held.lock();
  check(two.wait(held, [&] { return receive.is_done && hello.is_done; }, now_ns() + 60 * second), "both arrive");
  check(receive.outcome == Outcome::done && got == word, "what a rank sent before it left arrives");
  held.unlock();
  for (auto& engine : engines) engine->close(second);
}

// A link that takes every byte and holds data while `is_full`.
class SinkLink final : public Link {
 public:
  explicit SinkLink(uint64_t& rendezvous_id) : rendezvous_id_(rendezvous_id) {}
  bool put(Lane, Head head, const Body& body) override {
    if (head.kind() == Kind::rts) rendezvous_id_ = body.prefix[0];
    return true;
  }
  size_t put_data(Lane, uint64_t, uint64_t, const std::byte*, uint64_t left) override { return left; }
  bool holds_data(Lane, uint64_t) const override { return is_full; }
  bool poll() override { return false; }
  size_t eager_bytes_max(Lane) const override { return 0; }
  bool was_heard() override { return true; }
  void beat() override {}
  const char* name() const override { return "sink"; }
  bool is_full = true;

 private:
  uint64_t& rendezvous_id_;
};

class NoServices final : public PeerServices {
 public:
  NoServices() { settings = test_settings(); }
  void open_link(Peer&) override {}
  void start_reading(RendezvousReceive&) override {}
  void stop_reading(RendezvousReceive&) override {}
  void on_rank_down(uint64_t, std::string, bool) override {}
};

class LongSend final : public Send {
 public:
  void end(Outcome how) override { check(++ends == 1 && how == Outcome::done, "it ends once and well"); }
  int ends = 0;
};

// The last bytes of a long message leave, and the answer comes before the next look at what was sent, or before the
// link has let go of the memory: then the send ends with that. An answer before the last bytes have left is a fault.
void test_early_answer(bool is_held) {
  NoServices services;
  Peer peer(services, 1, false);
  uint64_t rendezvous_id = 0;
  auto made = std::make_unique<SinkLink>(rendezvous_id);
  SinkLink& link = *made;
  peer.on_open(std::move(made));
  LongSend send;
  const std::vector<std::byte> data(1 << 20);
  send.data = data.data();
  send.nbytes = data.size();
  peer.send(send);
  Head head;
  head.context = rendezvous_id;
  head.word = Head::make_word(Kind::cts);
  check(peer.on_frame(head, nullptr, Lane::control) == nullptr, "an offer may be accepted");
  head.word = Head::make_word(Kind::fin);
  check(peer.on_frame(head, nullptr, Lane::control) != nullptr, "an answer follows the last byte");
  peer.flush();
  check(send.ends == 0 && peer.has_backlog(), "bytes are on their way");
  link.is_full = is_held;
  check(peer.on_frame(head, nullptr, Lane::control) == nullptr, "an answer may come at once");
  check(send.ends == (is_held ? 0 : 1) && peer.has_backlog() == is_held, "it has ended if its memory is free");
  check(peer.on_frame(head, nullptr, Lane::control) != nullptr, "there is one answer");
  link.is_full = false;
  if (is_held) peer.flush();
  check(send.ends == 1 && !peer.awaits_answer(), "it has ended, and its id is free");
}

// ---- completion queues ----

uint32_t value_of(int rank, uint64_t context, int turn, size_t i) {
  return static_cast<uint32_t>(i * 31 + static_cast<size_t>(rank) * 1009 + context * 7 + static_cast<size_t>(turn));
}

void add(byte* dst, const byte* a, const byte* b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t one, other;
    std::memcpy(&one, a + 4 * i, 4);
    std::memcpy(&other, b + 4 * i, 4);
    one += other;
    std::memcpy(dst + 4 * i, &one, 4);
  }
}

// Everybody sends to everybody and adds what comes, in two halves.
std::shared_ptr<const Program> sum_of_all(int rank, int size) {
  enum : std::int64_t { send, recv, recv_reduce, copy };
  // Atoms: 1, the count, and its halves; points: 0, the count, the first half, both halves.
  const std::vector<Program::CutRow> cuts{{0, 0, 1}, {1, 0, 1}, {3, 1, 2}};
  const std::vector<Program::PointRow> points{{0, 1, 1}, {0, 2, 1}, {2, 3, 1}};
  std::vector<Program::StepRow> rows;
  std::vector<Program::EdgeRow> edges;
  for (const auto& [start, stop] : {std::pair<std::int64_t, std::int64_t>{0, 2}, {2, 3}}) {
    auto latest = static_cast<std::int64_t>(rows.size());
    rows.push_back({copy, 0, 1, start, stop, 0, start, stop, 0});
    for (int step = 1; step < size; ++step)
      rows.push_back({send, (rank + step) % size, 0, start, stop, 0, start, stop, 0});
    for (int step = 1; step < size; ++step) {
      rows.push_back({recv_reduce, (rank + size - step) % size, 1, start, stop, 0, 0, 0, 0});
      edges.push_back({latest, static_cast<std::int64_t>(rows.size() - 1), 0, 0});
      latest = static_cast<std::int64_t>(rows.size() - 1);
    }
  }
  return std::make_shared<Program>(cuts, points, rows, edges, std::array<std::int64_t, 2>{1, 1}, 1, size);
}

// Even parts are those of whole * i / parts, for every remainder.
void test_even_parts() {
  for (std::int64_t parts = 1; parts <= 7; ++parts) {
    std::vector<Program::PointRow> points{{0, 1, 1}};
    for (std::int64_t i = 0; i < parts; ++i) points.push_back({i == 0 ? 0 : i + 1, 2 + i, 1});
    const Program program({{0, 0, 1}, {1, 0, 1}, {3, 1, parts}}, points, {}, {}, {1, parts + 1}, 1, 1);
    for (uint64_t count = 0; count < 60; ++count) {
      std::vector<uint64_t> atoms, at;
      program.evaluate({&count, 1, false}, atoms, at);
      for (std::int64_t i = 0; i <= parts; ++i)
        check(at[i == 0 ? 0 : static_cast<size_t>(i) + 1] ==
                  count * static_cast<uint64_t>(i) / static_cast<uint64_t>(parts),
              "an even part");
    }
  }
}

// Blocks a, b and c of different lengths use one slot in turn, and each is sent on. Block c must wait for what is still
// sent of a, beyond the end of b.
void test_slots_of_different_lengths() {
  enum : std::int64_t { send, recv };
  const std::vector<Program::CutRow> cuts{{0, 0, 1}, {1, 0, 1}, {1, 1, 1}, {1, 2, 1}, {2, 0, 1}};
  const std::vector<Program::PointRow> points{{0, 1, 1}, {0, 2, 1}, {0, 3, 1}, {0, 4, 1}};
  std::vector<Program::StepRow> rows;
  for (const std::int64_t block : {1, 2, 3}) {
    rows.push_back({recv, 1, 2, 0, block, 2, 0, block, 0});
    rows.push_back({send, 2, 2, 0, block, 2, 0, block, 0});
  }
  const std::vector<Program::EdgeRow> edges{{0, 1, 0, 0}, {1, 2, 0, 0}, {2, 3, 0, 0},
                                            {1, 4, 0, 0}, {3, 4, 0, 0}, {4, 5, 0, 0}};
  const Program program(cuts, points, rows, edges, {0, 0}, 3, 3);
  BoundProgram bound;
  const auto bind = [&](const std::vector<uint64_t>& counts, uint64_t piece) {
    check(program.accepts({counts.data(), counts.size(), false}), "three counts");
    bound.bind(program, {counts.data(), counts.size(), false}, piece);
  };
  bind({10, 3, 9}, 4);
  check(bound.counts[static_cast<size_t>(Buffer::tmp)] == 10, "the slot is as long as the longest block");
  // Pieces: a 3 + 3, b 1 + 1, c 3 + 3.
  check(bound.pieces.size() == 14 && bound.first_piece(4) == 8 && bound.piece_number(4) == 3, "the pieces of c");
  check(bound.pieces[10].dst == 8 && bound.pieces[10].count == 1, "the last piece of c is short");
  const std::vector<uint32_t> waits{0, 0, 0, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1};
  check(bound.waits == waits, "every piece waits for those before it in its place");
  std::vector<uint32_t> after;
  bound.for_each_after(program, 5, [&](uint32_t later) { after.push_back(later); });
  check(after == std::vector<uint32_t>{10}, "the end of c waits for the end of a");

  bind({10, 0, 9}, 100);
  check(bound.has_empty && bound.pieces.size() == 6 && bound.waits == program.waits, "uncut, a piece is a step");
  check(bound.moves(program.lines[0].recvs) && !bound.moves(program.lines[0].sends), "one line receives only");
  bind({0, 0, 0}, 100);
  check(!bound.moves(program.lines[0].recvs) && !bound.moves(program.lines[1].sends), "nothing is moved");

  bind({10, 3, 9}, 4);
  // Two vectors change places.
  std::vector<const Piece*> places;
  for (int turn = 0; turn < 8; ++turn) {
    bind({9, 10, 3}, 4);
    if (turn >= 2 && turn < 4) places.push_back(bound.pieces.data());
  }
  check(std::find(places.begin(), places.end(), bound.pieces.data()) != places.end(), "memory is used again");
  const uint64_t one = 7;
  bound.bind(program, {&one, 1, true}, 100);
  check(bound.pieces[5].count == 7, "one count stands for all");
  const uint64_t too_long[] = {1, 1, uint64_t{1} << 60};
  check(!program.accepts({too_long, 3, false}) && !program.accepts({too_long, 2, false}), "counts that do not fit");
}

// Several engines with a completions and a pump each, and two threads that start runs and messages of unknown length:
// who waits tells, also what the other waits for.
void test_completion_queues(const char* folder, unsigned seed, Links links) {
  constexpr int size = 4, turns = 40;
  Settings settings = test_settings();
  choose(links, settings);
  settings.direct_read = seed % 2 == 0;
  auto engines = make_engines(size, folder, settings);
  {
    std::vector<std::unique_ptr<EngineHarness>> harnesses;
    for (auto& engine : engines) harnesses.push_back(std::make_unique<EngineHarness>(*engine));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      for (uint64_t context = 1; context <= 2; ++context)
        threads.emplace_back([&, rank, context] {
          EngineHarness& harness = *harnesses[rank];
          std::mt19937 lengths(seed * 31 + static_cast<unsigned>(context)), pauses(seed + static_cast<unsigned>(rank));
          for (int turn = 0; turn < turns; ++turn) {
            const size_t count = turn % 4 == 0 ? 5'000 + lengths() % 40'000 : 2 + lengths() % 500;
            std::vector<uint32_t> in(count), out(count);
            for (size_t i = 0; i < count; ++i) in[i] = value_of(rank, context, turn, i);
            Stage stage;
            stage.context = context;
            stage.tag = static_cast<uint64_t>(turn);
            stage.in = reinterpret_cast<byte*>(in.data());
            stage.out = reinterpret_cast<byte*>(out.data());
            stage.dtype = 0;
            stage.itemsize = 4;
            stage.kernel = add;
            stage.window = 2;
            const uint64_t counts[] = {count};
            stage.counts = counts;
            stage.counts_n = 1;
            stage.piece_elements = turn % 3 == 0 ? 700 : 100'000;
            const int right = (rank + 1) % size, left = (rank + size - 1) % size;
            const std::vector<byte> message(count, static_cast<byte>(rank + turn));
            // Messages beside the run, on a context of their own: sent before it and received after it has begun.
            const auto sent = harness.send(message, right, context + 10, 0, turn % 3 == 0);
            const auto ran =
                harness.run(sum_of_all(rank, size), stage, Fingerprint().with(count, static_cast<uint32_t>(turn)));
            if (pauses() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(pauses() % 4));
            const auto received = harness.receive(nullptr, left, context + 10, 0);
            const std::int64_t deadline = now_ns() + 60 * second;
            check(harness.wait(ran, deadline) && harness.wait(sent, deadline) && harness.wait(received, deadline),
                  "all ends");
            const Hold held = engines[rank]->hold();
            check(ran->outcome == Outcome::done && sent->outcome == Outcome::done && received->outcome == Outcome::done,
                  "all ends well");
            for (size_t i = 0; i < count; ++i) {
              uint32_t sum = 0;
              for (int r = 0; r < size; ++r) sum += value_of(r, context, turn, i);
              check(out[i] == sum, "every run gives the sum");
            }
            check(received->bytes == std::vector<byte>(count, static_cast<byte>(left + turn)), "every message arrives");
          }
        });
    for (auto& thread : threads) thread.join();
    for (auto& engine : engines) engine->close(second);
  }
}

// One side takes offers back at random, the other its receives: exactly what was not taken back arrives, in order.
void test_offers(const char* folder, unsigned seed, Links links, bool direct_read) {
  Settings settings = test_settings();
  choose(links, settings);
  settings.direct_read = direct_read;
  auto engines = make_engines(2, folder, settings);
  {
    EngineHarness sender(*engines[0]), receiver(*engines[1]);
    constexpr size_t count = 300;
    std::vector<uint32_t> kept, came;
    std::thread out([&] {
      std::mt19937 random(seed);
      for (uint32_t number = 0; number <= count; ++number) {
        std::vector<byte> data(number % 3 == 0 ? 100 : 20'000 + random() % 100'000, static_cast<byte>(number));
        std::memcpy(data.data(), &number, sizeof number);
        const auto operation = sender.send(data, 1, 5, 0, true);
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        const bool is_last = number == count;
        if (!is_last && random() % 2 == 0) sender.cancel(*operation);
        check(sender.wait(operation, now_ns() + 60 * second), "every send ends");
        const Hold held = engines[0]->hold();
        check(operation->outcome == Outcome::done || operation->outcome == Outcome::cancelled, "well, or taken back");
        if (operation->outcome == Outcome::done) kept.push_back(number);
      }
    });
    std::thread in([&] {
      std::mt19937 random(seed + 1);
      std::vector<byte> memory(200'000);
      for (;;) {
        const auto operation = receiver.receive(random() % 2 == 0 ? &memory : nullptr, 0, 5, 0);
        if (random() % 4 == 0) {
          receiver.wait(operation, now_ns() + static_cast<std::int64_t>(random() % 300) * 1000);
          receiver.cancel(*operation);
        }
        check(receiver.wait(operation, now_ns() + 60 * second), "every receive ends");
        const Hold held = engines[1]->hold();
        if (operation->outcome == Outcome::cancelled) continue;
        check(operation->outcome == Outcome::done, "well, or taken back");
        const byte* data = operation->bytes.empty() ? memory.data() : operation->bytes.data();
        uint32_t number;
        std::memcpy(&number, data, sizeof number);
        for (size_t i = sizeof number; i < operation->nbytes; ++i) check(data[i] == static_cast<byte>(number), "whole");
        came.push_back(number);
        if (number == count) return;
      }
    });
    out.join();
    in.join();
    check(kept == came, "what was not taken back arrives, in order");
    for (auto& engine : engines) engine->close(second);
  }
}

// Both sides of a message take parts at random: every byte is taken once, also what one of them could not write.
void test_parts(unsigned seed) {
  std::mt19937 random(seed);
  for (const uint64_t nbytes : {uint64_t{128} * 1024, uint64_t{200'001}, uint64_t{1} << 20, uint64_t{9'999'999}}) {
    constexpr uint64_t most = 1 << 20;
    CooperativeCopy copy;
    copy.reset();
    Part part;
    uint64_t guard = 0;
    check(copy.claim_back(nbytes, most, part, guard) == 0, "the sender claims nothing unasked");
    copy.ask(reinterpret_cast<const byte*>(uint64_t{4096}), 77);
    std::vector<bool> seen(nbytes);
    const auto note = [&](const Part& p) {
      check(p.bytes != 0 && p.bytes <= most && p.offset + p.bytes <= nbytes, "inside the message");
      for (uint64_t i = p.offset; i < p.offset + p.bytes; ++i) {
        check(!seen[i], "taken once");
        seen[i] = true;
      }
    };
    const bool fails = nbytes % 2 != 0;
    bool has_failed = false;
    CooperativeCopy::Front front;
    do {
      const bool is_sender = random() % 2 == 0 && !has_failed && copy.claim_back(nbytes, most, part, guard) != 0;
      if (is_sender) check(guard == 77 && copy.is_being_written(), "the writer is known");
      has_failed = has_failed || (is_sender && fails && random() % 2 == 0);
      if (is_sender && !has_failed) note(part);
      if (is_sender) copy.report(part, !has_failed);
      check(!copy.is_being_written(), "and when it has ended");
      if ((front = copy.claim_front(nbytes, most, part)) == CooperativeCopy::Front::part) note(part);
    } while (front == CooperativeCopy::Front::part);
    check(front == CooperativeCopy::Front::complete, "all is taken and written");
    check(std::find(seen.begin(), seen.end(), false) == seen.end(), "every byte");
  }
  CooperativeCopy copy;
  copy.reset();
  copy.ask(reinterpret_cast<const byte*>(uint64_t{4096}), 77);
  Part part;
  uint64_t guard;
  check(copy.claim_back(1 << 20, 1 << 20, part, guard) != 0 && !copy.close(), "it has been helped");
  check(copy.claim_back(1 << 20, 1 << 20, part, guard) == 0, "and is so no more");
  // Whatever the other side writes, no part reaches beyond the message.
  for (int i = 0; i < 10'000; ++i) {
    auto words = std::array<uint64_t, sizeof(CooperativeCopy) / 8>();
    for (auto& word : words) word = (uint64_t{random()} << 32 | random()) >> random() % 64;
    std::memcpy(static_cast<void*>(&copy), words.data(), sizeof words);
    const uint64_t nbytes = 1 + random() % 10'000'000;
    if (copy.claim_front(nbytes, 1 << 20, part) == CooperativeCopy::Front::part)
      check(part.offset < nbytes && part.bytes <= nbytes - part.offset, "inside the message");
    if (copy.claim_back(nbytes, 1 << 20, part, guard) != 0)
      check(part.offset < nbytes && part.bytes <= nbytes - part.offset, "inside the message");
  }
}

// Every step of a copy follows the table, whichever side makes it and wherever the receiver drops the sender.
void test_copy_states(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<bool> seen(decltype(copy_transitions)::state_count);
  for (int turn = 0; turn < 2000; ++turn) {
    const uint64_t nbytes = 128 * 1024 + random() % 2'000'000;
    CooperativeCopy copy;
    copy.reset();
    check(copy.state(nbytes) == CopyState::unasked, "a copy begins unasked");
    const auto step = [&](std::initializer_list<CopyEvent> events, auto change) {
      const CopyState before = copy.state(nbytes);
      seen[static_cast<size_t>(before)] = true;
      change();
      const CopyState after = copy.state(nbytes);
      check(std::any_of(events.begin(), events.end(),
                        [&](CopyEvent event) {
                          return copy_transitions.allows(before, event) &&
                                 copy_transitions.next(before, event) == after;
                        }),
            "a copy follows its table");
    };
    step({CopyEvent::ask}, [&] { copy.ask(reinterpret_cast<const byte*>(uint64_t{4096}), 77); });
    const bool fails = random() % 3 == 0, closes = random() % 3 == 0;
    const auto is_one_of = [&](auto... states) { return ((copy.state(nbytes) == states) || ...); };
    static constexpr auto claims = {CopyEvent::claim, CopyEvent::exhaust, CopyEvent::exhaust_failed, CopyEvent::finish};
    Part part, written;
    uint64_t guard;
    bool is_writing = false, has_failed = false;
    while (!is_one_of(CopyState::complete, CopyState::fenced)) {
      if (closes && random() % 8 == 0 && !is_one_of(CopyState::draining))
        step({CopyEvent::close, CopyEvent::fence}, [&] { copy.close(); });
      else if (is_writing && (random() % 2 == 0 || !is_one_of(CopyState::shared)))
        step({CopyEvent::report, CopyEvent::finish, CopyEvent::fail}, [&] {
          has_failed = fails && random() % 2 == 0;
          copy.report(written, !has_failed);
          is_writing = false;
        });
      else if (is_one_of(CopyState::shared) && !is_writing && !has_failed && random() % 2 == 0)
        step(claims, [&] { is_writing = copy.claim_back(nbytes, 1 << 20, written, guard) != 0; });
      else if (is_one_of(CopyState::shared))
        step(claims, [&] { check(copy.claim_front(nbytes, 1 << 20, part) == CooperativeCopy::Front::part, "a part"); });
      else if (is_one_of(CopyState::failed))
        step({CopyEvent::recover}, [&] {
          check(copy.claim_front(nbytes, 1 << 20, part) == CooperativeCopy::Front::part, "the sender's part");
        });
    }
    check(!is_writing, "no buffer is returned while it is written");
    step({CopyEvent::reset}, [&] { copy.reset(); });
  }
  seen[static_cast<size_t>(CopyState::complete)] = true;  // a run ends in one of these two
  check(std::find(seen.begin(), seen.end(), false) == seen.end(), "every state occurs");
}

// Long messages one after the other, whose sender waits and so helps: every byte arrives.
void test_help(const char* folder, unsigned seed) {
  auto engines = make_engines(2, folder, test_settings());
  {
    EngineHarness sender(*engines[0]), receiver(*engines[1]);
    constexpr size_t count = 60, bytes_max = 3'000'000;
    const auto drawn = [](std::mt19937& random) { return 100'000 + random() % (bytes_max - 100'000); };
    const auto byte_of = [](size_t number, size_t i) { return static_cast<byte>((i * 2654435761 + number * 97) >> 7); };
    std::thread out([&] {
      std::mt19937 random(seed), pause(seed + 1);
      for (size_t number = 0; number < count; ++number) {
        std::vector<byte> data(drawn(random));
        for (size_t i = 0; i < data.size(); ++i) data[i] = byte_of(number, i);
        if (pause() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pause() % 500));
        check(sender.wait(sender.send(data, 1, 5, 0), now_ns() + 60 * second), "every send ends");
      }
    });
    std::thread in([&] {
      std::mt19937 random(seed), pause(seed + 2);
      std::vector<byte> memory(bytes_max + 1);
      for (size_t number = 0; number < count; ++number) {
        std::fill(memory.begin(), memory.end(), byte{0});
        if (pause() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pause() % 500));
        const auto operation = receiver.receive(&memory, 0, 5, 0);
        check(receiver.wait(operation, now_ns() + 60 * second), "every receive ends");
        const Hold held = engines[1]->hold();
        check(operation->outcome == Outcome::done && operation->nbytes == drawn(random), "well");
        for (size_t i = 0; i < operation->nbytes; ++i) check(memory[i] == byte_of(number, i), "every byte arrives");
        check(memory[operation->nbytes] == byte{0}, "and none beyond");
      }
    });
    out.join();
    in.join();
    for (auto& engine : engines) engine->close(second);
  }
}

// Engines close one after the other, while threads of theirs and of the others wait for messages: every wait ends.
void test_close_while_busy(const char* folder, unsigned seed, Links links) {
  constexpr int size = 5;
  Settings settings = test_settings();
  choose(links, settings);
  auto engines = make_engines(size, folder, settings);
  {
    std::vector<std::unique_ptr<EngineHarness>> harnesses;
    for (auto& engine : engines) harnesses.push_back(std::make_unique<EngineHarness>(*engine));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      for (uint64_t context = 1; context <= 2; ++context)
        threads.emplace_back([&, rank, context] {
          EngineHarness& harness = *harnesses[rank];
          std::mt19937 random(seed * 100 + static_cast<unsigned>(rank) * 10 + static_cast<unsigned>(context));
          for (bool is_open = true; is_open;) {
            const int peer = static_cast<int>((static_cast<unsigned>(rank) + 1 + random() % (size - 1)) % size);
            const std::vector<byte> data(random() % 4 == 0 ? 50'000 : 100);
            const auto sent = harness.send(data, peer, context, 0);
            const auto received = harness.receive(nullptr, peer, context, 0);
            for (const auto& operation : {received, sent}) {
              // It may never be met: then it is taken back, or ends with the other side or with ours.
              if (!harness.wait(operation, now_ns() + millisecond)) harness.cancel(*operation);
              check(harness.wait(operation, now_ns() + 60 * second), "every wait ends");
              const Hold held = harness.engine.hold();
              is_open &= operation->outcome != Outcome::closed;
            }
          }
        });
    std::mt19937 random(seed);
    std::vector<int> order(size);
    for (int rank = 0; rank < size; ++rank) order[rank] = rank;
    std::shuffle(order.begin(), order.end(), random);
    for (const int rank : order) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 + random() % 30));
      engines[rank]->close(random() % 2 == 0 ? 0 : 20 * millisecond);
    }
    for (auto& thread : threads) thread.join();
  }
}

// Mailboxes: one thread of each asks in front and two serve in the background, while others interrupt_wait and waver;
// long payloads travel beside the messages. At the end the mailboxes close while threads still read.
void test_mailboxes(const char* folder, unsigned seed, Links links) {
  constexpr int size = 3;
  Settings settings = test_settings();
  choose(links, settings);
  auto engines = make_engines(size, folder, settings);
  std::vector<std::unique_ptr<MailboxHarness>> mailboxes;
  for (auto& engine : engines) mailboxes.push_back(std::make_unique<MailboxHarness>(*engine, 2));
  std::vector<std::thread> threads;
  std::atomic<int> askers{size};
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(seed * 10 + static_cast<unsigned>(rank));
      for (int turn = 0; turn < 150; ++turn) {
        const auto dst = static_cast<int>(random() % size);  // itself, too
        const size_t nbytes = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 1 + random() % 2000 : 20'000 + random() % 300'000;
        const std::vector<byte> out(nbytes, static_cast<byte>(turn + rank));
        std::vector<byte> back;
        check(mailboxes[rank]->ask(dst, out, back, now_ns() + 60 * second), "every question is answered");
        check(back == out, "every byte comes back");
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 6));
      }
      --askers;
    });
    threads.emplace_back([&, rank] {
      std::mt19937 random(seed * 10 + 5 + static_cast<unsigned>(rank));
      while (askers != 0) {
        mailboxes[rank]->interrupt_wait(random() % 2 == 0);
        mailboxes[rank]->expect_and_withdraw(static_cast<int>(random() % size));
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& mailbox : mailboxes) mailbox->close();
  for (auto& engine : engines) engine->close(second);
}

// Many engines in a circle: each waits for its left, then rings its right; the waiting engine is asleep by then.
void test_circle(const char* folder, unsigned seed, Links links) {
  constexpr int size = 7, rounds = 30;
  Settings settings = test_settings();
  choose(links, settings);
  auto engines = make_engines(size, folder, settings);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      Engine& engine = *engines[rank];
      std::mt19937 pauses(seed + static_cast<unsigned>(rank));
      std::byte token{0};
      for (int round = 0; round < rounds; ++round) {
        PingReceive receive(engine, &token, 1);
        receive.context = 4;
        receive.source = (rank + size - 1) % size;
        const auto pass_on = [&](Hold& held) {
          const auto told = static_cast<std::byte>(round);
          PingSend send(engine);
          send.context = 4;
          send.data = &told;
          send.nbytes = 1;
          check(engine.start(send, (rank + 1) % size), "the engine is open");
          check(engine.wait(held, [&] { return send.is_done; }, now_ns() + 60 * second), "it is passed on");
        };
        Hold held = engine.hold();
        if (rank == 0) pass_on(held);
        check(engine.start(receive), "the engine is open");
        check(engine.wait(held, [&] { return receive.is_done; }, now_ns() + 60 * second), "it comes round");
        check(receive.outcome == Outcome::done && token == static_cast<std::byte>(round), "it is this round's");
        if (rank != 0) pass_on(held);
        held.unlock();
        if (pauses() % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(pauses() % 5));
      }
    });
  for (auto& thread : threads) thread.join();
  for (auto& engine : engines) engine->close(second);
}

// Always has more to do.
class Endless final : public DeferredWork {
 public:
  explicit Endless(Engine& engine) : engine_(engine) {}
  void work() override { engine_.add(*this); }
  void drop() override {}

 private:
  Engine& engine_;
};

// A background thread that always finds something to do still sends heartbeats, by a link that it shares with nobody on
// its host: there a busy rank would not be taken for dead.
void test_busy_heartbeats(const char* folder) {
  Settings settings = test_settings();
  settings.silence_ns = 2 * second;  // a loaded machine may leave a thread without a core for a second
  settings.neighbours = true;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<Card> cards;
  for (int rank = 0; rank < 2; ++rank) {
    settings.host = "host " + std::to_string(rank);
    engines.push_back(std::make_unique<Engine>(rank, 2, folder, "secret", settings));
    cards.push_back(engines.back()->card());
  }
  Endless endless(*engines[1]);
  for (auto& engine : engines) {
    const Hold held = engine->hold();
    engine->connect(cards);
    if (engine == engines[1]) engine->add(endless);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5000));
  for (auto& engine : engines) {
    const Hold held = engine->hold();
    check(engine->peer(1 - engine->rank).state == Peer::State::open, "heartbeats came");
  }
  for (auto& engine : engines) engine->close(0);
}

// However long a message to oneself is, a turn of the engine copies a few MiB of it: heartbeats have theirs in between.
void test_own_pieces(const char* folder) {
  enum class Order { receive_first, kept, half_kept, sync, taken_back };
  constexpr size_t nbytes = (64 << 20) + 3;
  constexpr int turns_min = nbytes >> 22;
  std::vector<byte> data(nbytes);
  for (size_t i = 0; i < nbytes; ++i) data[i] = static_cast<byte>(i * 7 + (i >> 20));
  auto engines = make_engines(1, folder, test_settings());
  Engine& engine = *engines[0];
  for (const Order order :
       {Order::receive_first, Order::kept, Order::half_kept, Order::sync, Order::taken_back, Order::kept}) {
    std::vector<byte> into(nbytes);
    PingSend send(engine);
    PingReceive receive(engine, into.data(), nbytes);
    send.context = receive.context = 5;
    send.data = data.data();
    send.nbytes = nbytes;
    send.sync = order == Order::sync;
    receive.source = 0;
    const Hold held = engine.hold();
    const auto turns_until = [&](const bool& is_done) {
      int turns = 0;
      for (; !is_done && turns < 1000; ++turns) engine.progress();
      return turns;
    };
    if (order == Order::receive_first) engine.start(receive);
    engine.start(send, 0);
    if (order == Order::kept) {
      check(turns_until(send.is_done) >= turns_min, "it is kept in pieces");
      check(send.outcome == Outcome::done, "and its send ends without a receive");
    }
    if (order == Order::half_kept || order == Order::taken_back)
      for (int i = 0; i < turns_min / 2; ++i) engine.progress();
    if (order == Order::taken_back) {
      check(engine.cancel(send) && send.outcome == Outcome::cancelled, "half of it is taken back");
      check(!engine.progress(), "and nothing is left to do");
      continue;
    }
    if (order != Order::receive_first) engine.start(receive);
    check(turns_until(receive.is_done) >= turns_min, "it comes in pieces");
    check(send.is_done && receive.outcome == Outcome::done && into == data, "and is whole");
  }
  // What is left when the engine closes ends.
  std::vector<byte> into(nbytes);
  PingSend sends[2] = {PingSend(engine), PingSend(engine)};
  PingReceive receive(engine, into.data(), nbytes);
  {
    const Hold held = engine.hold();
    for (PingSend& send : sends) {
      send.context = 5;
      send.data = data.data();
      send.nbytes = nbytes;
      engine.start(send, 0);
    }
    receive.context = 5;
    receive.source = 0;
    engine.start(receive);
  }
  engine.close(0);
  check(sends[0].is_done && sends[1].is_done && receive.is_done, "all end");
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

// The case that the command line names, or none: all of them are run.
std::string wanted;
int cases_run = 0;

// Say what is done: under a sanitizer it takes minutes.
template <class Test>
void run(const char* what, Test test) {
  if (!wanted.empty() && wanted != what) return;
  const std::int64_t start = now_ns();
  test();
  ++cases_run;
  std::printf("%s: %.1f s\n", what, static_cast<double>(now_ns() - start) / 1e9);
  std::fflush(stdout);
}

}  // namespace

#ifdef UNISONO_QUIC
constexpr Links all_links[] = {Links::shm, Links::tcp, Links::quic};
#else
constexpr Links all_links[] = {Links::shm, Links::tcp};
#endif

int main(int count, char** words) {
  if (count > 1) wanted = words[1];
  char folder[] = "/tmp/unisono-test-XXXXXX";
  check(mkdtemp(folder) != nullptr, "there is a folder");
  run("machines", test_machines);
  run("checksum", test_checksum);
  run("starved", test_starved);
  run("even parts", test_even_parts);
  run("slots of different lengths", test_slots_of_different_lengths);
  run("busy heartbeats", [&] { test_busy_heartbeats(folder); });
  run("own pieces", [&] { test_own_pieces(folder); });
  for (const bool is_held : {false, true}) run("early answer", [&] { test_early_answer(is_held); });
  for (unsigned seed = 1; seed <= 3; ++seed) {
    run("ring", [&] { test_ring(seed); });
    run("parts", [&] { test_parts(seed); });
    run("copy states", [&] { test_copy_states(seed); });
    run("help", [&] { test_help(folder, seed); });
    run("offers read in rings", [&] { test_offers(folder, seed, Links::shm, false); });
    for (const Links links : all_links) {
      const char* names[] = {"shared memory", "tcp", "quic"};
      std::printf("seed %u, %s\n", seed, names[static_cast<size_t>(links)]);
      run("rumour", [&] { test_rumour(folder, links); });
      run("wake-ups", [&] { test_wake_ups(folder, seed, links); });
      run("circle", [&] { test_circle(folder, seed, links); });
      run("mailboxes", [&] { test_mailboxes(folder, seed, links); });
      run("completion queues", [&] { test_completion_queues(folder, seed, links); });
      run("offers", [&] { test_offers(folder, seed, links, true); });
      run("close while busy", [&] { test_close_while_busy(folder, seed, links); });
    }
  }
  check(rmdir(folder) == 0, "nothing is left in the folder");
  check(cases_run > 0, "the command line names a case");
  std::puts("ok");
}
