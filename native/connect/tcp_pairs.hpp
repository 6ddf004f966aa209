// A TCP link has two connections, one per lane, made one after the other: the control lane's, then the bulk lane's.
// Until the second is there, the first one shows if the peer dies.

#pragma once

#include <memory>
#include <unordered_map>

#include "base/poller.hpp"
#include "connect/connection_owner.hpp"
#include "link/byte_stream.hpp"
#include "link/tcp_link.hpp"
#include "wire/admission.hpp"

namespace unisono::engine {

class TcpPairs {
 public:
  TcpPairs(ConnectionOwner& owner, Poller& poller, SocketPolicy& policy);
  ~TcpPairs();

  // Whether a caller may bring this lane, where `said` is what the owner answers to a new link with that rank.
  Admission admit(std::int32_t rank, Lane lane, Admission said) const;
  // The control lane of a link. An opener goes on to make the other one.
  void begin(std::int32_t rank, std::unique_ptr<ByteStream> control, bool is_opener);
  // The bulk lane: hand the link to the owner.
  void complete(std::int32_t rank, std::unique_ptr<ByteStream> bulk, bool checksum);
  void forget(std::int32_t rank);
  void clear();

 private:
  class HalfOpenLink;

  ConnectionOwner& owner_;
  Poller& poller_;
  SocketPolicy& policy_;
  std::unordered_map<std::int32_t, std::unique_ptr<HalfOpenLink>> half_open_;
};

}  // namespace unisono::engine
