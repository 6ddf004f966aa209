// A fingerprint as Python's bytes, and back.

#pragma once

#include <nanobind/nanobind.h>

#include <cstring>

#include "collective/fingerprint.hpp"

namespace unisono {

inline nanobind::bytes bytes_of(const engine::Fingerprint& fingerprint) {
  return nanobind::bytes(reinterpret_cast<const char*>(&fingerprint), sizeof fingerprint);
}

inline engine::Fingerprint fingerprint_of(const nanobind::bytes& data) {
  engine::Fingerprint fingerprint;
  if (data.size() != sizeof fingerprint) throw nanobind::value_error("a fingerprint has 16 bytes");
  std::memcpy(&fingerprint, data.c_str(), sizeof fingerprint);
  return fingerprint;
}

}  // namespace unisono
