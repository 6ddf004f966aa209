// Rings, wake-ups, rendezvous and completion queues on threads, for the thread sanitizer: a ring with random frames,
// and engines whose threads spin, sleep, wake each other, cancel and leave at random. Exits with 0 if every byte
// arrived in order. The cases are in *_test.cpp beside this file.
//
// engine_test [one of the cases, such as mailboxes]

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine_cases.hpp"
#ifdef UNISONO_QUIC
#include "test_authority.hpp"
#endif

namespace unisono::engine {

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

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

}  // namespace unisono::engine

using namespace unisono::engine;

namespace {

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
  run("behind", test_behind);
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
