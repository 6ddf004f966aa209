// TLS 1.3 between ranks: who this rank is, and a stream on which both sides have proven who they are.
//
// Knows OpenSSL, certificates and how many bytes a stranger may send. Does not know who may be which rank: it gets
// one name per rank, and says whose name the other side's certificate holds.
//
// TLS 1.3 only; no rendezvous ids, resumption, early data, compression or renegotiation, so that every connection
// proves everything anew. The protocol's version is negotiated by ALPN.

#pragma once

#include <openssl/ssl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "link/byte_stream.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

class TlsStream;

// What a rank shows, and whom it trusts, as PEM; `names[r]` is the URI in rank r's certificate.
struct TlsMaterial {
  std::string key;
  std::string certificate;
  std::string authority;
  std::vector<std::string> names;
};

class TlsIdentity {
 public:
  // Throws std::runtime_error if the material does not fit together, or is not rank `rank`'s.
  TlsIdentity(const TlsMaterial& material, std::int32_t rank, uint64_t rekey_records);

  // nullptr if there is no memory.
  std::unique_ptr<TlsStream> wrap(Descriptor socket, bool is_opener) const;
  // Whose name a certificate holds; negative if it is nobody's in this world.
  std::int32_t rank_of(X509* certificate) const;

 private:
  struct Free {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  std::unique_ptr<SSL_CTX, Free> context_;
  std::unordered_map<std::string, std::int32_t> ranks_;
  uint64_t rekey_records_;
};

class TlsStream final : public ByteStream {
 public:
  enum class Shake : uint8_t { wants_read, wants_write, done, hung_up, failed };

  TlsStream(const TlsIdentity& identity, SSL* owned, Descriptor socket, uint64_t rekey_records);
  ~TlsStream() override;
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // Go on with the handshake. When it is done, `rank` says who the other side is.
  Shake shake();
  std::int32_t rank() const { return rank_; }
  // Why the handshake failed.
  const std::string& why() const { return why_; }
  // The other side is known: it may send as much as it likes.
  void trust();

  ssize_t readv(const iovec* parts, int count) override;
  ssize_t writev(const iovec* parts, int count) override;
  void finish() override;
  int fd() const override { return wire_.socket.get(); }
  const char* name() const override { return "tcp+tls"; }
  bool is_entangled() const override { return true; }
  const char* fault() const override { return fault_; }

  // What OpenSSL reads from and writes to.
  struct BioSocket {
    Descriptor socket;
    size_t may_read;
    bool is_over = false;  // the other side has hung up
    bool is_glut = false;  // it sent more than a stranger may
  };

 private:
  const byte* gather(const iovec* parts, int count, size_t skip, size_t bytes);
  std::string complaint() const;

  const TlsIdentity& identity_;
  SSL* ssl_;
  BioSocket wire_;
  std::int32_t rank_ = -1;
  std::string why_;
  const char* fault_ = nullptr;
  bool is_broken_ = false;
  size_t pending_ = 0;  // bytes of a record that the system did not take so far
  uint64_t records_ = 0;
  const uint64_t rekey_records_;
  std::unique_ptr<byte[]> record_;  // small parts become one record here
};

}  // namespace unisono::engine
