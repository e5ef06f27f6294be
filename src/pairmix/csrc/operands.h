// The tensors of a call from Python, checked.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <vector>

#include "kernel.h"
#include "tensors.h"

namespace pairmix {

// The tensors of a call, as long as they are what the kernels take: on the CPU, of one dtype (or parameters in float32 while
// the rows are halves), parameters dense, rows evenly spaced, shapes that fit. Of several maps the parameters have one more
// dimension in front, and the outputs are side by side.
class Operands {
 public:
  // `parameters` is a tuple with the fields of pairmix.ops.Parameters. Without `maps` they are those of a single operator, and
  // have no dimension in front. Without `out_features` it is what `grad` says.
  Operands(const Plan& plan, nb::handle x, nb::handle grad, nb::tuple parameters, bool rotation,
           std::optional<int64_t> given_out_features, std::optional<int64_t> maps)
      : x(x), maps(maps.value_or(1)), grad_(grad) {
    if (maps) front_ = {*maps};
    const int64_t n = plan.n(), stages = plan.given_stages();
    const std::optional<Dtype> dtype = this->x.dtype();
    if (nb::len(parameters) != 5 || !dtype || this->x.dimensions() < 1) return;
    if (this->maps < 1 || this->maps > std::numeric_limits<int32_t>::max()) return;
    if (grad_.exists() && grad_.dimensions() < 1) return;
    const int64_t out_features = given_out_features ? *given_out_features : grad_.size(grad_.dimensions() - 1) / this->maps;
    if (out_features < 1 || out_features > n) return;
    call.plan = &plan, call.dtype = *dtype, call.out_features = static_cast<int32_t>(out_features);
    const int64_t in_features = this->x.size(this->x.dimensions() - 1);
    if (in_features < 1 || in_features > n || !rows(this->x, call.x, call.rows)) return;
    call.in_features = static_cast<int32_t>(in_features);
    if (grad_.exists()) {
      int64_t count;
      if (grad_.dtype() != dtype || !rows(grad_, call.grad, count) || count != call.rows) return;
      if (grad_.size(grad_.dimensions() - 1) != this->maps * out_features) return;
    }
    const TensorView given(parameters[0]);
    if (given.dtype() != *dtype && (given.dtype() != Dtype::float32 || *dtype == Dtype::float64)) return;
    of_parameters = *given.dtype();
    call.halves_everywhere = of_parameters == Dtype::bfloat16 || of_parameters == Dtype::float16;
    call.rotation = rotation;
    Parameters& own = call.parameters;
    fits = given.is_dense(shape_of_blocks()) && parameter(parameters[1], n, own.d_in) && parameter(parameters[2], n, own.d_out) &&
           parameter(parameters[3], out_features, own.bias) && parameter(parameters[4], stages, own.residual_scale) &&
           (!own.residual_scale || n % 2);
    own.blocks = given.data();
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
    const TensorView view(object);
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

}  // namespace pairmix
