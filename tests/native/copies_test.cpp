// A ring, and the cooperative copy of a long message.

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine_cases.hpp"
#include "engine_harness.hpp"
#include "link/cooperative_copy.hpp"
#include "link/ring.hpp"

namespace unisono::engine {

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

}  // namespace unisono::engine
