// What a build of the kernels can do. Compiled once for every instruction set, with PAIRMIX_TARGET naming it.
#include "kernel.h"

#include <utility>

#include "feed_forward.h"
#include "few_rows.h"
#include "half_precision.h"
#include "multiply_add_bound.h"
#include "recurrence.h"
#include "run.h"
#include "scratch.h"

namespace pairmix {
namespace {

// What is left to do with the diagonals apart: see Coeffs.
enum class Left { nothing, gradients_of_parameters, everything };

template <class S, class T, int kLanes = Simd<T>::width>
Left run_with_lanes(const Call& call, bool backward, int32_t lanes) {
  if (lanes == kLanes) {
    Run<S, T, kLanes> run(call, backward);
    bool all = true;
    if (backward)
      all = run.backward();
    else
      run.forward();
    return !run.is_exact() ? Left::everything : all ? Left::nothing : Left::gradients_of_parameters;
  } else if constexpr (kLanes > 1) {
    return run_with_lanes<S, T, kLanes / 2>(call, backward, lanes);
  }
  return Left::nothing;
}

template <class S, class T>
void run(const Call& call, bool backward) {
  if (!backward && few_rows_forward<S, T>(call)) return;
  const int32_t lanes = call.plan->lanes(Simd<T>::width);
  const Left left = run_with_lanes<S, T>(call, backward, lanes);
  if (left == Left::nothing) return;
  Call apart = call;
  apart.plan = &call.plan->with_scales_apart();
  if (left == Left::gradients_of_parameters) apart.grad_x.data = apart.gradients.bias = nullptr;
  run_with_lanes<S, T>(apart, backward, lanes);
}

// Parameters that are halves are widened before, and their gradients narrowed after the call.
template <class S>
void run_with_halves(const Call& call, bool backward) {
  if (!call.halves_everywhere) return run<S, float>(call, backward);
  const int64_t n = call.plan->n(), stages = call.plan->given_stages(), pairs = call.plan->pairs();
  const std::pair<void* Parameters::*, int64_t> members[] = {{&Parameters::blocks, stages * (call.rotation ? 1 : 4) * pairs},
                                                             {&Parameters::d_in, n},
                                                             {&Parameters::d_out, n},
                                                             {&Parameters::bias, call.out_features},
                                                             {&Parameters::residual_scale, stages}};
  Call in_float = call;
  Arena in_between;
  lay_out_in(in_between, [&](Parts& parts) {
    for (const auto& [member, count] : members) {
      if (call.parameters.*member) in_float.parameters.*member = parts.take<float>(count);
      if (call.gradients.*member) in_float.gradients.*member = parts.take<float>(count);
    }
  });
  for (const auto& [member, count] : members)
    if (const void* from = call.parameters.*member)
      widen(static_cast<const S*>(from), count, static_cast<float*>(in_float.parameters.*member));
  run<S, float>(in_float, backward);
  for (const auto& [member, count] : members)
    if (void* to = call.gradients.*member)
      narrow(static_cast<const float*>(in_float.gradients.*member), count, static_cast<S*>(to));
}

void dispatch(const Call& call, bool backward) {
  switch (call.dtype) {
    case Dtype::float32: return run<float, float>(call, backward);
    case Dtype::float64: return run<double, double>(call, backward);
    case Dtype::bfloat16: return run_with_halves<BFloat16>(call, backward);
    case Dtype::float16: return run_with_halves<Float16>(call, backward);
  }
}

void forward(const Call& call) { dispatch(call, false); }
void backward(const Call& call) { dispatch(call, true); }

template <class T, int kLanes = Simd<T>::width>
void recur_with_lanes(const Recurrence& recurrence, bool backward, int32_t lanes) {
  if (lanes == kLanes) {
    RecurrentRun<T, kLanes> run(recurrence, backward);
    backward ? run.backward() : run.forward();
  } else if constexpr (kLanes > 1) {
    recur_with_lanes<T, kLanes / 2>(recurrence, backward, lanes);
  }
}

void recur(const Recurrence& recurrence, bool backward) {
  if (recurrence.dtype == Dtype::float64)
    recur_with_lanes<double>(recurrence, backward, recurrence.plan->lanes(Simd<double>::width));
  else
    recur_with_lanes<float>(recurrence, backward, recurrence.plan->lanes(Simd<float>::width));
}

void recurrence_forward(const Recurrence& recurrence) { recur(recurrence, false); }
void recurrence_backward(const Recurrence& recurrence) { recur(recurrence, true); }

// Returns whether it was exact; if not, the diagonals have to be apart.
template <class S, class T, int kLanes = Simd<T>::width>
bool feed_with_lanes(const FeedForward& block, bool backward, int32_t lanes) {
  if (lanes == kLanes) {
    FeedForwardRun<S, T, kLanes> run(block, backward);
    if (!run.is_exact()) return false;
    if (backward) return run.backward();
    run.forward();
  } else if constexpr (kLanes > 1) {
    return feed_with_lanes<S, T, kLanes / 2>(block, backward, lanes);
  }
  return true;
}

template <class S, class T>
bool feed(const FeedForward& block, bool backward) {
  const int32_t lanes = block.down.plan->lanes(Simd<T>::width);
  if (block.up[0].plan->lanes(Simd<T>::width) != lanes) return false;
  if (feed_with_lanes<S, T>(block, backward, lanes)) return true;
  FeedForward apart = block;
  for (Call* call : {&apart.up[0], &apart.up[1], &apart.down})
    if (call->plan) call->plan = &call->plan->with_scales_apart();
  feed_with_lanes<S, T>(apart, backward, lanes);
  return true;
}

bool feed(const FeedForward& block, bool backward) {
  switch (block.down.dtype) {
    case Dtype::float32: return feed<float, float>(block, backward);
    case Dtype::float64: return feed<double, double>(block, backward);
    case Dtype::bfloat16: return feed<BFloat16, float>(block, backward);
    case Dtype::float16: return feed<Float16, float>(block, backward);
  }
  return false;
}

bool feed_forward(const FeedForward& block) { return feed(block, false); }
bool feed_forward_backward(const FeedForward& block) { return feed(block, true); }

}  // namespace

#define PAIRMIX_STRING(name) #name
#define PAIRMIX_KERNELS(target) \
  const Kernels kernels_##target = {PAIRMIX_STRING(target), forward, backward, recurrence_forward, recurrence_backward, \
                                    feed_forward, feed_forward_backward, multiply_adds_per_second};
#define PAIRMIX_EXPANDED(target) PAIRMIX_KERNELS(target)
PAIRMIX_EXPANDED(PAIRMIX_TARGET)

}  // namespace pairmix
