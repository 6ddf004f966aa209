// Messages between engines: wake-ups, offers that are withdrawn, messages to oneself, and a FIN that is early.

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/pingpong.hpp"
#include "engine_cases.hpp"
#include "engine_harness.hpp"

namespace unisono::engine {
namespace {

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

}  // namespace

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

}  // namespace unisono::engine
