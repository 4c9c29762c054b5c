// One function per binding file; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_gguf(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_model(nb::module_& m);
void bind_session(nb::module_& m);
void bind_scheduler(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_ops(nb::module_& m);
