// The bind function of each class of the module unisono._native.

#pragma once

#include <nanobind/nanobind.h>

#include "python/gil_released.hpp"

namespace unisono {

void bind_codec(nanobind::module_& m);
void bind_completion_eventfd(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_local_world(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);
void bind_rpc_frame(nanobind::module_& m);
void bind_verbs(nanobind::module_& m);
void bind_call_log(nanobind::module_& m);

}  // namespace unisono
