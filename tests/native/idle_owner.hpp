// The owner of a QUIC endpoint that does nothing with what the endpoint reports.

#pragma once

#include "link/quic_endpoint.hpp"

namespace unisono::engine {

class IdleOwner final : public QuicEndpointOwner {
 public:
  void on_first(const SocketAddress&, const SocketAddress&, const byte*, size_t, std::int64_t) override {}
  void on_changed(QuicConnection&) override {}
  void on_unreachable(const SocketAddress&, int) override {}
};

}  // namespace unisono::engine
