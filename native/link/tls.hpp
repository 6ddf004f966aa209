// TLS 1.3 between ranks: this rank's identity, and a stream whose two ends have authenticated each other.
//
// TLS 1.3 only, without session tickets, resumption, early data, compression or renegotiation, so that every connection
// authenticates anew. ALPN negotiates the protocol's version.

#pragma once

#include <openssl/ssl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "link/byte_stream.hpp"
#include "link/tls_material.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

class TlsStream;

class TlsIdentity {
 public:
  // Throws std::runtime_error if the parts of the material do not belong together or to this rank.
  TlsIdentity(const TlsMaterial& material, std::int32_t rank, uint64_t rekey_records, uint64_t stranger_bytes_max);

  // nullptr without memory.
  std::unique_ptr<TlsStream> wrap(Descriptor socket, bool is_opener) const;
  // The rank whose name a certificate holds; negative if it is none of this world.
  std::int32_t rank_of(X509* certificate) const;

 private:
  struct Free {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  std::unique_ptr<SSL_CTX, Free> context_;
  RankNames ranks_;
  uint64_t rekey_records_;
  uint64_t stranger_bytes_max_;
};

class TlsStream final : public ByteStream {
 public:
  enum class Shake : uint8_t { wants_read, wants_write, done, hung_up, failed };

  TlsStream(const TlsIdentity& identity, SSL* owned, Descriptor socket, uint64_t rekey_records,
            uint64_t stranger_bytes_max);
  ~TlsStream() override;
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // Continue the TLS handshake. When it is done, `rank` is the other side's.
  Shake shake();
  std::int32_t rank() const { return rank_; }
  // Why the handshake failed.
  const std::string& why() const { return why_; }
  // The other side is admitted: lift the limit on its bytes.
  void trust();

  ssize_t readv(const iovec* parts, int count) override;
  ssize_t writev(const iovec* parts, int count) override;
  void finish() override;
  int fd() const override { return socket_.socket.get(); }
  const char* name() const override { return "tcp+tls"; }
  bool is_entangled() const override { return true; }
  const char* fault() const override { return fault_; }

  // The socket as OpenSSL sees it.
  struct BioSocket {
    Descriptor socket;
    size_t may_read;
    bool is_over = false;      // the other side has hung up
    bool is_exceeded = false;  // it sent more than a stranger may
  };

 private:
  const byte* gather(const iovec* parts, int count, size_t skip, size_t bytes);
  std::string explain() const;

  const TlsIdentity& identity_;
  SSL* ssl_;
  BioSocket socket_;
  std::int32_t rank_ = -1;
  std::string why_;
  const char* fault_ = nullptr;
  bool is_broken_ = false;
  size_t pending_ = 0;  // bytes of an encrypted record that the socket has not taken yet
  uint64_t records_ = 0;
  const uint64_t rekey_records_;
  std::unique_ptr<byte[]> record_;  // gathers small parts into one record
};

}  // namespace unisono::engine
