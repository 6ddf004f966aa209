#include "connect/tcp_pairs.hpp"

#include <utility>

namespace unisono::engine {

class TcpPairs::HalfOpenLink final : public Watcher {
 public:
  HalfOpenLink(TcpPairs& pairs, std::int32_t rank, std::unique_ptr<ByteStream> control, bool is_opener)
      : is_opener(is_opener), pairs_(pairs), rank_(rank), control_(std::move(control)) {
    watch_ = pairs_.poller_.add(control_->fd(), EPOLLRDHUP, *this);
  }
  ~HalfOpenLink() override { unwatch(); }

  std::unique_ptr<ByteStream> take() {
    unwatch();
    return std::move(control_);
  }
  // The owner forgets the rank, which destroys this.
  void on_ready(uint32_t) override {
    pairs_.owner_.on_refused(rank_, "died: its connection was closed", Admission::unknown);
  }

  const bool is_opener;

 private:
  void unwatch() {
    if (watch_ != 0) pairs_.poller_.remove(control_->fd(), std::exchange(watch_, 0));
  }

  TcpPairs& pairs_;
  const std::int32_t rank_;
  std::unique_ptr<ByteStream> control_;
  uint64_t watch_ = 0;
};

TcpPairs::TcpPairs(ConnectionOwner& owner, Poller& poller, SocketPolicy& policy)
    : owner_(owner), poller_(poller), policy_(policy) {}

TcpPairs::~TcpPairs() = default;

void TcpPairs::forget(std::int32_t rank) { half_open_.erase(rank); }

void TcpPairs::clear() { half_open_.clear(); }

Admission TcpPairs::admit(std::int32_t rank, Lane lane, Admission said) const {
  if (said == Admission::leaving) return said;
  const auto half = half_open_.find(rank);
  if (half == half_open_.end()) return lane == Lane::control || said == Admission::known ? said : Admission::unknown;
  if (lane == Lane::control) return Admission::known;
  return half->second->is_opener ? Admission::unknown : Admission::welcome;
}

void TcpPairs::begin(std::int32_t rank, std::unique_ptr<ByteStream> control, bool is_opener) {
  half_open_[rank] = std::make_unique<HalfOpenLink>(*this, rank, std::move(control), is_opener);
}

void TcpPairs::complete(std::int32_t rank, std::unique_ptr<ByteStream> stream, bool checksum) {
  const auto half = half_open_.find(rank);
  if (half == half_open_.end()) return;
  std::unique_ptr<ByteStream> first = half->second->take();
  half_open_.erase(half);
  Peer* peer = owner_.on_admitted(rank);
  if (peer == nullptr) return;
  auto bulk = std::make_unique<Connection>(*peer, poller_, std::move(stream), Lane::bulk, checksum, policy_);
  auto control = std::make_unique<Connection>(*peer, poller_, std::move(first), Lane::control, checksum, policy_);
  if (!bulk->is_watched() || !control->is_watched())
    return owner_.on_refused(rank, failure("cannot watch its sockets"), Admission::unknown);
  owner_.on_link(*peer, std::make_unique<TcpLink>(*peer, std::move(bulk), std::move(control), policy_));
}

}  // namespace unisono::engine
