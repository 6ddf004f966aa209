// The address of a socket of any family, and what it says in words.

#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "base/types.hpp"

namespace unisono::engine {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  bool operator==(const SocketAddress& other) const {
    return bytes == other.bytes && std::memcmp(&storage, &other.storage, bytes) == 0;
  }

  // Numeric hosts only; 0 bytes if it is none.
  static SocketAddress of(const std::string& host, uint16_t port) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    SocketAddress made;
    if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0 || found == nullptr) return made;
    made.bytes = found->ai_addrlen;
    std::memcpy(&made.storage, found->ai_addr, made.bytes);
    freeaddrinfo(found);
    return made;
  }

  std::string host() const {
    char text[NI_MAXHOST];
    if (bytes == 0 || getnameinfo(get(), bytes, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "?";
    return text;
  }
  uint16_t port() const {
    return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                                               : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  }
  // Take the address, not the port, of one of the same family.
  void set_host(const SocketAddress& other) {
    if (storage.ss_family != other.storage.ss_family) return;
    if (storage.ss_family == AF_INET6)
      reinterpret_cast<sockaddr_in6&>(storage).sin6_addr =
          reinterpret_cast<const sockaddr_in6&>(other.storage).sin6_addr;
    else
      reinterpret_cast<sockaddr_in&>(storage).sin_addr = reinterpret_cast<const sockaddr_in&>(other.storage).sin_addr;
  }
  // Callers that count as one: those of an IPv4 address, or of the /64 network of an IPv6 one, which a single host
  // owns.
  std::string group() const { return network(8); }
  // Whether both are addresses of the same interface, so that nothing between them passes a network.
  bool has_host_of(const SocketAddress& other) const { return bytes != 0 && network(16) == other.network(16); }

 private:
  std::string network(size_t v6_bytes) const {
    if (storage.ss_family == AF_INET6)
      return std::string(reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr),
                         v6_bytes);
    if (storage.ss_family == AF_INET)
      return std::string(reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in&>(storage).sin_addr), 4);
    return "";
  }
};

}  // namespace unisono::engine
