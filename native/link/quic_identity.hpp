// This rank's identity for QUIC: TLS 1.3 by GnuTLS, with the certificates that the join gave, shown and checked by both
// sides. Without tickets or early data, so that every connection authenticates anew. ALPN negotiates the protocol's
// version.

#pragma once

#include <gnutls/gnutls.h>

#include <memory>
#include <string>

#include "link/tls_material.hpp"

namespace unisono::engine {

class QuicIdentity {
 public:
  struct EndSession {
    void operator()(gnutls_session_t session) const { gnutls_deinit(session); }
  };
  using Session = std::unique_ptr<gnutls_session_int, EndSession>;

  // Throws std::runtime_error if the parts of the material do not belong together or to this rank.
  QuicIdentity(const TlsMaterial& material, std::int32_t rank);

  // nullptr without memory.
  Session session(bool is_opener) const;
  // The rank that the other side's certificate names; negative if it is none of this world.
  std::int32_t rank_of(gnutls_session_t session) const;
  // Why a handshake failed, in words: what was wrong with the other side's certificate, if it was that.
  static std::string verify_error(gnutls_session_t session);

 private:
  struct FreeCredentials {
    void operator()(gnutls_certificate_credentials_t held) const { gnutls_certificate_free_credentials(held); }
  };
  struct FreePriority {
    void operator()(gnutls_priority_t held) const { gnutls_priority_deinit(held); }
  };

  std::int32_t rank_in(const gnutls_datum_t& certificate, gnutls_x509_crt_fmt_t format) const;

  RankNames ranks_;
  std::unique_ptr<std::remove_pointer_t<gnutls_certificate_credentials_t>, FreeCredentials> credentials_;
  std::unique_ptr<std::remove_pointer_t<gnutls_priority_t>, FreePriority> priority_;
};

}  // namespace unisono::engine
