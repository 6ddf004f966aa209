// The Python face of the native side: one bind function per noun, nothing else.

#include <nanobind/nanobind.h>

NB_MODULE(_native, m) { m.doc() = "The native side of unisono: moves bytes and reduces. It decides nothing."; }
