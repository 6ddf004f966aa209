#include "connect/local_world.hpp"

#include <algorithm>

namespace unisono::engine {

void LocalWorld::enter(std::int32_t rank, std::shared_ptr<const Descriptor> wake, const Presence& presence) {
  const std::lock_guard guard(mutex_);
  slots_[rank].wake = std::move(wake);
  slots_[rank].presence = &presence;
}

void LocalWorld::open(std::int32_t from, std::int32_t to) {
  const std::lock_guard guard(mutex_);
  // Both ranks may open the link at once.
  if (linked_.contains(std::minmax(from, to))) return;
  const Slot &here = slots_[from], &there = slots_[to];
  Arrival mine{to, true, nullptr, {}, nullptr, true}, other{from, false, nullptr, {}, nullptr, false};
  if (here.presence == nullptr || there.presence == nullptr) return add(from, std::move(mine));
  mine.memory = other.memory = std::make_shared<const Mapping>(Mapping::own(sizeof(LinkMemory)));
  if (!*mine.memory || !mine.presence.open(there.presence->fd()) || !other.presence.open(here.presence->fd()))
    return add(from, std::move(mine));
  auto flags = std::make_shared<LocalDoorbell::Flags>();
  mine.has_left = false;
  mine.doorbell = std::make_unique<LocalDoorbell>(flags, 0, there.wake);
  other.doorbell = std::make_unique<LocalDoorbell>(flags, 1, here.wake);
  linked_.insert(std::minmax(from, to));
  add(from, std::move(mine));
  add(to, std::move(other));
}

std::vector<LocalWorld::Arrival> LocalWorld::take(std::int32_t rank) {
  const std::lock_guard guard(mutex_);
  slots_[rank].has_arrivals.store(false, std::memory_order_relaxed);
  return std::exchange(slots_[rank].arrivals, {});
}

void LocalWorld::leave(std::int32_t rank) {
  const std::lock_guard guard(mutex_);
  if (std::exchange(slots_[rank].presence, nullptr) == nullptr) return;
  slots_[rank].arrivals.clear();
  slots_[rank].wake.reset();
  for (std::int32_t other = 0; other < size(); ++other)
    if (other != rank && slots_[other].presence != nullptr) add(other, {rank, true, nullptr, {}, nullptr, false});
}

void LocalWorld::add(std::int32_t to, Arrival arrival) {
  Slot& slot = slots_[to];
  slot.arrivals.push_back(std::move(arrival));
  slot.has_arrivals.store(true, std::memory_order_release);
  Poller::wake_by(*slot.wake);
}

}  // namespace unisono::engine
