// Where ngtcp2 0.12 and 1.x differ in names. 0.12.1 is what the tests run with; 1.x is untested.

#pragma once

#include <ngtcp2/ngtcp2.h>

#include <string>

#include "base/types.hpp"

namespace unisono::engine {

// How a connection is closed: by a TLS alert, or with a code and a reason of ours.
struct QuicClose {
  uint64_t code = 0;
  int alert = -1;
  std::string reason;
};

#if NGTCP2_VERSION_NUM >= 0x010000

using QuicKeyLevel = ngtcp2_encryption_level;
inline constexpr QuicKeyLevel application_keys = NGTCP2_ENCRYPTION_LEVEL_1RTT;
inline const uint8_t* token_of(const ngtcp2_pkt_hd& first) { return first.token; }
inline size_t token_bytes(const ngtcp2_pkt_hd& first) { return first.tokenlen; }
inline void set_token(ngtcp2_settings& settings, const ngtcp2_pkt_hd& first) {
  settings.token = first.token;
  settings.tokenlen = first.tokenlen;
}
inline void set_original(ngtcp2_transport_params& params, const ngtcp2_cid& id) {
  params.original_dcid = id;
  params.original_dcid_present = 1;
}
// How the peer closed the connection. True if the code is the application's, false if it is the transport's.
inline bool read_close(ngtcp2_conn* conn, QuicClose& came) {
  const ngtcp2_ccerr* error = ngtcp2_conn_get_ccerr(conn);
  came.code = error->error_code;
  came.reason.assign(reinterpret_cast<const char*>(error->reason), error->reasonlen);
  return error->type == NGTCP2_CCERR_TYPE_APPLICATION;
}
inline ngtcp2_ssize write_close(ngtcp2_conn* conn, ngtcp2_path* path, ngtcp2_pkt_info* info, uint8_t* to, size_t bytes,
                                const QuicClose& close, ngtcp2_tstamp now) {
  ngtcp2_ccerr error;
  ngtcp2_ccerr_default(&error);
  const auto* reason = reinterpret_cast<const uint8_t*>(close.reason.data());
  if (close.alert >= 0)
    ngtcp2_ccerr_set_tls_alert(&error, static_cast<uint8_t>(close.alert), reason, close.reason.size());
  else
    ngtcp2_ccerr_set_application_error(&error, close.code, reason, close.reason.size());
  return ngtcp2_conn_write_connection_close(conn, path, info, to, bytes, &error, now);
}

inline size_t probe_timeouts(ngtcp2_conn*) { return 0; }  // 1.x does not say, and has probes for this
inline bool is_probe_due(ngtcp2_conn*, ngtcp2_tstamp) { return false; }
inline uint64_t window_of(ngtcp2_conn* conn) {
  ngtcp2_conn_info now;
  ngtcp2_conn_get_conn_info(conn, &now);
  return now.cwnd;
}

#else

using QuicKeyLevel = ngtcp2_crypto_level;
inline constexpr QuicKeyLevel application_keys = NGTCP2_CRYPTO_LEVEL_APPLICATION;
inline size_t probe_timeouts(ngtcp2_conn* conn) {
  ngtcp2_conn_stat now;
  ngtcp2_conn_get_conn_stat(conn, &now);
  return now.pto_count;
}
// Whether the timer at this time is the one that sends probes for want of any acknowledgement.
inline bool is_probe_due(ngtcp2_conn* conn, ngtcp2_tstamp at) {
  ngtcp2_conn_stat now;
  ngtcp2_conn_get_conn_stat(conn, &now);
  return now.loss_detection_timer == at && now.loss_time[NGTCP2_PKTNS_ID_APPLICATION] == UINT64_MAX;
}
inline uint64_t window_of(ngtcp2_conn* conn) {
  ngtcp2_conn_stat now;
  ngtcp2_conn_get_conn_stat(conn, &now);
  return now.cwnd;
}
inline const uint8_t* token_of(const ngtcp2_pkt_hd& first) { return first.token.base; }
inline size_t token_bytes(const ngtcp2_pkt_hd& first) { return first.token.len; }
inline void set_token(ngtcp2_settings& settings, const ngtcp2_pkt_hd& first) { settings.token = first.token; }
inline void set_original(ngtcp2_transport_params& params, const ngtcp2_cid& id) { params.original_dcid = id; }
// How the peer closed the connection. True if the code is the application's, false if it is the transport's.
inline bool read_close(ngtcp2_conn* conn, QuicClose& came) {
  ngtcp2_connection_close_error error;
  ngtcp2_conn_get_connection_close_error(conn, &error);
  came.code = error.error_code;
  came.reason.assign(reinterpret_cast<const char*>(error.reason), error.reasonlen);
  return error.type == NGTCP2_CONNECTION_CLOSE_ERROR_CODE_TYPE_APPLICATION;
}
inline ngtcp2_ssize write_close(ngtcp2_conn* conn, ngtcp2_path* path, ngtcp2_pkt_info* info, uint8_t* to, size_t bytes,
                                const QuicClose& close, ngtcp2_tstamp now) {
  ngtcp2_connection_close_error error;
  ngtcp2_connection_close_error_default(&error);
  auto* reason = reinterpret_cast<uint8_t*>(const_cast<char*>(close.reason.data()));
  if (close.alert >= 0)
    ngtcp2_connection_close_error_set_transport_error_tls_alert(&error, static_cast<uint8_t>(close.alert), reason,
                                                                close.reason.size());
  else
    ngtcp2_connection_close_error_set_application_error(&error, close.code, reason, close.reason.size());
  return ngtcp2_conn_write_connection_close(conn, path, info, to, bytes, &error, now);
}

#endif

}  // namespace unisono::engine
