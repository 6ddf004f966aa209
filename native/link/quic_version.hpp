// Where ngtcp2 0.12 and 1.x differ in names. 0.12.1 is what the tests run with; 1.x is untested.

#pragma once

#include <ngtcp2/ngtcp2.h>

#include "base/types.hpp"

namespace unisono::engine {

#if NGTCP2_VERSION_NUM >= 0x010000

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
// The code with which the peer closed the connection. True if it is the application's, false if it is the transport's.
inline bool close_code_of(ngtcp2_conn* conn, uint64_t& code) {
  const ngtcp2_ccerr* error = ngtcp2_conn_get_ccerr(conn);
  code = error->error_code;
  return error->type == NGTCP2_CCERR_TYPE_APPLICATION;
}
inline ngtcp2_ssize write_close(ngtcp2_conn* conn, ngtcp2_path* path, ngtcp2_pkt_info* info, uint8_t* to, size_t bytes,
                                uint64_t code, ngtcp2_tstamp now) {
  ngtcp2_ccerr error;
  ngtcp2_ccerr_default(&error);
  ngtcp2_ccerr_set_application_error(&error, code, nullptr, 0);
  return ngtcp2_conn_write_connection_close(conn, path, info, to, bytes, &error, now);
}

#else

inline const uint8_t* token_of(const ngtcp2_pkt_hd& first) { return first.token.base; }
inline size_t token_bytes(const ngtcp2_pkt_hd& first) { return first.token.len; }
inline void set_token(ngtcp2_settings& settings, const ngtcp2_pkt_hd& first) { settings.token = first.token; }
inline void set_original(ngtcp2_transport_params& params, const ngtcp2_cid& id) { params.original_dcid = id; }
// The code with which the peer closed the connection. True if it is the application's, false if it is the transport's.
inline bool close_code_of(ngtcp2_conn* conn, uint64_t& code) {
  ngtcp2_connection_close_error error;
  ngtcp2_conn_get_connection_close_error(conn, &error);
  code = error.error_code;
  return error.type == NGTCP2_CONNECTION_CLOSE_ERROR_CODE_TYPE_APPLICATION;
}
inline ngtcp2_ssize write_close(ngtcp2_conn* conn, ngtcp2_path* path, ngtcp2_pkt_info* info, uint8_t* to, size_t bytes,
                                uint64_t code, ngtcp2_tstamp now) {
  ngtcp2_connection_close_error error;
  ngtcp2_connection_close_error_default(&error);
  ngtcp2_connection_close_error_set_application_error(&error, code, nullptr, 0);
  return ngtcp2_conn_write_connection_close(conn, path, info, to, bytes, &error, now);
}

#endif

}  // namespace unisono::engine
