// What a connector hands on to the engine, and asks it.

#pragma once

#include <memory>
#include <string>

#include "connect/handshake.hpp"
#include "connect/pinger.hpp"
#include "link/byte_stream.hpp"
#include "link/shm_link.hpp"

namespace unisono::engine {

class QuicConnection;

// The result of a handshake: a stream, on one host a socket and the memory to share, or a QUIC connection.
struct NewConnection {
  std::int32_t rank;
  Medium medium;
  Lane lane;
  bool checksum;
  bool is_opener;
  std::unique_ptr<ByteStream> stream;
  Descriptor socket;
  Descriptor memory;
  Descriptor presence;
  Probe probe;
  QuicConnection* quic = nullptr;  // owned by its connector until there is a link
};

class ConnectionOwner : public PingOwner {
 public:
  // Whether a caller that has proven its rank gets a link.
  virtual Admission admit(std::int32_t rank, Medium medium, Lane lane) = 0;
  virtual void on_connection(NewConnection connection) = 0;
  // A connection to a rank failed. `admission` is `leaving` if that rank closes, else `unknown`.
  virtual void on_refused(std::int32_t rank, const std::string& cause, Admission admission) = 0;
};

}  // namespace unisono::engine
