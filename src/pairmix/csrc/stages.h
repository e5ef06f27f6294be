// The stages on a component, forward and backward: where the time goes.
#pragma once

#include "plan.h"
#include "simd.h"

namespace pairmix {
namespace {

// How the pairs of a stage are computed. `general` pairs have packed coefficients a, b, c, d; `rotation` pairs cos, sin;
// pairs `inside` a unit p and q, with which lane k becomes p[k] z[k] + q[k] z[k ^ stride]. Three such stages in a row with
// the strides 1, 2 and 4 are one `inside_1_2_4`, whose vectors stay in registers.
enum class Kind { general, rotation, inside, inside_1_2_4 };

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

// The block of a unit with another: its coefficients, and the sums that become their gradients.
template <class T, int kLanes>
struct GeneralBlock {
  Vector<T> a, b, c, d, ga{}, gb{}, gc{}, gd{};

  explicit GeneralBlock(const T* coeffs)
      : a(spread<kLanes>(coeffs)),
        b(spread<kLanes>(coeffs + kLanes)),
        c(spread<kLanes>(coeffs + 2 * kLanes)),
        d(spread<kLanes>(coeffs + 3 * kLanes)) {}

  Vector<T> first(Vector<T> x1, Vector<T> x2) const { return a * x1 + b * x2; }
  Vector<T> second(Vector<T> x1, Vector<T> x2) const { return c * x1 + d * x2; }
  Vector<T> first_transposed(Vector<T> g1, Vector<T> g2) const { return a * g1 + c * g2; }
  Vector<T> second_transposed(Vector<T> g1, Vector<T> g2) const { return b * g1 + d * g2; }

  void add(Vector<T> x1, Vector<T> x2, Vector<T> g1, Vector<T> g2) {
    ga += g1 * x1;
    gb += g1 * x2;
    gc += g2 * x1;
    gd += g2 * x2;
  }
  void add_gradients_to(T* gradients) const {
    add_folded<kLanes, T>(gradients, ga);
    add_folded<kLanes, T>(gradients + kLanes, gb);
    add_folded<kLanes, T>(gradients + 2 * kLanes, gc);
    add_folded<kLanes, T>(gradients + 3 * kLanes, gd);
  }
};

// The gradient of an angle is cos * across - sin * along, with across = g2 x1 - g1 x2 and along = g1 x1 + g2 x2.
template <class T, int kLanes>
struct RotationBlock {
  Vector<T> cos, sin, across{}, along{};

  explicit RotationBlock(const T* coeffs) : cos(spread<kLanes>(coeffs)), sin(spread<kLanes>(coeffs + kLanes)) {}

  Vector<T> first(Vector<T> x1, Vector<T> x2) const { return cos * x1 - sin * x2; }
  Vector<T> second(Vector<T> x1, Vector<T> x2) const { return sin * x1 + cos * x2; }
  Vector<T> first_transposed(Vector<T> g1, Vector<T> g2) const { return cos * g1 + sin * g2; }
  Vector<T> second_transposed(Vector<T> g1, Vector<T> g2) const { return cos * g2 - sin * g1; }

  void add(Vector<T> x1, Vector<T> x2, Vector<T> g1, Vector<T> g2) {
    across += g2 * x1;
    across -= g1 * x2;
    along += g1 * x1;
    along += g2 * x2;
  }
  void add_gradients_to(T* gradients) const {
    add_folded<kLanes, T>(gradients, across);
    add_folded<kLanes, T>(gradients + kLanes, along);
  }
};

template <class Block, class T, int kLanes>
void pairs_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  for (int32_t p = 0; p < stage.units / 2; ++p) {
    const Block block(stage.coeffs + int64_t{p} * 4 * kLanes);
    const auto [i, j] = stage.pairs[p];
    const Vector<T>*x1 = from[i], *x2 = from[j];
    Vector<T>*y1 = to[i], *y2 = to[j];
#pragma GCC unroll 4
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto first = x1[r], second = x2[r];
      y1[r] = block.first(first, second);
      y2[r] = block.second(first, second);
    }
  }
}

// g becomes the gradient of the stage's input z; those of the coefficients are added up.
template <class Block, class T, int kLanes, bool kParameters>
void pairs_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  for (int32_t p = 0; p < stage.units / 2; ++p) {
    const int64_t at = int64_t{p} * 4 * kLanes;
    Block block(stage.coeffs + at);
    const auto [i, j] = stage.pairs[p];
    const Vector<T>*x1 = kParameters ? z[i] : nullptr, *x2 = kParameters ? z[j] : nullptr;
    Vector<T>*g1 = g[i], *g2 = g[j];
#pragma GCC unroll 2
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto first = g1[r], second = g2[r];
      if constexpr (kParameters) block.add(x1[r], x2[r], first, second);
      g1[r] = block.first_transposed(first, second);
      g2[r] = block.second_transposed(first, second);
    }
    if constexpr (kParameters) block.add_gradients_to(stage.gradients + at);
  }
}

// p[k] z[k] + q[k] z[k ^ kStride]
template <class T, int kStride>
inline Vector<T> crossed(Vector<T> p, Vector<T> q, Vector<T> z) {
  return p * z + q * exchange<kStride, T>(z);
}

template <class T, int kLanes, int... kStrides>
void inside_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  constexpr int count = sizeof...(kStrides);
  const T* coeffs = stage.coeffs;
  for (int32_t unit = 0; unit < stage.units; ++unit, coeffs += 2 * kLanes) {
    Vector<T> p[count], q[count];
    for (int s = 0; s < count; ++s) {
      const T* of_stage = coeffs + int64_t{s} * 2 * kLanes * stage.units;
      p[s] = spread<kLanes>(of_stage), q[s] = spread<kLanes>(of_stage + kLanes);
    }
    const Vector<T>* x = from[unit];
    Vector<T>* y = to[unit];
#pragma GCC unroll 4
    for (int32_t r = 0; r < stage.depth; ++r) {
      auto z = x[r];
      int s = 0;
      ((z = crossed<T, kStrides>(p[s], q[s], z), ++s), ...);
      y[r] = z;
    }
  }
}

template <class T, int kStride, bool kParameters>
inline Vector<T> crossed_back(Vector<T> p, Vector<T> q, Vector<T> z, Vector<T> g, Vector<T>& gp, Vector<T>& gq) {
  if constexpr (kParameters) {
    gp += g * z;
    gq += g * exchange<kStride, T>(z);
  }
  return p * g + exchange<kStride, T>(q * g);
}

template <class T, int kLanes, bool kParameters, int... kStrides>
void inside_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  constexpr int count = sizeof...(kStrides);
  constexpr int strides[] = {kStrides...};
  const int64_t stage_size = int64_t{2} * kLanes * stage.units;
  for (int32_t unit = 0; unit < stage.units; ++unit) {
    const int64_t at = int64_t{unit} * 2 * kLanes;
    Vector<T> p[count], q[count], gp[count] = {}, gq[count] = {};
    for (int s = 0; s < count; ++s) {
      p[s] = spread<kLanes>(stage.coeffs + s * stage_size + at);
      q[s] = spread<kLanes>(stage.coeffs + s * stage_size + at + kLanes);
    }
    const Vector<T>* x = kParameters ? z[unit] : nullptr;
    Vector<T>* gy = g[unit];
    for (int32_t r = 0; r < stage.depth; ++r) {
      auto gradient = gy[r];
      Vector<T> inputs[count] = {};
      if constexpr (kParameters) {
        inputs[0] = x[r];
        if constexpr (count > 1) inputs[1] = crossed<T, strides[0]>(p[0], q[0], inputs[0]);
        if constexpr (count > 2) inputs[2] = crossed<T, strides[1]>(p[1], q[1], inputs[1]);
      }
      if constexpr (count > 2)
        gradient = crossed_back<T, strides[2], kParameters>(p[2], q[2], inputs[2], gradient, gp[2], gq[2]);
      if constexpr (count > 1)
        gradient = crossed_back<T, strides[1], kParameters>(p[1], q[1], inputs[1], gradient, gp[1], gq[1]);
      gy[r] = crossed_back<T, strides[0], kParameters>(p[0], q[0], inputs[0], gradient, gp[0], gq[0]);
    }
    if constexpr (kParameters)
      for (int s = 0; s < count; ++s) {
        add_folded<kLanes, T>(stage.gradients + s * stage_size + at, gp[s]);
        add_folded<kLanes, T>(stage.gradients + s * stage_size + at + kLanes, gq[s]);
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
    pairs_forward<GeneralBlock<T, kLanes>, T, kLanes>(stage, from, to);
  else if (stage.kind == Kind::rotation)
    pairs_forward<RotationBlock<T, kLanes>, T, kLanes>(stage, from, to);
  else if (stage.kind == Kind::inside)
    with_stride<kLanes>(stage.stride, [&](auto stride) { inside_forward<T, kLanes, stride()>(stage, from, to); });
  else if constexpr (kLanes >= 8)
    inside_forward<T, kLanes, 1, 2, 4>(stage, from, to);
}

template <class T, int kLanes, bool kParameters>
inline void stage_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  if (stage.kind == Kind::general)
    pairs_backward<GeneralBlock<T, kLanes>, T, kLanes, kParameters>(stage, z, g);
  else if (stage.kind == Kind::rotation)
    pairs_backward<RotationBlock<T, kLanes>, T, kLanes, kParameters>(stage, z, g);
  else if (stage.kind == Kind::inside)
    with_stride<kLanes>(stage.stride, [&](auto stride) {
      inside_backward<T, kLanes, kParameters, stride()>(stage, z, g);
    });
  else if constexpr (kLanes >= 8)
    inside_backward<T, kLanes, kParameters, 1, 2, 4>(stage, z, g);
}

}  // namespace
}  // namespace pairmix
