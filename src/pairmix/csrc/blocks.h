// What a stage computes: the blocks of its pairs, with their coefficients and the sums that become their gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "simd.h"

namespace pairmix {
namespace {

// How the pairs of a stage are computed. `general` pairs have coefficients a, b, c, d; `rotation` pairs cos, sin; pairs
// `inside` a unit p and q, with which lane k becomes p[k] z[k] + q[k] z[k ^ stride]. Such stages in a row with the strides
// 1, 2, 4, ... up to half the lanes are one `inside_run`, whose vectors stay in registers. A stage that `scales` has no pairs:
// lane k becomes p[k] z[k].
//
// The coordinate that an odd width does not have is set to zero after every stage: it is multiplied by zeros, but zero times
// infinity is no zero.
enum class Kind { general, rotation, inside, inside_run, scale };

// How many stages a run has; 0 if there are too few lanes for one. With coefficients and sums of gradients a stage takes four
// registers: 16 lanes come with 32 of them.
template <int kLanes>
constexpr int kRunStages = kLanes >= 16 ? 4 : kLanes == 8 ? 3 : kLanes == 4 ? 2 : 0;

// Whether a run begins at this stage, of a schedule that has `left` more with it.
template <int kLanes>
inline bool is_run(const int32_t* stride, size_t left) {
  if (!kRunStages<kLanes> || left < kRunStages<kLanes>) return false;
  for (int s = 0; s < kRunStages<kLanes>; ++s)
    if (stride[s] != 1 << s) return false;
  return true;
}

// What may happen to a unit between two stages: nothing, or its last lane, where the padding is, becomes zero.
struct Keep {
  template <class V>
  [[gnu::always_inline]] V operator()(V v) const {
    return v;
  }
};
template <class T, int kLanes>
struct ClearPadding {
  template <size_t... I>
  static Vector<T> cleared(Vector<T> v, std::index_sequence<I...>) {
    return __builtin_shufflevector(v, Vector<T>{}, (I % kLanes == kLanes - 1 ? Simd<T>::width + I : I)...);
  }
  Vector<T> operator()(Vector<T> v) const { return cleared(v, std::make_index_sequence<Simd<T>::width>{}); }
};

// The block of a unit with another, as coefficients. It is always the product with the other unit that is rounded, so that results
// do not depend on which of them is the first.
template <class T, int kLanes>
struct GeneralMatrix {
  static constexpr int kGradients = 4;
  Vector<T> a, b, c, d;

  GeneralMatrix(const T* coeffs, int64_t row)
      : a(spread<kLanes>(coeffs)),
        b(spread<kLanes>(coeffs + row)),
        c(spread<kLanes>(coeffs + 2 * row)),
        d(spread<kLanes>(coeffs + 3 * row)) {}

  Vector<T> first(Vector<T> x1, Vector<T> x2) const { return a * x1 + rounded(b * x2); }
  Vector<T> second(Vector<T> x1, Vector<T> x2) const { return d * x2 + rounded(c * x1); }
  Vector<T> first_transposed(Vector<T> g1, Vector<T> g2) const { return a * g1 + rounded(c * g2); }
  Vector<T> second_transposed(Vector<T> g1, Vector<T> g2) const { return d * g2 + rounded(b * g1); }

  // The gradients of the coefficients follow from sums of products: of the gradients of both outputs with both inputs.
  void add_gradients_to(T* packed, Vector<T> g1x1, Vector<T> g1x2, Vector<T> g2x1, Vector<T> g2x2) const {
    const Vector<T> sums[] = {g1x1, g1x2, g2x1, g2x2};
    add_folded<kLanes, T>(packed, sums);
  }
};

// Likewise, with the sums that become the gradients.
template <class T, int kLanes>
struct GeneralBlock : GeneralMatrix<T, kLanes> {
  using Matrix = GeneralMatrix<T, kLanes>;
  using Matrix::Matrix;
  Vector<T> ga{}, gb{}, gc{}, gd{};

  // x are inputs, g the gradients of outputs, h those of inputs.
  void add(Vector<T> x1, Vector<T> x2, Vector<T> g1, Vector<T> g2, Vector<T>, Vector<T>) {
    ga += g1 * x1;
    gb += g1 * x2;
    gc += g2 * x1;
    gd += g2 * x2;
  }
  void add_gradients_to(T* packed) const { Matrix::add_gradients_to(packed, ga, gb, gc, gd); }
};

template <class T, int kLanes>
struct RotationMatrix {
  static constexpr int kGradients = 1;
  Vector<T> cos, sin;

  RotationMatrix(const T* coeffs, int64_t row) : cos(spread<kLanes>(coeffs)), sin(spread<kLanes>(coeffs + row)) {}

  Vector<T> first(Vector<T> x1, Vector<T> x2) const { return cos * x1 - rounded(sin * x2); }
  Vector<T> second(Vector<T> x1, Vector<T> x2) const { return cos * x2 + rounded(sin * x1); }
  Vector<T> first_transposed(Vector<T> g1, Vector<T> g2) const { return cos * g1 + rounded(sin * g2); }
  Vector<T> second_transposed(Vector<T> g1, Vector<T> g2) const { return cos * g2 - rounded(sin * g1); }

  void add_gradients_to(T* packed, Vector<T> g1x1, Vector<T> g1x2, Vector<T> g2x1, Vector<T> g2x2) const {
    const Vector<T> sums[] = {cos * (g2x1 - g1x2) - sin * (g1x1 + g2x2)};
    add_folded<kLanes, T>(packed, sums);
  }
};

// A turn of y is the same turn of x, so the gradient of the angle is x cross h, where h is the gradient of x: g turned back.
template <class T, int kLanes>
struct RotationBlock : RotationMatrix<T, kLanes> {
  using Matrix = RotationMatrix<T, kLanes>;
  using Matrix::Matrix;
  Vector<T> along{}, against{};  // two sums, so that one addition need not wait for the other

  void add(Vector<T> x1, Vector<T> x2, Vector<T>, Vector<T>, Vector<T> h1, Vector<T> h2) {
    along += h2 * x1;
    against += h1 * x2;
  }
  void add_gradients_to(T* packed) const {
    const Vector<T> sums[] = {along - against};
    add_folded<kLanes, T>(packed, sums);
  }
};

// p[k] z[k] + q[k] z[k ^ kStride]
template <class T, int kStride>
inline Vector<T> crossed(Vector<T> p, Vector<T> q, Vector<T> z) {
  return q * exchange<kStride, T>(z) + rounded(p * z);  // which need not wait for the exchange
}

// The blocks inside a unit, at one stage or at several in a row: their coefficients, and the sums that become their
// gradients.
template <class T, int kLanes, int... kStrides>
struct InsideBlock {
  static constexpr int count = sizeof...(kStrides);
  static constexpr int stride(int s) {
    const int all[] = {kStrides...};
    return all[s];
  }
  Vector<T> p[count], q[count], gp[count] = {}, gq[count] = {};  // the sums for q at the lanes that it exchanges

  [[gnu::always_inline]] InsideBlock(const T* coeffs, int64_t stage_size) {
    for (int s = 0; s < count; ++s, coeffs += stage_size) p[s] = spread<kLanes>(coeffs), q[s] = spread<kLanes>(coeffs + kLanes);
  }

  template <int kStages = count, class AfterStage = Keep>
  [[gnu::always_inline]] Vector<T> forward(Vector<T> z, AfterStage after_stage = {}) const {
    if constexpr (kStages > 0) {
      constexpr int s = kStages - 1;
      z = after_stage(crossed<T, stride(s)>(p[s], q[s], forward<s>(z, after_stage)));
    }
    return z;
  }

  // From the gradients of outputs to those of the inputs z, for some vectors. Stage by stage, so that the coefficients and sums of
  // one stage are all that takes registers.
  template <bool kParameters, int kVectors, class AfterStage = Keep>
  [[gnu::always_inline]] void backward(const Vector<T>* z, Vector<T>* g, AfterStage after_stage = {}) {
    Vector<T> inputs[kParameters ? count : 1][kVectors];
    if constexpr (kParameters) {
      for (int k = 0; k < kVectors; ++k) inputs[0][k] = z[k];
      keep_inputs<kVectors>(inputs, after_stage);
    }
    walk_back<kParameters, kVectors>(inputs, g, after_stage);
  }

  template <int kStage = 0>
  [[gnu::always_inline]] void add_gradients_to(T* packed, int64_t stage_size) const {
    if constexpr (kStage < count) {
      const Vector<T> sums[] = {gp[kStage], exchange<stride(kStage), T>(gq[kStage])};
      add_folded<kLanes, T>(packed, sums);
      add_gradients_to<kStage + 1>(packed + stage_size, stage_size);
    }
  }

 private:
  // From the inputs of the first stage those of the others.
  template <int kVectors, int kStage = 0, class Inputs, class AfterStage>
  [[gnu::always_inline]] void keep_inputs(Inputs& inputs, [[maybe_unused]] AfterStage after_stage) const {
    if constexpr (kStage + 1 < count) {
      for (int k = 0; k < kVectors; ++k)
        inputs[kStage + 1][k] = after_stage(crossed<T, stride(kStage)>(p[kStage], q[kStage], inputs[kStage][k]));
      keep_inputs<kVectors, kStage + 1>(inputs, after_stage);
    }
  }

  // From the gradients of the outputs of these stages to those of their inputs.
  template <bool kParameters, int kVectors, int kStages = count, class Inputs, class AfterStage>
  [[gnu::always_inline]] void walk_back(const Inputs& inputs, Vector<T>* g, AfterStage after_stage) {
    if constexpr (kStages > 0) {
      constexpr int s = kStages - 1;
      const Vector<T> transposed = exchange<stride(s), T>(q[s]);
#pragma GCC unroll 8
      for (int k = 0; k < kVectors; ++k) {
        const Vector<T> exchanged = exchange<stride(s), T>(g[k]);
        if constexpr (kParameters) {
          gp[s] += g[k] * inputs[s][k];
          gq[s] += exchanged * inputs[s][k];
        }
        g[k] = after_stage(transposed * exchanged + rounded(p[s] * g[k]));
      }
      walk_back<kParameters, kVectors, s>(inputs, g, after_stage);
    }
  }
};

template <class T, int kLanes, size_t... I>
InsideBlock<T, kLanes, (1 << I)...> run_block(std::index_sequence<I...>);
template <class T, int kLanes>
using RunBlock = decltype(run_block<T, kLanes>(std::make_index_sequence<kRunStages<kLanes>>{}));

// A unit on its own, scaled.
template <class T, int kLanes>
struct ScaleBlock {
  Vector<T> p, gp{};

  ScaleBlock(const T* coeffs, int64_t) : p(spread<kLanes>(coeffs)) {}

  template <class AfterStage>
  Vector<T> forward(Vector<T> z, AfterStage after_stage) const {
    return after_stage(p * z);
  }
  template <bool kParameters, int kVectors, class AfterStage>
  void backward(const Vector<T>* z, Vector<T>* g, AfterStage after_stage) {
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kParameters) gp += g[k] * z[k];
      g[k] = after_stage(p * g[k]);
    }
  }
  void add_gradients_to(T* packed, int64_t) const {
    const Vector<T> sums[] = {gp};
    add_folded<kLanes, T>(packed, sums);
  }
};

}  // namespace
}  // namespace pairmix
