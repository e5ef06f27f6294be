// What Python sees: plans, and calls with addresses of tensors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel.h"
#include "pool.h"

namespace nb = nanobind;

namespace pairmix {
namespace {

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> kernels;
#if defined(PAIRMIX_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) kernels.push_back(&kernels_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back(&kernels_avx2);
#endif
  kernels.push_back(&kernels_baseline);
  return kernels;
}

const std::vector<const Kernels*> kAvailable = runnable();
const Kernels* chosen = kAvailable.front();

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : kAvailable) names.emplace_back(kernels->name);
  return names;
}

void use_target(const std::string& name) {
  for (const Kernels* kernels : kAvailable)
    if (name == kernels->name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("this machine cannot run the target " + name);
}

Pool pool;

// A tensor on the pool's memory, as DLPack hands it over: the tensor's death gives the memory back.
struct Managed {
  nb::dlpack::dltensor tensor;
  void* unused = nullptr;
  void (*deleter)(Managed*) = nullptr;
  int64_t bytes = 0;
  std::vector<int64_t> shape;
};

nb::object empty(std::vector<int64_t> shape, int dtype) {
  static constexpr nb::dlpack::dtype types[] = {{2, 32, 1}, {2, 64, 1}, {4, 16, 1}, {2, 16, 1}};  // by Dtype
  auto managed = std::make_unique<Managed>();
  managed->bytes = types[dtype].bits / 8;
  for (const int64_t size : shape) managed->bytes *= size;
  managed->shape = std::move(shape);
  managed->tensor.device = {nb::device::cpu::value, 0};
  managed->tensor.dtype = types[dtype];
  managed->tensor.ndim = static_cast<int32_t>(managed->shape.size());
  managed->tensor.shape = managed->shape.data();
  managed->tensor.data = pool.take(managed->bytes);
  managed->deleter = [](Managed* self) {
    pool.give_back(self->tensor.data, self->bytes);
    delete self;
  };
  // A capsule that no tensor takes over would leak its memory; torch takes over the ones it is given.
  return nb::steal(PyCapsule_New(managed.release(), "dltensor", nullptr));
}

Rows rows(uintptr_t data, int64_t row_stride, int64_t column_stride) {
  return {reinterpret_cast<void*>(data), row_stride, column_stride};
}

Parameters parameters(uintptr_t blocks, uintptr_t d_in, uintptr_t d_out, uintptr_t bias, uintptr_t residual_scale) {
  const auto pointer = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  return {pointer(blocks), pointer(d_in), pointer(d_out), pointer(bias), pointer(residual_scale)};
}

}  // namespace
}  // namespace pairmix

NB_MODULE(_kernels, m) {
  using namespace pairmix;
  nb::set_leak_warnings(false);  // plans live as long as the schedules that are kept for the whole process
  nb::class_<Plan>(m, "Plan").def("__init__", [](Plan* plan, nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig> order) {
    new (plan) Plan(order.data(), static_cast<int32_t>(order.shape(0)), static_cast<int32_t>(order.shape(1)));
  });
  m.def("empty", empty);
  m.def("targets", targets);
  m.def("target", [] { return std::string(chosen->name); });
  m.def("use_target", use_target);
  m.def("multiply_adds_per_second", [](int threads) {
    nb::gil_scoped_release release;
    return chosen->multiply_adds_per_second(threads);
  });
  m.def(
      "forward",
      [](const Plan& plan, int dtype, bool rotation, int64_t row_count, int in_features, int out_features, int threads,
         uintptr_t x, int64_t x_row, int64_t x_column, uintptr_t y, uintptr_t blocks, uintptr_t d_in, uintptr_t d_out,
         uintptr_t bias, uintptr_t residual_scale) {
        Call call{};
        call.plan = &plan, call.dtype = static_cast<Dtype>(dtype), call.rotation = rotation, call.rows = row_count;
        call.in_features = in_features, call.out_features = out_features, call.threads = threads;
        call.x = rows(x, x_row, x_column), call.y = rows(y, out_features, 1);
        call.parameters = parameters(blocks, d_in, d_out, bias, residual_scale);
        nb::gil_scoped_release release;
        chosen->forward(call);
      });
  m.def(
      "backward",
      [](const Plan& plan, int dtype, bool rotation, int64_t row_count, int in_features, int out_features, int threads,
         uintptr_t grad, int64_t grad_row, int64_t grad_column, uintptr_t x, int64_t x_row, int64_t x_column,
         uintptr_t blocks, uintptr_t d_in, uintptr_t d_out, uintptr_t residual_scale, uintptr_t grad_x,
         uintptr_t grad_blocks, uintptr_t grad_d_in, uintptr_t grad_d_out, uintptr_t grad_bias,
         uintptr_t grad_residual_scale) {
        Call call{};
        call.plan = &plan, call.dtype = static_cast<Dtype>(dtype), call.rotation = rotation, call.rows = row_count;
        call.in_features = in_features, call.out_features = out_features, call.threads = threads;
        call.grad = rows(grad, grad_row, grad_column), call.x = rows(x, x_row, x_column);
        call.grad_x = rows(grad_x, in_features, 1);
        call.parameters = parameters(blocks, d_in, d_out, 0, residual_scale);
        call.gradients = parameters(grad_blocks, grad_d_in, grad_d_out, grad_bias, grad_residual_scale);
        nb::gil_scoped_release release;
        chosen->backward(call);
      });
}
