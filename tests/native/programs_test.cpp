// Programs that are bound and run, and the dispatch of their completions.

#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "collective/bound_program.hpp"
#include "engine_cases.hpp"
#include "engine_harness.hpp"

namespace unisono::engine {
namespace {

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

}  // namespace

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
// the thread that waits dispatches, also what the other waits for.
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

}  // namespace unisono::engine
