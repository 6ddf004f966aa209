#include "link/tls.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <stdexcept>

namespace unisono::engine {
namespace {

constexpr size_t record_bytes_max = SSL3_RT_MAX_PLAIN_LENGTH;
constexpr int certificate_bytes_max = 4096;
// Fastest first on a CPU with AES instructions. All are as strong as the P-256 keys.
constexpr const char* ciphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384";

template <auto release>
struct Freer {
  template <class T>
  void operator()(T* it) const {
    release(it);
  }
};
template <class T, auto release>
using Owned = std::unique_ptr<T, Freer<release>>;
using OwnedBio = Owned<BIO, BIO_free_all>;
using OwnedX509 = Owned<X509, X509_free>;
using OwnedKey = Owned<EVP_PKEY, EVP_PKEY_free>;
using OwnedNames = Owned<GENERAL_NAMES, GENERAL_NAMES_free>;

std::string library_error() {
  const unsigned long code = ERR_peek_last_error();
  const char* reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  return reason != nullptr ? reason : "the TLS handshake broke off";
}

[[noreturn]] void fail(const char* what) {
  const std::string why = library_error();
  ERR_clear_error();
  throw std::runtime_error(std::string(what) + ": " + why);
}

// The ALPN protocol name: a length byte, then the text.
const std::string& protocol() {
  static const std::string name = [] {
    const std::string text = "unisono-link/" + std::to_string(protocol_version);
    std::string prefixed(1, static_cast<char>(text.size()));
    prefixed += text;
    return prefixed;
  }();
  return name;
}

int choose_protocol(SSL*, const unsigned char** out, unsigned char* out_bytes, const unsigned char* in,
                    unsigned in_bytes, void*) {
  const std::string& ours = protocol();
  unsigned char* chosen = nullptr;
  const int result = SSL_select_next_proto(&chosen, out_bytes, reinterpret_cast<const unsigned char*>(ours.data()),
                                           static_cast<unsigned>(ours.size()), in, in_bytes);
  *out = chosen;
  return result == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

OwnedBio memory_of(const std::string& text) {
  return OwnedBio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

int no_password(char*, int, int, void*) { return -1; }

OwnedX509 certificate_of(const std::string& pem, const char* what) {
  const OwnedBio from = memory_of(pem);
  OwnedX509 made(from ? PEM_read_bio_X509(from.get(), nullptr, no_password, nullptr) : nullptr);
  if (!made) fail(what);
  return made;
}

// The only subject name of a certificate, if it is a URI; else empty.
std::string name_in(X509* certificate) {
  const OwnedNames names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  if (!names || sk_GENERAL_NAME_num(names.get()) != 1) return "";
  const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), 0);
  if (name->type != GEN_URI) return "";
  const ASN1_IA5STRING* uri = name->d.uniformResourceIdentifier;
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                     static_cast<size_t>(ASN1_STRING_length(uri)));
}

// ---- a BIO over our socket: unlike OpenSSL's own it raises no SIGPIPE and counts what a stranger sends ----

TlsStream::BioSocket& socket_of(BIO* bio) { return *static_cast<TlsStream::BioSocket*>(BIO_get_data(bio)); }

int bio_read(BIO* bio, char* to, size_t bytes, size_t* read) {
  TlsStream::BioSocket& from = socket_of(bio);
  BIO_clear_retry_flags(bio);
  if (from.may_read == 0) {
    from.is_exceeded = true;
    return 0;
  }
  ssize_t n;
  do n = recv(from.socket.get(), to, bytes < from.may_read ? bytes : from.may_read, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n > 0) {
    *read = static_cast<size_t>(n);
    if (from.may_read != SIZE_MAX) from.may_read -= *read;
    return 1;
  }
  if (n < 0 && errno == EAGAIN)
    BIO_set_retry_read(bio);
  else
    from.is_over = true;
  return 0;
}

int bio_write(BIO* bio, const char* from, size_t bytes, size_t* written) {
  BIO_clear_retry_flags(bio);
  ssize_t n;
  do n = send(socket_of(bio).socket.get(), from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (n < 0 && errno == EINTR);
  if (n >= 0) {
    *written = static_cast<size_t>(n);
    return 1;
  }
  if (errno == EAGAIN) BIO_set_retry_write(bio);
  if (errno == EPIPE || errno == ECONNRESET) socket_of(bio).is_over = true;
  return 0;
}

long bio_control(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_FLUSH) return 1;
  return command == BIO_CTRL_EOF ? socket_of(bio).is_over : 0;
}

const BIO_METHOD* bio_method() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "unisono socket");
    if (made == nullptr) return made;
    BIO_meth_set_read_ex(made, bio_read);
    BIO_meth_set_write_ex(made, bio_write);
    BIO_meth_set_ctrl(made, bio_control);
    return made;
  }();
  return method;
}

}  // namespace

// ---- identity ----

TlsIdentity::TlsIdentity(const TlsMaterial& material, std::int32_t rank, uint64_t rekey_records,
                         uint64_t stranger_bytes_max)
    : ranks_(material.names), rekey_records_(rekey_records), stranger_bytes_max_(stranger_bytes_max) {
  // No clean-up at exit: the engine's thread may still run then.
  OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
  ERR_clear_error();
  context_.reset(SSL_CTX_new(TLS_method()));
  SSL_CTX* context = context_.get();
  if (context == nullptr) fail("OpenSSL has no TLS context");

  const OwnedX509 own = certificate_of(material.certificate, "the certificate cannot be read");
  const OwnedX509 authority = certificate_of(material.authority, "the authority's certificate cannot be read");
  const OwnedBio from = memory_of(material.key);
  const OwnedKey key(from ? PEM_read_bio_PrivateKey(from.get(), nullptr, no_password, nullptr) : nullptr);
  if (!key) fail("the key cannot be read");
  if (SSL_CTX_use_certificate(context, own.get()) != 1 || SSL_CTX_use_PrivateKey(context, key.get()) != 1 ||
      SSL_CTX_check_private_key(context) != 1)
    fail("the key is not the certificate's");
  if (rank_of(own.get()) != rank) throw std::runtime_error("the certificate is not this rank's");
  if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), authority.get()) != 1)
    fail("the authority's certificate is not accepted");

  const std::string& alpn = protocol();
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 || SSL_CTX_set_ciphersuites(context, ciphers) != 1 ||
      SSL_CTX_set1_groups_list(context, "X25519:P-256") != 1 || SSL_CTX_set_num_tickets(context, 0) != 1 ||
      SSL_CTX_set_max_early_data(context, 0) != 1 || SSL_CTX_set_recv_max_early_data(context, 0) != 1 ||
      SSL_CTX_set_alpn_protos(context, reinterpret_cast<const unsigned char*>(alpn.data()),
                              static_cast<unsigned>(alpn.size())) != 0)
    fail("OpenSSL does not offer TLS 1.3");
  SSL_CTX_set_alpn_select_cb(context, choose_protocol, nullptr);
  SSL_CTX_set_options(context, SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // Both sides must show a certificate signed by the authority itself, without intermediates.
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_verify_depth(context, 0);
  SSL_CTX_set_max_cert_list(context, certificate_bytes_max);
  // A write may end after a record, and is repeated from another address when it is retried.
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_read_ahead(context, 1);
}

std::int32_t TlsIdentity::rank_of(X509* certificate) const { return ranks_.rank_of(name_in(certificate)); }

std::unique_ptr<TlsStream> TlsIdentity::wrap(Descriptor socket, bool is_opener) const {
  ERR_clear_error();
  SSL* ssl = SSL_new(context_.get());
  BIO* bio = bio_method() != nullptr ? BIO_new(bio_method()) : nullptr;
  if (ssl == nullptr || bio == nullptr) {
    SSL_free(ssl);
    BIO_free(bio);
    return nullptr;
  }
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl, bio, bio);
  if (is_opener)
    SSL_set_connect_state(ssl);
  else
    SSL_set_accept_state(ssl);
  return std::make_unique<TlsStream>(*this, ssl, std::move(socket), rekey_records_, stranger_bytes_max_);
}

// ---- stream ----

TlsStream::TlsStream(const TlsIdentity& identity, SSL* owned, Descriptor socket, uint64_t rekey_records,
                     uint64_t stranger_bytes_max)
    : identity_(identity), ssl_(owned), socket_{std::move(socket), stranger_bytes_max}, rekey_records_(rekey_records) {
  BIO_set_data(SSL_get_rbio(ssl_), &socket_);
}

TlsStream::~TlsStream() { SSL_free(ssl_); }

TlsStream::Shake TlsStream::shake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_);
  if (result != 1) {
    switch (SSL_get_error(ssl_, result)) {
      case SSL_ERROR_WANT_READ: return Shake::wants_read;
      case SSL_ERROR_WANT_WRITE: return Shake::wants_write;
      default:
        is_broken_ = true;
        why_ = explain();
        ERR_clear_error();
        return socket_.is_over ? Shake::hung_up : Shake::failed;
    }
  }
  const unsigned char* chosen = nullptr;
  unsigned bytes = 0;
  SSL_get0_alpn_selected(ssl_, &chosen, &bytes);
  if (std::string(reinterpret_cast<const char*>(chosen), bytes) != protocol().substr(1)) {
    why_ = "it speaks another protocol inside TLS (ALPN)";
    return Shake::failed;
  }
  const OwnedX509 shown(SSL_get1_peer_certificate(ssl_));
  rank_ = shown ? identity_.rank_of(shown.get()) : -1;
  if (rank_ < 0) {
    why_ = "its certificate names no rank of this job";
    return Shake::failed;
  }
  return Shake::done;
}

std::string TlsStream::explain() const {
  if (socket_.is_exceeded) return "it sent more than a stranger may";
  if (socket_.is_over) return "it hung up during the TLS handshake";
  if (const long verified = SSL_get_verify_result(ssl_); verified != X509_V_OK)
    return std::string("its certificate is not from this job's seed: ") + X509_verify_cert_error_string(verified);
  return "no TLS with it: " + library_error();
}

void TlsStream::trust() { socket_.may_read = SIZE_MAX; }

ssize_t TlsStream::readv(const iovec* parts, int count) {
  size_t total = 0;
  for (int i = 0; i < count; ++i) {
    auto* to = static_cast<byte*>(parts[i].iov_base);
    for (size_t at = 0; at < parts[i].iov_len;) {
      size_t n = 0;
      ERR_clear_error();
      if (!is_broken_ && SSL_read_ex(ssl_, to + at, parts[i].iov_len - at, &n) == 1) {
        at += n;
        total += n;
        continue;
      }
      if (total != 0) return static_cast<ssize_t>(total);  // the next call reports the error
      const int error = is_broken_ ? SSL_ERROR_SSL : SSL_get_error(ssl_, 0);
      if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
        errno = EAGAIN;
        return -1;
      }
      is_broken_ |= error != SSL_ERROR_ZERO_RETURN;
      if (error == SSL_ERROR_ZERO_RETURN || socket_.is_over) return 0;
      if (fault_ == nullptr) fault_ = "TLS record damaged or forged in transit";
      ERR_clear_error();
      errno = EPROTO;
      return -1;
    }
  }
  return static_cast<ssize_t>(total);
}

// `bytes` of the parts from `skip` on in one piece: in place if they are contiguous, else copied.
const byte* TlsStream::gather(const iovec* parts, int count, size_t skip, size_t bytes) {
  size_t copied = 0;
  for (int i = 0; i < count && copied < bytes; ++i) {
    if (skip >= parts[i].iov_len) {
      skip -= parts[i].iov_len;
      continue;
    }
    const byte* from = static_cast<const byte*>(parts[i].iov_base) + skip;
    const size_t here = parts[i].iov_len - skip;
    skip = 0;
    if (copied == 0 && here >= bytes) return from;
    if (record_ == nullptr) record_.reset(new byte[record_bytes_max]);
    const size_t take = here < bytes - copied ? here : bytes - copied;
    std::memcpy(record_.get() + copied, from, take);
    copied += take;
  }
  return record_.get();
}

// One record at a time. A record that the socket does not take is encrypted already: the same bytes are given again,
// and count as written only when the record is gone.
ssize_t TlsStream::writev(const iovec* parts, int count) {
  size_t total = 0, done = 0;
  for (int i = 0; i < count; ++i) total += parts[i].iov_len;
  while (done < total) {
    const size_t left = total - done;
    const size_t bytes = pending_ != 0 ? pending_ : left < record_bytes_max ? left : record_bytes_max;
    size_t written = 0;
    ERR_clear_error();
    if (!is_broken_ && SSL_write_ex(ssl_, gather(parts, count, done, bytes), bytes, &written) == 1) {
      pending_ = 0;
      done += written;
      // A key is safe for 2^24 records; this side changes its own long before, whatever the other side does.
      if (++records_ % rekey_records_ == 0) SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED);
      continue;
    }
    const int error = is_broken_ ? SSL_ERROR_SSL : SSL_get_error(ssl_, 0);
    if (error == SSL_ERROR_WANT_WRITE || error == SSL_ERROR_WANT_READ) {
      pending_ = bytes;
      if (done != 0) break;
      errno = EAGAIN;
      return -1;
    }
    is_broken_ |= error == SSL_ERROR_SSL;
    if (done != 0) break;
    ERR_clear_error();
    errno = EPIPE;
    return -1;
  }
  return static_cast<ssize_t>(done);
}

void TlsStream::finish() {
  ERR_clear_error();
  if (pending_ == 0 && !is_broken_) SSL_shutdown(ssl_);
  ERR_clear_error();
  shutdown(socket_.socket.get(), SHUT_WR);
}

}  // namespace unisono::engine
