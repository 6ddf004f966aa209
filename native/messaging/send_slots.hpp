// The rendezvous ids of a sender: a slot for each message that was announced and has no FIN yet.

#pragma once

#include <cstdint>
#include <vector>

#include "messaging/message.hpp"

namespace unisono::engine {

// A rendezvous id names a message on both sides of a link: the index of its slot, and above 32 bits the number of times
// that the slot was used.
inline size_t index_of(uint64_t rendezvous_id) { return rendezvous_id & 0xffffffff; }
inline constexpr size_t rendezvous_max = 65536;  // credit.RTS_MAX

class SendSlots {
 public:
  struct Slot {
    Send* send = nullptr;  // nullptr: it has ended, and the FIN has not come
    uint32_t uses = 0;
    bool is_taken = false;
  };

  // Give a send a rendezvous id. False if all are in use.
  bool take(Send& send);
  // nullptr if this id is not in use.
  Slot* find(uint64_t rendezvous_id);
  void free(uint64_t rendezvous_id);
  bool is_empty() const { return free_.size() == slots_.size(); }
  void clear();

  std::vector<Slot>::iterator begin() { return slots_.begin(); }
  std::vector<Slot>::iterator end() { return slots_.end(); }
  std::vector<Slot>::const_iterator begin() const { return slots_.begin(); }
  std::vector<Slot>::const_iterator end() const { return slots_.end(); }

 private:
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
};

}  // namespace unisono::engine
