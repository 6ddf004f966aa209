// Rings and wake-ups on threads, for the thread sanitizer: a ring with random frames, and engines whose threads
// spin, sleep and ring at random. Exits with 0 if every byte arrived in order.

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../native/engine/digest.hpp"
#include "../../native/engine/engine.hpp"
#include "../../native/engine/pingpong.hpp"
#include "../../native/engine/ring.hpp"

using namespace unisono::engine;

namespace {

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

std::vector<std::unique_ptr<Engine>> make_engines(int size, const char* folder, const Settings& settings) {
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<Card> cards;
  for (int rank = 0; rank < size; ++rank) {
    engines.push_back(std::make_unique<Engine>(rank, size, folder, "secret", settings));
    cards.push_back(engines.back()->card());
  }
  for (auto& engine : engines) {
    const Hold held = engine->hold();
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

// RFC 3720, B.4; and in two pieces as in one.
void test_checksum() {
  const auto* digits = reinterpret_cast<const std::byte*>("123456789");
  check(crc32c(0, digits, 9) == 0xe3069283, "the checksum is CRC32C");
  check(crc32c(crc32c(0, digits, 4), digits + 4, 5) == 0xe3069283, "a checksum goes on");
  const std::vector<std::byte> zeros(32), ones(32, std::byte{0xff});
  check(crc32c(0, zeros.data(), 32) == 0x8a9136aa && crc32c(0, ones.data(), 32) == 0x62a8ab43, "CRC32C of long words");
}

// Two engines and two threads each: messages of all kinds with pauses long enough for the engines to fall asleep.
void test_wake_ups(const char* folder, unsigned seed, bool shm) {
  Settings settings;
  settings.shm = shm;
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
          for (size_t i = 0; i < nbytes; ++i) check(in[i] == theirs, "every byte arrives");
        }
      });
  for (auto& thread : threads) thread.join();
  for (auto& engine : engines) engine->close(second);
}

// Others say that a rank has left, while a greeting with it is under way: what it sends on the link that the greeting
// makes still arrives.
void test_rumour(const char* folder, bool shm) {
  Settings settings;
  settings.shm = shm;
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
  two.on_news(0, "left", true);
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

// Who computes or waits for a core is slow; who is stopped is not.
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

}  // namespace

int main() {
  char folder[] = "/tmp/unisono-test-XXXXXX";
  check(mkdtemp(folder) != nullptr, "there is a folder");
  test_checksum();
  test_starved();
  for (const bool shm : {true, false}) test_rumour(folder, shm);
  for (unsigned seed = 1; seed <= 3; ++seed) {
    test_ring(seed);
    test_wake_ups(folder, seed, true);
    test_wake_ups(folder, seed, false);
  }
  check(rmdir(folder) == 0, "nothing is left in the folder");
  std::puts("ok");
}
