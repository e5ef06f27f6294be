// What Python sees: plans, and calls with tensors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel.h"
#include "memory.h"
#include "tensors.h"

namespace pairmix {
namespace {

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> kernels;
#if defined(PAIRMIX_X86)  // CMakeLists.txt asks for every feature that it compiles a target with
  __builtin_cpu_init();
  if (PAIRMIX_CAN_RUN_AVX512) kernels.push_back(&kernels_avx512);
  if (PAIRMIX_CAN_RUN_AVX2) kernels.push_back(&kernels_avx2);
#endif
  kernels.push_back(&kernels_baseline);
  return kernels;
}

const std::vector<const Kernels*> kAvailable = runnable();
std::atomic<const Kernels*> chosen = kAvailable.front();

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

Pool& pool = *new Pool;  // never destroyed: tensors give their memory back until the very end
const ExchangeApi* exchange_api = nullptr;

// Returns whether there is one.
bool use_exchange_api(bool wanted) {
  exchange_api = nullptr;
  const nb::object capsule = nb::getattr(nb::module_::import_("torch").attr("Tensor"), "__dlpack_c_exchange_api__", nb::none());
  if (!wanted || capsule.is_none()) return false;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw nb::python_error();
  if (api->major == 1 && api->read) exchange_api = api;
  return exchange_api != nullptr;
}

// The tensors of a call, as long as they are what the kernels take: on the CPU, of one dtype (or parameters in float32 while
// the rows are halves), parameters dense, rows evenly spaced, shapes that fit. Of several maps the parameters have one more
// dimension in front, and the outputs are side by side.
class Operands {
 public:
  Operands(const Plan& plan, nb::handle x, nb::handle grad, int64_t out_features, std::optional<int64_t> maps,
           nb::handle blocks, nb::handle d_in, nb::handle d_out, nb::handle bias, nb::handle residual_scale)
      : x(x, exchange_api), maps(maps.value_or(1)), grad_(grad, exchange_api) {
    if (maps) front_ = {*maps};
    const int64_t n = plan.n(), stages = plan.given_stages(), pairs = plan.pairs();
    const std::optional<Dtype> dtype = this->x.dtype();
    if (!dtype || this->x.dimensions() < 1 || out_features < 1 || out_features > n) return;
    if (this->maps < 1 || this->maps > std::numeric_limits<int32_t>::max()) return;
    call.plan = &plan, call.dtype = *dtype, call.out_features = static_cast<int32_t>(out_features);
    const int64_t in_features = this->x.size(this->x.dimensions() - 1);
    if (in_features < 1 || in_features > n || !rows(this->x, call.x, call.rows)) return;
    call.in_features = static_cast<int32_t>(in_features);
    if (grad_.exists()) {
      int64_t count;
      if (grad_.dtype() != dtype || !rows(grad_, call.grad, count) || count != call.rows) return;
      if (grad_.size(grad_.dimensions() - 1) != this->maps * out_features) return;
    }
    const TensorView given(blocks, exchange_api);
    if (given.dtype() != *dtype && (given.dtype() != Dtype::float32 || *dtype == Dtype::float64)) return;
    of_parameters = *given.dtype();
    call.halves_everywhere = of_parameters == Dtype::bfloat16 || of_parameters == Dtype::float16;
    call.rotation = given.dimensions() == (maps ? 3 : 2);
    fits = given.is_dense(shape_of_blocks()) && parameter(d_in, n, call.parameters.d_in) &&
           parameter(d_out, n, call.parameters.d_out) && parameter(bias, out_features, call.parameters.bias) &&
           parameter(residual_scale, stages, call.parameters.residual_scale) && (residual_scale.is_none() || n % 2);
    call.parameters.blocks = given.data();
  }

  // The shapes of parameters.
  std::vector<int64_t> shape_of(int64_t size) const { return with_front({size}); }
  std::vector<int64_t> shape_of_blocks() const {
    const int64_t stages = call.plan->given_stages(), pairs = call.plan->pairs();
    return call.rotation ? with_front({stages, pairs}) : with_front({stages, 4, pairs});
  }

  // The call of one of the maps. The gradients of x of all of them are added up.
  Call of_map(int64_t map) const {
    const int64_t n = call.plan->n(), stages = call.plan->given_stages(), out = call.out_features;
    const int64_t row = size_of(call.dtype), number = size_of(of_parameters);
    const auto move = [map](void*& data, int64_t bytes) {
      if (data) data = static_cast<char*>(data) + map * bytes;
    };
    Call one = call;
    move(one.y.data, out * row);
    move(one.grad.data, out * one.grad.column_stride * row);
    one.grad_x.adds = map > 0;
    for (Parameters* p : {&one.parameters, &one.gradients}) {
      move(p->blocks, stages * (call.rotation ? 1 : 4) * call.plan->pairs() * number);
      move(p->d_in, n * number);
      move(p->d_out, n * number);
      move(p->bias, out * number);
      move(p->residual_scale, stages * number);
    }
    return one;
  }

  Call call{};
  TensorView x;
  int64_t maps;
  Dtype of_parameters{};
  bool fits = false;

 private:
  std::vector<int64_t> with_front(std::initializer_list<int64_t> shape) const {
    std::vector<int64_t> all = front_;
    all.insert(all.end(), shape);
    return all;
  }

  bool parameter(nb::handle object, int64_t size, void*& data) const {
    const TensorView view(object, exchange_api);
    data = view.exists() ? view.data() : nullptr;
    return !view.exists() || (view.dtype() == of_parameters && view.is_dense(shape_of(size)));
  }

  // Whether all but the last dimension are as good as one.
  static bool rows(const TensorView& view, Rows& rows, int64_t& count) {
    const int32_t last = view.dimensions() - 1;
    rows = {view.data(), last > 0 ? view.stride(last - 1) : view.size(last), view.stride(last)};
    count = 1;
    for (int32_t k = last - 1; k >= 0; --k) {
      if (count == 1) rows.row_stride = view.stride(k);  // dimensions of size one do not matter
      int64_t expected;
      if (__builtin_mul_overflow(rows.row_stride, count, &expected)) return false;
      if (view.size(k) > 1 && view.stride(k) != expected) return false;
      if (__builtin_mul_overflow(count, view.size(k), &count)) return false;
    }
    return true;
  }

  TensorView grad_;
  std::vector<int64_t> front_;
};

void run(void (*kernel)(const Call&), const Operands& operands) {
  const nb::gil_scoped_release release;
  for (int64_t map = 0; map < operands.maps; ++map) kernel(operands.of_map(map));
}

// Whether it is None or a tensor proper: a subclass may stand for something else, and so do the numbers of a negated view.
bool is_ordinary(nb::handle object) {
  static const nb::object tensor = nb::module_::import_("torch").attr("Tensor");
  static const nb::object parameter = nb::module_::import_("torch").attr("nn").attr("Parameter");
  static const nb::object is_neg = nb::str("is_neg");
  if (object.is_none()) return true;
  if (!object.type().is(tensor) && !object.type().is(parameter)) return false;
  return !nb::cast<bool>(nb::steal(PyObject_CallMethodNoArgs(object.ptr(), is_neg.ptr())));
}

// Whether the arguments are right and can be computed without a conversion.
bool fits(const Plan& plan, nb::handle x, nb::handle blocks, nb::handle d_in, nb::handle d_out, nb::handle bias,
          nb::handle residual_scale, int64_t out_features, std::optional<int64_t> maps) {
  for (const nb::handle object : {x, blocks, d_in, d_out, bias, residual_scale})
    if (!is_ordinary(object)) return false;
  const Operands operands(plan, x, nb::none(), out_features, maps, blocks, d_in, d_out, bias, residual_scale);
  return operands.fits && operands.call.dtype == operands.of_parameters;
}

// None if the tensors are not what the kernels take.
nb::object forward(const Plan& plan, nb::handle x, nb::handle blocks, nb::handle d_in, nb::handle d_out, nb::handle bias,
                   nb::handle residual_scale, int64_t out_features, std::optional<int64_t> maps, int threads) {
  Operands operands(plan, x, nb::none(), out_features, maps, blocks, d_in, d_out, bias, residual_scale);
  if (!operands.fits) return nb::none();
  Call& call = operands.call;
  std::vector<int64_t> shape(operands.x.shape(), operands.x.shape() + operands.x.dimensions());
  shape.back() = operands.maps * out_features;
  NewTensor y = new_tensor(pool, std::move(shape), call.dtype, exchange_api);
  call.threads = usable_threads(threads), call.y = {y.data, operands.maps * out_features, 1};
  run(chosen.load()->forward, operands);
  return std::move(y.object);
}

// The gradients that are needed, of x, blocks, d_in, d_out, bias, residual_scale. None if the tensors are not what the kernels
// take.
nb::object backward(const Plan& plan, nb::handle grad, nb::handle x, nb::handle blocks, nb::handle d_in, nb::handle d_out,
                    nb::handle residual_scale, int64_t out_features, std::optional<int64_t> maps,
                    const std::array<bool, 6>& needs, int threads) {
  Operands operands(plan, x, grad, out_features, maps, blocks, d_in, d_out, nb::none(), residual_scale);
  if (!operands.fits) return nb::none();
  Call& call = operands.call;
  call.threads = usable_threads(threads);
  const int64_t n = plan.n(), stages = plan.given_stages();
  nb::list results;
  const auto result = [&](bool needed, std::vector<int64_t> shape, Dtype dtype) -> void* {
    if (!needed) {
      results.append(nb::none());
      return nullptr;
    }
    NewTensor tensor = new_tensor(pool, std::move(shape), dtype, exchange_api);
    results.append(std::move(tensor.object));
    return tensor.data;
  };
  const TensorView& view = operands.x;
  call.grad_x = {result(needs[0], {view.shape(), view.shape() + view.dimensions()}, call.dtype), call.in_features, 1};
  call.gradients.blocks = result(needs[1], operands.shape_of_blocks(), operands.of_parameters);
  call.gradients.d_in = result(needs[2], operands.shape_of(n), operands.of_parameters);
  call.gradients.d_out = result(needs[3], operands.shape_of(n), operands.of_parameters);
  call.gradients.bias = result(needs[4], operands.shape_of(out_features), operands.of_parameters);
  call.gradients.residual_scale = result(needs[5], operands.shape_of(stages), operands.of_parameters);
  run(chosen.load()->backward, operands);
  return results;
}

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
                              std::vector<int64_t> batch_sizes, nb::handle blocks, nb::handle d_in, nb::handle d_out,
                              nb::handle bias, nb::handle residual_scale, int threads) {
  const int64_t maps = gates_of(static_cast<Cell>(cell)), n = plan.n();
  const int64_t rows = std::accumulate(batch_sizes.begin(), batch_sizes.end(), int64_t{0});
  const Operands operands(plan, h0, nb::none(), n, maps, blocks, d_in, d_out, bias, residual_scale);
  std::optional<Recurrence> it = make_recurrence(operands, cell, std::move(batch_sizes), threads);
  const TensorView of_gates(gates, exchange_api), of_c0(c0, exchange_api);
  const bool has_c = it && it->cell == Cell::lstm;
  if (!it || of_gates.dtype() != it->dtype || !of_gates.is_dense({rows, maps * n}) || !operands.x.is_dense({operands.call.rows, n}))
    return nb::none();
  if (has_c && (of_c0.dtype() != it->dtype || !of_c0.is_dense({operands.call.rows, n}))) return nb::none();
  it->gates = of_gates.data(), it->c0 = has_c ? of_c0.data() : nullptr;
  NewTensor h = new_tensor(pool, {rows, n}, it->dtype, exchange_api);
  NewTensor c = new_tensor(pool, {has_c ? rows : 0, n}, it->dtype, exchange_api);
  NewTensor saved = new_tensor(pool, {rows, saved_of(it->cell) * n}, it->dtype, exchange_api);
  it->h = h.data, it->c = has_c ? c.data : nullptr, it->saved = saved.data;
  {
    const nb::gil_scoped_release release;
    chosen.load()->recurrence_forward(*it);
  }
  nb::list results;
  for (NewTensor* tensor : {&h, &c, &saved}) results.append(std::move(tensor->object));
  return results;
}

// The gradients of [gates, what the maps contribute, h0, c0], or None. The second is None where it is the first.
nb::object recurrence_backward(const Plan& plan, int cell, nb::handle grad_h, nb::handle grad_c, nb::handle h0, nb::handle c0,
                               std::vector<int64_t> batch_sizes, nb::handle blocks, nb::handle d_in, nb::handle d_out,
                               nb::handle bias, nb::handle residual_scale, nb::handle h, nb::handle c, nb::handle saved,
                               int threads) {
  const int64_t maps = gates_of(static_cast<Cell>(cell)), n = plan.n();
  const int64_t rows = std::accumulate(batch_sizes.begin(), batch_sizes.end(), int64_t{0});
  const Operands operands(plan, h0, nb::none(), n, maps, blocks, d_in, d_out, bias, residual_scale);
  std::optional<Recurrence> it = make_recurrence(operands, cell, std::move(batch_sizes), threads);
  if (!it || !operands.x.is_dense({operands.call.rows, n})) return nb::none();
  const bool has_c = it->cell == Cell::lstm;
  bool fits = true;
  const auto data = [&](nb::handle object, std::vector<int64_t> shape) -> void* {
    const TensorView view(object, exchange_api);
    if (!view.exists()) return nullptr;
    fits = fits && view.dtype() == it->dtype && view.is_dense(shape);
    return view.data();
  };
  it->grad_h = data(grad_h, {rows, n});
  it->h = data(h, {rows, n}), it->saved = data(saved, {rows, saved_of(it->cell) * n});
  if (has_c) it->grad_c = data(grad_c, {rows, n}), it->c0 = data(c0, {operands.call.rows, n}), it->c = data(c, {rows, n});
  if (!fits) return nb::none();
  nb::list results;
  const auto result = [&](bool wanted, std::vector<int64_t> shape) -> void* {
    if (!wanted) {
      results.append(nb::none());
      return nullptr;
    }
    NewTensor tensor = new_tensor(pool, std::move(shape), it->dtype, exchange_api);
    results.append(std::move(tensor.object));
    return tensor.data;
  };
  it->grad_gates = result(true, {rows, maps * n});
  it->grad_mixed = result(it->cell == Cell::gru_reset_after, {rows, maps * n});
  it->grad_h0 = result(true, {operands.call.rows, n});
  it->grad_c0 = result(has_c, {operands.call.rows, n});
  {
    const nb::gil_scoped_release release;
    chosen.load()->recurrence_backward(*it);
  }
  return results;
}

}  // namespace
}  // namespace pairmix

NB_MODULE(_kernels, m) {
  using namespace pairmix;
  nb::set_leak_warnings(false);  // plans live as long as the schedules that are kept for the whole process
  use_exchange_api(true);
  nb::class_<Plan>(m, "Plan").def("__init__", [](Plan* plan, nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig> order) {
    new (plan) Plan(order.data(), static_cast<int32_t>(order.shape(0)), static_cast<int32_t>(order.shape(1)));
  });
  m.def("targets", targets);
  m.def("target", [] { return std::string(chosen.load()->name); });
  m.def("use_target", use_target);
  m.def("use_exchange_api", use_exchange_api);
  m.def("empty_cache", [] {
    const nb::gil_scoped_release release;
    pool.clear();
    Arena::free_idle();
    return_freed_memory();
  });
  m.def("multiply_adds_per_second", [](int threads) {
    nb::gil_scoped_release release;
    return chosen.load()->multiply_adds_per_second(usable_threads(threads));
  });
  // nanobind wants to be told that None is welcome.
  const auto any = nb::arg().none();
  m.def("fits", fits, nb::arg(), nb::arg(), nb::arg(), any, any, any, any, nb::arg(), any);
  m.def("forward", forward, nb::arg(), nb::arg(), nb::arg(), any, any, any, any, nb::arg(), any, nb::arg());
  m.def("backward", backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), any, any, any, nb::arg(), any, nb::arg(), nb::arg());
  m.def("recurrence_forward", recurrence_forward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        any, any, any, any, nb::arg());
  m.def("recurrence_backward", recurrence_backward, nb::arg(), nb::arg(), any, any, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        any, any, any, any, nb::arg(), nb::arg(), nb::arg(), nb::arg());
}
