// One call of the operator, and the builds of the kernel that can run it.
#pragma once

#include <cstdint>

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
  int32_t in_features, out_features;
  int32_t threads;
  Rows x, y;        // y is written by forward
  Rows grad, grad_x;  // backward: that of y, and that of x, which is written if not null
  Parameters parameters;
  Parameters gradients;  // backward: written where not null
};

struct Kernels {
  const char* name;
  void (*forward)(const Call&);
  void (*backward)(const Call&);
  double (*multiply_adds_per_second)(int32_t threads);  // the most that this build could do on this machine
};

// Each build of kernel.cpp defines one of these.
extern const Kernels kernels_avx512, kernels_avx2, kernels_baseline;

}  // namespace pairmix
