#include "messaging/matcher.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace unisono::engine {

bool UnexpectedMessage::hold(const Envelope& of, const byte* bytes, uint64_t count) {
  const size_t need = of.header_bytes + count;
  byte* to = inside;
  if (need > sizeof inside) {
    heap.reset(new (std::nothrow) byte[need]);
    if (heap == nullptr) return false;
    to = heap.get();
  }
  if (of.header_bytes != 0) std::memcpy(to, of.header, of.header_bytes);
  if (count != 0) std::memcpy(to + of.header_bytes, bytes, count);
  envelope = of;
  envelope.header = to;
  payload = to + of.header_bytes;
  return true;
}

std::vector<Receive*> Matcher::all_posted() const {
  std::vector<Receive*> all;
  for (Receive* r = wild_.front(); r != nullptr; r = Posted::next(*r)) all.push_back(r);
  for (const Bucket& b : buckets_)
    for (Receive* r = b.posted.front(); r != nullptr; r = Posted::next(*r)) all.push_back(r);
  std::sort(all.begin(), all.end(), [](const Receive* a, const Receive* b) { return a->number < b->number; });
  return all;
}

void Matcher::grow() {
  std::vector<Bucket> old(buckets_.size() * 4);
  old.swap(buckets_);
  // Emptying each old bucket front to back keeps the order within a key.
  for (Bucket& b : old) {
    while (Receive* r = b.posted.pop_front()) posted_like(*r).push_back(*r);
    while (UnexpectedMessage* a = b.arrived.pop_front()) bucket(a->envelope).arrived.push_back(*a);
  }
}

}  // namespace unisono::engine
