// Matching of posted receives and unexpected messages by (context, source, tag), in order: the native twin of
// unisono/messaging/matching.py. It allocates only when the table grows.

#pragma once

#include <vector>

#include "messaging/message.hpp"

namespace unisono::engine {

class Matcher {
 public:
  Matcher() : buckets_(64) {}

  // The first receive that matches a message; it stays posted.
  Receive* find_posted(const Envelope& envelope) const {
    Receive* exact = buckets_[index(envelope.context, envelope.source, envelope.tag)].posted.front();
    while (exact != nullptr && !exact->matches(envelope)) exact = Posted::next(*exact);
    if (wild_.empty()) [[likely]]
      return exact;
    Receive* wild = wild_.front();
    while (wild != nullptr && !wild->matches(envelope)) wild = Posted::next(*wild);
    if (wild == nullptr || (exact != nullptr && exact->number < wild->number)) return exact;
    return wild;
  }

  // The first message that matches a receive; it stays queued.
  UnexpectedMessage* find_arrived(const Receive& receive) const {
    if (order_.empty()) [[likely]]
      return nullptr;
    if (!receive.is_wild()) {
      UnexpectedMessage* a = buckets_[index(receive.context, receive.source, receive.tag)].arrived.front();
      while (a != nullptr && !receive.matches(a->envelope)) a = InBucket::next(*a);
      return a;
    }
    UnexpectedMessage* a = order_.front();
    while (a != nullptr && !receive.matches(a->envelope)) a = InOrder::next(*a);
    return a;
  }

  void post(Receive& receive) {
    receive.number = ++numbers_;
    posted_like(receive).push_back(receive);
    ++posted_;
    grow_if_full();
  }
  // Post it again in its old position.
  void repost(Receive& receive) {
    Posted& line = posted_like(receive);
    Receive* later = line.front();
    while (later != nullptr && later->number < receive.number) later = Posted::next(*later);
    if (later != nullptr)
      line.insert_before(*later, receive);
    else
      line.push_back(receive);
    ++posted_;
  }
  void withdraw(Receive& receive) {
    posted_like(receive).remove(receive);
    --posted_;
  }
  void queue(UnexpectedMessage& message) {
    message.number = message.envelope.arrival = ++numbers_;
    bucket(message.envelope).arrived.push_back(message);
    order_.push_back(message);
    grow_if_full();
  }
  void take(UnexpectedMessage& message) {
    bucket(message.envelope).arrived.remove(message);
    order_.remove(message);
  }

  uint64_t newest() const { return numbers_; }
  bool is_empty() const { return posted_ == 0 && order_.empty(); }
  UnexpectedMessage* first_arrived() const { return order_.front(); }
  static UnexpectedMessage* next_arrived(const UnexpectedMessage& a) { return InOrder::next(a); }
  // Every posted receive, in the order of posting.
  std::vector<Receive*> all_posted() const;

 private:
  using Posted = IntrusiveList<Receive, &Receive::hook>;
  using InBucket = IntrusiveList<UnexpectedMessage, &UnexpectedMessage::in_bucket>;
  using InOrder = IntrusiveList<UnexpectedMessage, &UnexpectedMessage::in_order>;
  struct Bucket {
    Posted posted;
    InBucket arrived;
  };

  size_t index(uint64_t context, std::int32_t source, uint64_t tag) const {
    uint64_t x = context * 0x9e3779b97f4a7c15u ^ (tag + static_cast<uint32_t>(source) * 0x100000001b3u);
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return (x ^ x >> 32) & (buckets_.size() - 1);
  }
  Bucket& bucket(const Envelope& e) { return buckets_[index(e.context, e.source, e.tag)]; }
  Posted& posted_like(const Receive& r) {
    return r.is_wild() ? wild_ : buckets_[index(r.context, r.source, r.tag)].posted;
  }
  void grow_if_full() {
    if (posted_ + order_.size() > 4 * buckets_.size()) [[unlikely]]
      grow();
  }
  void grow();

  std::vector<Bucket> buckets_;
  Posted wild_;
  InOrder order_;
  size_t posted_ = 0;
  uint64_t numbers_ = 0;
};

}  // namespace unisono::engine
