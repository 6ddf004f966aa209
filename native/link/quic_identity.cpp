#include "link/quic_identity.hpp"

#include <gnutls/x509.h>

#include "wire/frame.hpp"

namespace unisono::engine {
namespace {

// Fastest first on a CPU with AES instructions. All are as strong as the P-256 keys.
constexpr const char* priorities =
    "%DISABLE_TLS13_COMPAT_MODE:NORMAL:-VERS-ALL:+VERS-TLS1.3:-CIPHER-ALL:+AES-128-GCM:+CHACHA20-POLY1305:+AES-256-GCM:"
    "-GROUP-ALL:+GROUP-X25519:+GROUP-SECP256R1";
constexpr size_t handshake_message_bytes_max = 4096;

[[noreturn]] void fail(const char* what, int error) {
  throw std::runtime_error(std::string(what) + ": " + gnutls_strerror(error));
}

gnutls_datum_t datum(const std::string& text) {
  return {reinterpret_cast<unsigned char*>(const_cast<char*>(text.data())), static_cast<unsigned>(text.size())};
}

const std::string& protocol() {
  static const std::string name = "unisono-quic/" + std::to_string(protocol_version);
  return name;
}

struct FreeCertificate {
  void operator()(gnutls_x509_crt_t held) const { gnutls_x509_crt_deinit(held); }
};
using OwnedCertificate = std::unique_ptr<gnutls_x509_crt_int, FreeCertificate>;

}  // namespace

QuicIdentity::QuicIdentity(const TlsMaterial& material, std::int32_t rank) : ranks_(material.names) {
  gnutls_certificate_credentials_t made = nullptr;
  if (const int error = gnutls_certificate_allocate_credentials(&made); error != 0) fail("no memory", error);
  credentials_.reset(made);
  const gnutls_datum_t key = datum(material.key), own = datum(material.certificate), trust = datum(material.authority);
  if (const int n = gnutls_certificate_set_x509_trust_mem(made, &trust, GNUTLS_X509_FMT_PEM); n != 1)
    fail("the authority's certificate cannot be read", n < 0 ? n : GNUTLS_E_CERTIFICATE_ERROR);
  // It checks that the key is the certificate's.
  if (const int error = gnutls_certificate_set_x509_key_mem(made, &own, &key, GNUTLS_X509_FMT_PEM); error < 0)
    fail("the key is not the certificate's", error);
  if (rank_in(own, GNUTLS_X509_FMT_PEM) != rank) throw std::runtime_error("the certificate is not this rank's");
  gnutls_priority_t priority = nullptr;
  if (const int error = gnutls_priority_init(&priority, priorities, nullptr); error != 0)
    fail("GnuTLS does not offer TLS 1.3", error);
  priority_.reset(priority);
}

QuicIdentity::Session QuicIdentity::session(bool is_opener) const {
  gnutls_session_t made = nullptr;
  const unsigned side = is_opener ? GNUTLS_CLIENT : GNUTLS_SERVER | GNUTLS_NO_AUTO_SEND_TICKET;
  if (gnutls_init(&made, side | GNUTLS_NO_END_OF_EARLY_DATA) != 0) return nullptr;
  Session owned(made);
  const gnutls_datum_t alpn = datum(protocol());
  if (gnutls_priority_set(made, priority_.get()) != 0 ||
      gnutls_credentials_set(made, GNUTLS_CRD_CERTIFICATE, credentials_.get()) != 0 ||
      gnutls_alpn_set_protocols(made, &alpn, 1, GNUTLS_ALPN_MANDATORY) != 0)
    return nullptr;
  if (!is_opener) gnutls_certificate_server_set_request(made, GNUTLS_CERT_REQUIRE);
  gnutls_handshake_set_max_packet_length(made, handshake_message_bytes_max);
  // The purpose that the other side's certificate must be for.
  static unsigned char client[] = GNUTLS_KP_TLS_WWW_CLIENT, server[] = GNUTLS_KP_TLS_WWW_SERVER;
  static gnutls_typed_vdata_st of_client{GNUTLS_DT_KEY_PURPOSE_OID, client, 0},
      of_server{GNUTLS_DT_KEY_PURPOSE_OID, server, 0};
  gnutls_session_set_verify_cert2(made, is_opener ? &of_server : &of_client, 1, 0);
  return owned;
}

std::int32_t QuicIdentity::rank_of(gnutls_session_t session) const {
  unsigned count = 0;
  const gnutls_datum_t* shown = gnutls_certificate_get_peers(session, &count);
  // Signed by the authority itself, without intermediates.
  return shown != nullptr && count == 1 ? rank_in(*shown, GNUTLS_X509_FMT_DER) : -1;
}

// The only subject name of a certificate must be a URI.
std::int32_t QuicIdentity::rank_in(const gnutls_datum_t& certificate, gnutls_x509_crt_fmt_t format) const {
  gnutls_x509_crt_t made = nullptr;
  if (gnutls_x509_crt_init(&made) != 0) return -1;
  const OwnedCertificate owned(made);
  if (gnutls_x509_crt_import(made, &certificate, format) != 0) return -1;
  char name[256];
  size_t bytes = sizeof name;
  const int kind = gnutls_x509_crt_get_subject_alt_name(made, 0, name, &bytes, nullptr);
  char other[256];
  size_t other_bytes = sizeof other;
  const int next = gnutls_x509_crt_get_subject_alt_name(made, 1, other, &other_bytes, nullptr);
  if (kind != GNUTLS_SAN_URI || next != GNUTLS_E_REQUESTED_DATA_NOT_AVAILABLE) return -1;
  return ranks_.rank_of(std::string(name, bytes));
}

std::string QuicIdentity::verify_error(gnutls_session_t session) {
  const unsigned status = gnutls_session_get_verify_cert_status(session);
  if (status == 0 || status == UINT_MAX) return "";
  gnutls_datum_t text{};
  if (gnutls_certificate_verification_status_print(status, GNUTLS_CRT_X509, &text, 0) != 0) return "";
  std::string said(reinterpret_cast<const char*>(text.data), text.size);
  gnutls_free(text.data);
  while (!said.empty() && (said.back() == ' ' || said.back() == '.')) said.pop_back();
  return "its certificate is not from this job's seed: " + said;
}

}  // namespace unisono::engine
