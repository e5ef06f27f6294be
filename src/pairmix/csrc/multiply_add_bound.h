// How many multiply-adds a second the machine can do at all: the bound that the kernels are measured against.
#pragma once

#include <omp.h>

#include <cstdint>

#include "simd.h"

namespace pairmix {
namespace {

// Enough independent sums to keep every multiplier busy, few enough to stay in registers with the two factors.
constexpr int kSums = 12;
constexpr int64_t kSteps = int64_t{1} << 21;  // some milliseconds

// The compiler must neither know the numbers nor see that the result is unused.
template <class V>
inline void hide(V& value) {
  asm volatile("" : "+m"(value));
}

template <class T>
void multiply_adds() {
  Vector<T> sums[kSums] = {}, factor = T(0.5) - Vector<T>{}, addend = T(1) - Vector<T>{};
  hide(factor), hide(addend), hide(sums);
  for (int64_t step = 0; step < kSteps; ++step)
    for (int k = 0; k < kSums; ++k) sums[k] = sums[k] * factor + addend;
  hide(sums);
}

double multiply_adds_per_second(int32_t threads) {
  double seconds = 0;
#pragma omp parallel num_threads(threads) reduction(max : seconds)
  {
#pragma omp barrier
    const double start = omp_get_wtime();
    multiply_adds<float>();
    seconds = omp_get_wtime() - start;
  }
  return double(kSteps) * kSums * Simd<float>::width * threads / seconds;
}

}  // namespace
}  // namespace pairmix
