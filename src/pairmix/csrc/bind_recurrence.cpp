// Recurrences for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>
#include <vector>

#include "bindings.h"
#include "memory.h"
#include "operands.h"
#include "targets.h"

namespace pairmix {
namespace {

// Tensors of a recurrence. None if they are not what the kernels take.
std::optional<Recurrence> make_recurrence(const Operands& operands, int cell, std::vector<int64_t> batch_sizes, int threads) {
  const Call& call = operands.call;
  Recurrence it{};
  it.plan = call.plan, it.dtype = call.dtype, it.rotation = call.rotation, it.threads = usable_threads(threads);
  it.cell = static_cast<Cell>(cell), it.batch_sizes = std::move(batch_sizes);
  const bool is_full_precision = call.dtype == Dtype::float32 || call.dtype == Dtype::float64;
  if (!operands.fits || !is_full_precision || operands.of_parameters != call.dtype) return {};
  if (operands.maps != gates_of(it.cell) || call.in_features != call.plan->n() || call.out_features != call.plan->n()) return {};
  int64_t before = call.rows;
  for (const int64_t size : it.batch_sizes) {
    if (size < 0 || size > before) return {};
    before = size;
  }
  for (int64_t map = 0; map < operands.maps; ++map) it.maps[map] = operands.of_map(map).parameters;
  it.h0 = call.x.data;
  return it;
}

// [h, c, saved], or None. c is empty unless there is one.
nb::object recurrence_forward(const Plan& plan, int cell, nb::handle gates, nb::handle h0, nb::handle c0,
                              std::vector<int64_t> batch_sizes, nb::tuple parameters, bool rotation, int threads) {
  const int64_t maps = gates_of(static_cast<Cell>(cell)), n = plan.n();
  const int64_t rows = std::accumulate(batch_sizes.begin(), batch_sizes.end(), int64_t{0});
  const Operands operands(plan, h0, nb::none(), parameters, rotation, n, maps);
  std::optional<Recurrence> it = make_recurrence(operands, cell, std::move(batch_sizes), threads);
  const TensorView of_gates(gates), of_c0(c0);
  const bool has_c = it && it->cell == Cell::lstm;
  if (!it || of_gates.dtype() != it->dtype || !of_gates.is_dense({rows, maps * n}) || !operands.x.is_dense({operands.call.rows, n}))
    return nb::none();
  if (has_c && (of_c0.dtype() != it->dtype || !of_c0.is_dense({operands.call.rows, n}))) return nb::none();
  it->gates = of_gates.data(), it->c0 = has_c ? of_c0.data() : nullptr;
  NewTensor h = new_tensor({rows, n}, it->dtype);
  NewTensor c = new_tensor({has_c ? rows : 0, n}, it->dtype);
  NewTensor saved = new_tensor({rows, saved_of(it->cell) * n}, it->dtype);
  it->h = h.data, it->c = has_c ? c.data : nullptr, it->saved = saved.data;
  {
    const nb::gil_scoped_release release;
    chosen_target().recurrence_forward(*it);
  }
  nb::list results;
  for (NewTensor* tensor : {&h, &c, &saved}) results.append(std::move(tensor->object));
  return results;
}

// The gradients of [gates, what the maps contribute, h0, c0], or None. The second is None where it is the first.
nb::object recurrence_backward(const Plan& plan, int cell, nb::handle grad_h, nb::handle grad_c, nb::handle h0, nb::handle c0,
                               std::vector<int64_t> batch_sizes, nb::tuple parameters, bool rotation, nb::handle h, nb::handle c,
                               nb::handle saved, int threads) {
  const int64_t maps = gates_of(static_cast<Cell>(cell)), n = plan.n();
  const int64_t rows = std::accumulate(batch_sizes.begin(), batch_sizes.end(), int64_t{0});
  const Operands operands(plan, h0, nb::none(), parameters, rotation, n, maps);
  std::optional<Recurrence> it = make_recurrence(operands, cell, std::move(batch_sizes), threads);
  if (!it || !operands.x.is_dense({operands.call.rows, n})) return nb::none();
  const bool has_c = it->cell == Cell::lstm;
  bool fits = true;
  const auto data = [&](nb::handle object, std::vector<int64_t> shape) -> void* {
    const TensorView view(object);
    if (!view.exists()) return nullptr;
    fits = fits && view.dtype() == it->dtype && view.is_dense(shape);
    return view.data();
  };
  it->grad_h = data(grad_h, {rows, n});
  it->h = data(h, {rows, n}), it->saved = data(saved, {rows, saved_of(it->cell) * n});
  if (has_c) it->grad_c = data(grad_c, {rows, n}), it->c0 = data(c0, {operands.call.rows, n}), it->c = data(c, {rows, n});
  if (!fits) return nb::none();
  Results results;
  it->grad_gates = results.add(true, {rows, maps * n}, it->dtype);
  it->grad_mixed = results.add(it->cell == Cell::gru_reset_after, {rows, maps * n}, it->dtype);
  it->grad_h0 = results.add(true, {operands.call.rows, n}, it->dtype);
  it->grad_c0 = results.add(has_c, {operands.call.rows, n}, it->dtype);
  {
    const nb::gil_scoped_release release;
    chosen_target().recurrence_backward(*it);
  }
  return results.objects;
}

}  // namespace

void bind_recurrence(nb::module_& m) {
  const auto or_none = nb::arg().none();
  m.def("recurrence_forward", recurrence_forward);
  m.def("recurrence_backward", recurrence_backward, nb::arg(), nb::arg(), or_none, or_none, nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
}

}  // namespace pairmix
