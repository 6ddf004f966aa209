// What each noun offers the Python module.

#pragma once

#include <nanobind/nanobind.h>

#include "python/gil_released.hpp"

namespace unisono {

void bind_bell(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_hot_path(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);
void bind_hot_messages(nanobind::module_& m);

}  // namespace unisono
