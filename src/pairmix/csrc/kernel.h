// One call of the operator, and the builds of the kernel that can run it.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace pairmix {

enum class Dtype : int32_t { float32, float64, bfloat16, float16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

// A matrix in memory, with strides counted in numbers.
struct Rows {
  void* data;
  int64_t row_stride, column_stride;
  bool adds = false;  // what is written is added to what is there
};

// The parameters, or their gradients; null where there are none.
struct Parameters {
  void *blocks, *d_in, *d_out, *bias, *residual_scale;
};

struct Call {
  const Plan* plan;
  Dtype dtype;             // of the rows
  bool halves_everywhere;  // parameters have that dtype too; otherwise they are float64 if the rows are, and else float32
  bool rotation;
  int64_t rows;
  int64_t steps = 1;  // how often there are so many rows, one after the other
  int32_t in_features, out_features;
  int32_t threads;
  Rows x, y;        // y is written by forward
  Rows grad, grad_x;  // backward: that of y, and that of x, which is written if not null
  Parameters parameters;
  Parameters gradients;  // backward: written where not null
};

enum class Cell : int32_t { tanh, relu, linear, gru, gru_reset_after, lstm };

constexpr int64_t gates_of(Cell cell) {
  return cell == Cell::lstm ? 4 : cell == Cell::gru || cell == Cell::gru_reset_after ? 3 : 1;
}

// How many numbers a unit of the state leaves for backward: the gates, and for `gru_reset_after` the mixed state.
constexpr int64_t saved_of(Cell cell) {
  return cell == Cell::lstm || cell == Cell::gru_reset_after ? 4 : cell == Cell::gru ? 3 : 0;
}

// A recurrent network over all steps of a batch of sequences. The rows of a step are those of the first batch_sizes[step]
// sequences; everything is dense, float32 or float64.
struct Recurrence {
  const Plan* plan;
  Dtype dtype;
  bool rotation;
  Cell cell;
  int32_t threads;
  std::vector<int64_t> batch_sizes;  // none larger than the one before
  Parameters maps[4];                // of the state, one for every gate
  void *h0, *c0;                     // [batch, n], before the first step
  void* gates;                       // [rows, gates * n]: what the inputs contribute
  void *h, *c, *saved;               // [rows, ...], after every step, written by forward
  void *grad_h, *grad_c;             // [rows, n], read by backward; may be null
  void* grad_gates;                  // [rows, gates * n], written by backward
  void* grad_mixed;                  // likewise, that of what the maps contribute, where it is another
  void *grad_h0, *grad_c0;           // [batch, n], written by backward
};

enum class Activation : int32_t { relu, gelu, gelu_tanh, silu };

// down(activation(up x)), or with two wide maps down(activation(up[0] x) * (up[1] x)). All have the same width, which is that of
// the hidden layer. x and grad_x are those of the wide maps, y and grad those of the narrow one; its grad_x
// only says that there is one.
struct FeedForward {
  Call up[2];
  int32_t ups;
  Call down;
  Activation activation;
};

struct Kernels {
  const char* name;
  void (*forward)(const Call&);
  void (*backward)(const Call&);
  void (*recurrence_forward)(const Recurrence&);
  void (*recurrence_backward)(const Recurrence&);
  // Whether they have run: not if the wide maps and the narrow one have different lanes.
  bool (*feed_forward)(const FeedForward&);
  bool (*feed_forward_backward)(const FeedForward&);
  double (*multiply_adds_per_second)(int32_t threads);  // the most that this build could do on this machine
};

// Each build of kernel.cpp defines one of these.
extern const Kernels kernels_avx512, kernels_avx2, kernels_baseline;

}  // namespace pairmix
