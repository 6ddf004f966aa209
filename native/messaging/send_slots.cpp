#include "messaging/send_slots.hpp"

namespace unisono::engine {

bool SendSlots::take(Send& send) {
  if (free_.empty()) {
    const size_t size = slots_.size();
    if (size == rendezvous_max) return false;
    const size_t more = size == 0 ? 64 : size;
    slots_.resize(size + more);
    // Low indices first: those have an offer word.
    for (size_t i = size + more; i > size; --i) free_.push_back(static_cast<uint32_t>(i - 1));
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[index];
  slot.send = &send;
  slot.is_taken = true;
  send.rendezvous_id = uint64_t{++slot.uses} << 32 | index;
  return true;
}

SendSlots::Slot* SendSlots::find(uint64_t rendezvous_id) {
  if (index_of(rendezvous_id) >= slots_.size()) return nullptr;
  Slot& found = slots_[index_of(rendezvous_id)];
  return found.is_taken && found.uses == rendezvous_id >> 32 ? &found : nullptr;
}

void SendSlots::free(uint64_t rendezvous_id) {
  Slot& freed = slots_[index_of(rendezvous_id)];
  freed.send = nullptr;
  freed.is_taken = false;
  free_.push_back(static_cast<uint32_t>(index_of(rendezvous_id)));
}

void SendSlots::clear() {
  slots_.clear();
  free_.clear();
}

}  // namespace unisono::engine
