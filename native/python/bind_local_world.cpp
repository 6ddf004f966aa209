// The world of ranks in one process, and what Python asks its engines in order to see deadlocks.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "connect/local_world.hpp"
#include "engine/completion_queue.hpp"
#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

// bind_engine.cpp
engine::CompletionQueue& completions_of(nb::handle engine);

namespace {

using namespace engine;

// The living threads that use a rank, each with whether it belongs to it, and whether one that did has ended.
std::pair<std::vector<std::pair<uint64_t, bool>>, bool> users_of(nb::handle of) {
  Engine& engine = completions_of(of).engine();
  std::vector<std::pair<uint64_t, bool>> living;
  if (engine.is_forked()) return {living, false};
  const Hold held = engine.hold();
  Users* users = engine.users();
  if (users == nullptr) throw nb::value_error("allowed: the engine of a local world");
  for (const Users::User& user : users->living()) living.emplace_back(user.thread->id, user.belongs);
  return {living, users->has_lost_users()};
}

// Make what progress is possible. Whether nothing moved, and no completion waits to be dispatched.
bool is_quiet(nb::handle of) {
  CompletionQueue& completions = completions_of(of);
  const GilReleased release;
  const Hold held = completions.engine().hold();
  return completions.engine().is_closed() || (!completions.engine().progress() && completions.is_quiet());
}

uint64_t moves(nb::handle of) {
  Engine& engine = completions_of(of).engine();
  const Hold held = engine.hold();
  return engine.moves();
}

bool has_pending(nb::handle of, uint64_t tag_bit_ignored) {
  Engine& engine = completions_of(of).engine();
  const Hold held = engine.hold();
  return engine.has_pending(tag_bit_ignored);
}

}  // namespace

void bind_local_world(nb::module_& m) {
  nb::class_<LocalWorld>(m, "LocalWorld")
      .def(
          "__init__",
          [](LocalWorld* self, std::int32_t size) {
            if (size < 1) throw nb::value_error("size: allowed: at least 1");
            new (self) LocalWorld(size);
          },
          nb::arg("size"))
      .def_static("users", &users_of)
      .def_static("is_quiet", &is_quiet)
      .def_static("moves", &moves)
      .def_static("has_pending", &has_pending);
}

}  // namespace unisono
