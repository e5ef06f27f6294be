// The module `pairmix._kernels`.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "caches.h"
#include "memory.h"
#include "targets.h"
#include "tensors.h"

NB_MODULE(_kernels, m) {
  using namespace pairmix;
  nb::set_leak_warnings(false);  // plans live as long as the schedules that are kept for the whole process
  use_exchange_api(true);
  nb::class_<Plan>(m, "Plan").def("__init__", [](Plan* plan, nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig> order) {
    new (plan) Plan(order.data(), static_cast<int32_t>(order.shape(0)), static_cast<int32_t>(order.shape(1)));
  });
  m.def("targets", targets);
  m.def("target", [] { return std::string(chosen_target().name); });
  m.def("use_target", use_target);
  m.def("caches", [] { return std::pair(caches().l1_bytes, caches().l2_bytes); });
  m.def("use_caches", [](int64_t l1_bytes, int64_t l2_bytes) { use_caches({l1_bytes, l2_bytes}); });
  m.def("use_exchange_api", use_exchange_api);
  m.def("empty_cache", [] {
    const nb::gil_scoped_release release;
    results_pool().clear();
    Arena::free_idle();
    return_freed_memory();
  });
  m.def("multiply_adds_per_second", [](int threads) {
    const nb::gil_scoped_release release;
    return chosen_target().multiply_adds_per_second(usable_threads(threads));
  });
  bind_operator(m);
  bind_recurrence(m);
  bind_feed_forward(m);
}
