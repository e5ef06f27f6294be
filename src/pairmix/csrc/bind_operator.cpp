// The operator for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include <array>
#include <optional>
#include <vector>

#include "bindings.h"
#include "memory.h"
#include "operands.h"
#include "targets.h"

namespace pairmix {
namespace {

void run(void (*kernel)(const Call&), const Operands& operands) {
  const nb::gil_scoped_release release;
  for (int64_t map = 0; map < operands.maps; ++map) kernel(operands.of_map(map));
}

// None if the tensors are not what the kernels take; with `only_ordinary` also if they are not for the kernels to read, or of
// several dtypes.
nb::object forward(const Plan& plan, nb::handle x, nb::tuple parameters, bool rotation, int64_t out_features,
                   std::optional<int64_t> maps, int threads, bool only_ordinary) {
  if (only_ordinary && !(is_ordinary(x) && are_ordinary(parameters))) return nb::none();
  Operands operands(plan, x, nb::none(), parameters, rotation, out_features, maps);
  Call& call = operands.call;
  if (!operands.fits || (only_ordinary && call.dtype != operands.of_parameters)) return nb::none();
  std::vector<int64_t> shape(operands.x.shape(), operands.x.shape() + operands.x.dimensions());
  shape.back() = operands.maps * out_features;
  NewTensor y = new_tensor(std::move(shape), call.dtype);
  call.threads = usable_threads(threads), call.y = {y.data, operands.maps * out_features, 1};
  run(chosen_target().forward, operands);
  return std::move(y.object);
}

// The gradients that are needed, of x, blocks, d_in, d_out, bias, residual_scale. None if the tensors are not what the kernels
// take.
nb::object backward(const Plan& plan, nb::handle grad, nb::handle x, nb::tuple parameters, bool rotation,
                    std::optional<int64_t> maps, const std::array<bool, 6>& needs, int threads) {
  Operands operands(plan, x, grad, parameters, rotation, {}, maps);
  if (!operands.fits) return nb::none();
  Call& call = operands.call;
  call.threads = usable_threads(threads);
  const int64_t n = plan.n(), stages = plan.given_stages();
  Results results;
  const TensorView& view = operands.x;
  call.grad_x = {results.add(needs[0], {view.shape(), view.shape() + view.dimensions()}, call.dtype), call.in_features, 1};
  call.gradients.blocks = results.add(needs[1], operands.shape_of_blocks(), operands.of_parameters);
  call.gradients.d_in = results.add(needs[2], operands.shape_of(n), operands.of_parameters);
  call.gradients.d_out = results.add(needs[3], operands.shape_of(n), operands.of_parameters);
  call.gradients.bias = results.add(needs[4], operands.shape_of(call.out_features), operands.of_parameters);
  call.gradients.residual_scale = results.add(needs[5], operands.shape_of(stages), operands.of_parameters);
  run(chosen_target().backward, operands);
  return results.objects;
}

}  // namespace

void bind_operator(nb::module_& m) {
  const auto or_none = nb::arg().none();
  m.def("forward", forward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), or_none, nb::arg(), nb::arg());
  m.def("backward", backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), or_none, nb::arg(), nb::arg());
}

}  // namespace pairmix
