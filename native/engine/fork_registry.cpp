#include "engine/fork_registry.hpp"

#include <pthread.h>

#include <mutex>
#include <vector>

#include "engine/engine.hpp"

namespace unisono::engine {
namespace {

std::mutex registry_lock;
std::vector<Engine*>& registry() {
  static std::vector<Engine*> engines;
  return engines;
}

void before_fork() {
  registry_lock.lock();
  for (Engine* engine : registry()) engine->before_fork();
}
void after_fork_in_parent() {
  for (Engine* engine : registry()) engine->after_fork_in_parent();
  registry_lock.unlock();
}
void after_fork_in_child() {
  for (Engine* engine : registry()) engine->after_fork_in_child();
  registry().clear();
  registry_lock.unlock();
}

}  // namespace

void register_engine(Engine& engine) {
  static const int once = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)once;
  const std::lock_guard guard(registry_lock);
  registry().push_back(&engine);
}

void unregister_engine(Engine& engine) {
  const std::lock_guard guard(registry_lock);
  std::erase(registry(), &engine);
}

}  // namespace unisono::engine
