// Settings of engines in C++ tests: the defaults that Python passes.

#pragma once

#include "messaging/peer.hpp"

namespace unisono::engine {

inline Settings test_settings() {
  Settings settings{};
  settings.eager_bytes = 16 * 1024;
  settings.eager_credit_bytes = 256 * 1024;
  settings.control_eager_bytes = 16 * 1024;
  settings.control_credit_bytes = 1600 * 1024;
  settings.control_bytes_max = 256 * 1024;
  settings.own_credit_bytes = 64 * 1024 * 1024;
  settings.message_bytes_max = uint64_t{1} << 40;
  settings.recv_bytes_max = uint64_t{1} << 30;
  settings.silence_ns = 5 * second / 2;
  settings.stranger_bytes_max = 4096;
  settings.stranger_ns = 5 * second;
  settings.strangers_max = 256;
  settings.strangers_per_address_max = 128;
  return settings;
}

}  // namespace unisono::engine
