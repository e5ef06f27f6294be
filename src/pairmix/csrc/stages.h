// The stages on a component, forward and backward: where the time goes.
#pragma once

#include "plan.h"
#include "simd.h"

namespace pairmix {
namespace {

// How the pairs of a stage are computed. `general` pairs have packed coefficients a, b, c, d; `rotation` pairs cos, sin;
// pairs `inside` a unit p and q, with which lane k becomes p[k] z[k] + q[k] z[k ^ stride].
enum class Kind { general, rotation, inside };

// Everything that a stage of a component needs. The pointers lead to the units of the component, `depth` vectors each.
template <class T>
struct Stage {
  Kind kind;
  int32_t stride;
  const Pair* pairs;
  int32_t units;
  const T* coeffs;
  T* gradients;  // of the coefficients; null if nobody asked for them
  int32_t depth;
};

template <class T>
using Units = Vector<T>* const*;

template <class T, int kLanes>
void general_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  const T* coeffs = stage.coeffs;
  for (int32_t p = 0; p < stage.units / 2; ++p, coeffs += 4 * kLanes) {
    const auto a = spread<kLanes>(coeffs), b = spread<kLanes>(coeffs + kLanes);
    const auto c = spread<kLanes>(coeffs + 2 * kLanes), d = spread<kLanes>(coeffs + 3 * kLanes);
    const auto [i, j] = stage.pairs[p];
    const Vector<T>*x1 = from[i], *x2 = from[j];
    Vector<T>*y1 = to[i], *y2 = to[j];
#pragma GCC unroll 4
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto first = x1[r], second = x2[r];
      y1[r] = a * first + b * second;
      y2[r] = c * first + d * second;
    }
  }
}

template <class T, int kLanes>
void rotation_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  const T* coeffs = stage.coeffs;
  for (int32_t p = 0; p < stage.units / 2; ++p, coeffs += 4 * kLanes) {
    const auto cos = spread<kLanes>(coeffs), sin = spread<kLanes>(coeffs + kLanes);
    const auto [i, j] = stage.pairs[p];
    const Vector<T>*x1 = from[i], *x2 = from[j];
    Vector<T>*y1 = to[i], *y2 = to[j];
#pragma GCC unroll 4
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto first = x1[r], second = x2[r];
      y1[r] = cos * first - sin * second;
      y2[r] = sin * first + cos * second;
    }
  }
}

template <class T, int kLanes, int kStride>
void inside_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  const T* coeffs = stage.coeffs;
  for (int32_t unit = 0; unit < stage.units; ++unit, coeffs += 2 * kLanes) {
    const auto p = spread<kLanes>(coeffs), q = spread<kLanes>(coeffs + kLanes);
    const Vector<T>* x = from[unit];
    Vector<T>* y = to[unit];
#pragma GCC unroll 4
    for (int32_t r = 0; r < stage.depth; ++r) y[r] = p * x[r] + q * exchange<kStride, T>(x[r]);
  }
}

// g becomes the gradient of the stage's input z; those of the coefficients are added up.
template <class T, int kLanes, bool kParameters>
void general_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  const T* coeffs = stage.coeffs;
  T* gradients = stage.gradients;
  for (int32_t p = 0; p < stage.units / 2; ++p, coeffs += 4 * kLanes) {
    const auto a = spread<kLanes>(coeffs), b = spread<kLanes>(coeffs + kLanes);
    const auto c = spread<kLanes>(coeffs + 2 * kLanes), d = spread<kLanes>(coeffs + 3 * kLanes);
    Vector<T> ga{}, gb{}, gc{}, gd{};
    const auto [i, j] = stage.pairs[p];
    const Vector<T>*x1 = kParameters ? z[i] : nullptr, *x2 = kParameters ? z[j] : nullptr;
    Vector<T>*g1 = g[i], *g2 = g[j];
#pragma GCC unroll 2
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto first = g1[r], second = g2[r];
      if constexpr (kParameters) {
        ga += first * x1[r];
        gb += first * x2[r];
        gc += second * x1[r];
        gd += second * x2[r];
      }
      g1[r] = a * first + c * second;
      g2[r] = b * first + d * second;
    }
    if constexpr (kParameters) {
      add_folded<kLanes, T>(gradients, ga);
      add_folded<kLanes, T>(gradients + kLanes, gb);
      add_folded<kLanes, T>(gradients + 2 * kLanes, gc);
      add_folded<kLanes, T>(gradients + 3 * kLanes, gd);
      gradients += 4 * kLanes;
    }
  }
}

// The gradient of an angle is cos * (g2 x1 - g1 x2) - sin * (g1 x1 + g2 x2); the two brackets are added up.
template <class T, int kLanes, bool kParameters>
void rotation_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  const T* coeffs = stage.coeffs;
  T* gradients = stage.gradients;
  for (int32_t p = 0; p < stage.units / 2; ++p, coeffs += 4 * kLanes) {
    const auto cos = spread<kLanes>(coeffs), sin = spread<kLanes>(coeffs + kLanes);
    Vector<T> across{}, along{};
    const auto [i, j] = stage.pairs[p];
    const Vector<T>*x1 = kParameters ? z[i] : nullptr, *x2 = kParameters ? z[j] : nullptr;
    Vector<T>*g1 = g[i], *g2 = g[j];
#pragma GCC unroll 2
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto first = g1[r], second = g2[r];
      if constexpr (kParameters) {
        across += second * x1[r];
        across -= first * x2[r];
        along += first * x1[r];
        along += second * x2[r];
      }
      g1[r] = cos * first + sin * second;
      g2[r] = cos * second - sin * first;
    }
    if constexpr (kParameters) {
      add_folded<kLanes, T>(gradients, across);
      add_folded<kLanes, T>(gradients + kLanes, along);
      gradients += 4 * kLanes;
    }
  }
}

template <class T, int kLanes, int kStride, bool kParameters>
void inside_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  const T* coeffs = stage.coeffs;
  T* gradients = stage.gradients;
  for (int32_t unit = 0; unit < stage.units; ++unit, coeffs += 2 * kLanes) {
    const auto p = spread<kLanes>(coeffs), q = spread<kLanes>(coeffs + kLanes);
    Vector<T> gp{}, gq{};
    const Vector<T>* x = kParameters ? z[unit] : nullptr;
    Vector<T>* gy = g[unit];
#pragma GCC unroll 2
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto gradient = gy[r];
      if constexpr (kParameters) {
        gp += gradient * x[r];
        gq += gradient * exchange<kStride, T>(x[r]);
      }
      gy[r] = p * gradient + exchange<kStride, T>(q * gradient);
    }
    if constexpr (kParameters) {
      add_folded<kLanes, T>(gradients, gp);
      add_folded<kLanes, T>(gradients + kLanes, gq);
      gradients += 2 * kLanes;
    }
  }
}

// Calls f with the stride as a compile-time constant; kLanes is larger than every stride.
template <int kLanes, int kStride = 1, class F>
inline void with_stride(int32_t stride, F f) {
  if constexpr (kStride < kLanes) {
    if (stride == kStride)
      f(std::integral_constant<int, kStride>{});
    else
      with_stride<kLanes, 2 * kStride>(stride, f);
  }
}

template <class T, int kLanes>
inline void stage_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  if (stage.kind == Kind::general)
    general_forward<T, kLanes>(stage, from, to);
  else if (stage.kind == Kind::rotation)
    rotation_forward<T, kLanes>(stage, from, to);
  else
    with_stride<kLanes>(stage.stride, [&](auto stride) { inside_forward<T, kLanes, stride()>(stage, from, to); });
}

template <class T, int kLanes, bool kParameters>
inline void stage_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  if (stage.kind == Kind::general)
    general_backward<T, kLanes, kParameters>(stage, z, g);
  else if (stage.kind == Kind::rotation)
    rotation_backward<T, kLanes, kParameters>(stage, z, g);
  else
    with_stride<kLanes>(stage.stride, [&](auto stride) {
      inside_backward<T, kLanes, stride(), kParameters>(stage, z, g);
    });
}

}  // namespace
}  // namespace pairmix
