// Peers that leave, are busy or pass a message round, and mailboxes.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/pingpong.hpp"
#include "engine_cases.hpp"
#include "engine_harness.hpp"
#include "mailbox_harness.hpp"

namespace unisono::engine {
namespace {

// Always has more to do.
class Endless final : public DeferredWork {
 public:
  explicit Endless(Engine& engine) : engine_(engine) {}
  void work() override { engine_.add(*this); }
  void drop() override {}

 private:
  Engine& engine_;
};

}  // namespace

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

// A background thread that always finds something to do still sends heartbeats, by a link to another
// host: on the same host a busy rank would not be taken for dead.
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

}  // namespace unisono::engine
