// What the cases of engine_test share, and the cases by name.

#pragma once

#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "settings.hpp"

namespace unisono::engine {

// End the program with this text unless it is so.
void check(bool is_right, const char* what);

enum class Links { shm, tcp, quic };
void choose(Links links, Settings& settings);
std::vector<std::unique_ptr<Engine>> make_engines(int size, const char* folder, const Settings& settings);

// machines_test.cpp
void test_machines();
void test_checksum();
void test_starved();
void test_behind();
// copies_test.cpp
void test_ring(unsigned seed);
void test_parts(unsigned seed);
void test_copy_states(unsigned seed);
void test_help(const char* folder, unsigned seed);
// programs_test.cpp
void test_even_parts();
void test_slots_of_different_lengths();
void test_completion_queues(const char* folder, unsigned seed, Links links);
// messages_test.cpp
void test_wake_ups(const char* folder, unsigned seed, Links links);
void test_early_answer(bool is_held);
void test_offers(const char* folder, unsigned seed, Links links, bool direct_read);
void test_own_pieces(const char* folder);
// peers_test.cpp
void test_rumour(const char* folder, Links links);
void test_circle(const char* folder, unsigned seed, Links links);
void test_close_while_busy(const char* folder, unsigned seed, Links links);
void test_busy_heartbeats(const char* folder);
void test_mailboxes(const char* folder, unsigned seed, Links links);

}  // namespace unisono::engine
