// What the module `pairmix._kernels` is made of.
#pragma once

#include <nanobind/nanobind.h>

namespace pairmix {

void bind_operator(nanobind::module_& m);
void bind_recurrence(nanobind::module_& m);
void bind_feed_forward(nanobind::module_& m);

}  // namespace pairmix
