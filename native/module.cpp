// The module unisono._native: one bind function per noun, nothing else.

#include "bind.hpp"

NB_MODULE(_native, m) {
  m.doc() = "The native side of unisono: moves bytes and reduces. It decides nothing.";
  unisono::bind_kernels(m);
  unisono::bind_engine(m);
}
