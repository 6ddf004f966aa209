// In place of quic_connector.cpp in a build without ngtcp2.

#include "connect/quic_connector.hpp"

namespace unisono::engine {

std::unique_ptr<QuicConnector> QuicConnector::make(ConnectionOwner&, Poller&, Pinger&, const SocketPolicy&) {
  return nullptr;
}

bool QuicConnector::is_built() { return false; }

}  // namespace unisono::engine
