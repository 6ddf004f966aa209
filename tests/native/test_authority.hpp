// Certificates for C++ tests: what a seed would give to the ranks of a world.

#pragma once

#include <gnutls/x509.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "link/tls_material.hpp"

namespace unisono::engine {

// What a seed would give out: an authority and certificates of its ranks.
class TestAuthority {
 public:
  explicit TestAuthority(int size) {
    for (int rank = 0; rank < size; ++rank) names_.push_back("unisono://job/" + std::to_string(rank) + "/0");
    key_ = make_key();
    certificate_ = make_certificate(key_, nullptr, "");
  }
  ~TestAuthority() {
    gnutls_x509_crt_deinit(certificate_);
    gnutls_x509_privkey_deinit(key_);
  }
  TestAuthority(const TestAuthority&) = delete;
  TestAuthority& operator=(const TestAuthority&) = delete;

  // `claimed` replaces the name in the certificate.
  TlsMaterial material(int rank, const std::string& claimed = "") const {
    gnutls_x509_privkey_t key = make_key();
    gnutls_x509_crt_t made = make_certificate(key, this, claimed.empty() ? names_[rank] : claimed);
    TlsMaterial material{pem(key), pem(made), pem(certificate_), names_};
    gnutls_x509_crt_deinit(made);
    gnutls_x509_privkey_deinit(key);
    return material;
  }

 private:
  static void must(bool is_right, const char* what) {
    if (is_right) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::exit(1);
  }
  static gnutls_x509_privkey_t make_key() {
    gnutls_x509_privkey_t key;
    must(gnutls_x509_privkey_init(&key) == 0 &&
             gnutls_x509_privkey_generate(key, GNUTLS_PK_ECDSA, GNUTLS_CURVE_TO_BITS(GNUTLS_ECC_CURVE_SECP256R1), 0) ==
                 0,
         "a key is made");
    return key;
  }
  static gnutls_x509_crt_t make_certificate(gnutls_x509_privkey_t key, const TestAuthority* issuer,
                                            const std::string& name) {
    gnutls_x509_crt_t made;
    gnutls_x509_crt_init(&made);
    gnutls_x509_crt_set_version(made, 3);
    const unsigned char serial[] = {1, 2, 3};
    gnutls_x509_crt_set_serial(made, serial, sizeof serial);
    gnutls_x509_crt_set_key(made, key);
    gnutls_x509_crt_set_activation_time(made, time(nullptr) - 3600);
    gnutls_x509_crt_set_expiration_time(made, time(nullptr) + 86400);
    gnutls_x509_crt_set_ca_status(made, issuer == nullptr ? 1 : 0);
    const char* common = issuer == nullptr ? "seed" : "rank";
    gnutls_x509_crt_set_dn_by_oid(made, GNUTLS_OID_X520_COMMON_NAME, 0, common, 4);
    gnutls_x509_crt_set_key_usage(made, issuer == nullptr ? GNUTLS_KEY_KEY_CERT_SIGN : GNUTLS_KEY_DIGITAL_SIGNATURE);
    if (issuer != nullptr) {
      gnutls_x509_crt_set_key_purpose_oid(made, GNUTLS_KP_TLS_WWW_CLIENT, 0);
      gnutls_x509_crt_set_key_purpose_oid(made, GNUTLS_KP_TLS_WWW_SERVER, 0);
      gnutls_x509_crt_set_subject_alt_name(made, GNUTLS_SAN_URI, name.data(), static_cast<unsigned>(name.size()),
                                           GNUTLS_FSAN_SET);
    }
    must(gnutls_x509_crt_sign2(made, issuer == nullptr ? made : issuer->certificate_,
                               issuer == nullptr ? key : issuer->key_, GNUTLS_DIG_SHA256, 0) == 0,
         "a certificate is signed");
    return made;
  }
  static std::string pem(gnutls_x509_crt_t made) {
    gnutls_datum_t text{};
    gnutls_x509_crt_export2(made, GNUTLS_X509_FMT_PEM, &text);
    return taken(text);
  }
  static std::string pem(gnutls_x509_privkey_t key) {
    gnutls_datum_t text{};
    gnutls_x509_privkey_export2(key, GNUTLS_X509_FMT_PEM, &text);
    return taken(text);
  }
  static std::string taken(gnutls_datum_t& text) {
    std::string made(reinterpret_cast<const char*>(text.data), text.size);
    gnutls_free(text.data);
    return made;
  }

  std::vector<std::string> names_;
  gnutls_x509_privkey_t key_;
  gnutls_x509_crt_t certificate_;
};

}  // namespace unisono::engine
