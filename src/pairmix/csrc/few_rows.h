// Forward for a few rows, one at a time, straight from where the parameters are.
//
// Coefficients are then read about as often as they are used, so to pack them, and to bring rows into tiles, would take longer
// than all the rest.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernel.h"
#include "scratch.h"
#include "simd.h"
#include "sincos.h"
#include "stages.h"
#include "tiles.h"

namespace pairmix {
namespace {

constexpr int64_t kFewRows = 3;

// The coefficients of as many pairs as a vector has lanes.
template <class T, bool kRotation>
struct PairVector {
  Vector<T> a, b, c, d;

  // `blocks` are those of a stage.
  PairVector(const T* blocks, int64_t pairs, int64_t first) {
    if constexpr (kRotation) {
      T cos[Simd<T>::width], sin[Simd<T>::width];
      fill_sincos(blocks + first, Simd<T>::width, cos, sin);
      a = d = load(cos), c = load(sin), b = -c;
    } else {
      const T* row = blocks + first;
      a = load(row), b = load(row + pairs), c = load(row + 2 * pairs), d = load(row + 3 * pairs);
    }
  }

  void apply(Vector<T>& first, Vector<T>& second) const {
    const Vector<T> mixed = a * first + rounded(b * second);
    second = d * second + rounded(c * first);
    first = mixed;
  }
};

// Two vectors of neighbouring coordinates as the first and the second members of pairs whose lanes are kStride apart, and back.
template <class T, int kStride>
struct PairedLanes {
  static constexpr int width = Simd<T>::width;
  // From the number of a pair to the place of its first member, among those of both vectors, and back.
  static constexpr int place(int pair) { return pair / kStride * 2 * kStride + pair % kStride; }
  static constexpr int source(int place) {
    return place / (2 * kStride) * kStride + place % kStride + (place & kStride ? width : 0);
  }

  template <size_t... I>
  static void split(Vector<T>& a, Vector<T>& b, std::index_sequence<I...>) {
    const Vector<T> first = __builtin_shufflevector(a, b, place(I)...);
    b = __builtin_shufflevector(a, b, (place(I) + kStride)...);
    a = first;
  }
  template <size_t... I>
  static void join(Vector<T>& a, Vector<T>& b, std::index_sequence<I...>) {
    const Vector<T> low = __builtin_shufflevector(a, b, source(I)...);
    b = __builtin_shufflevector(a, b, source(width + I)...);
    a = low;
  }
};

template <class S, class T, bool kRotation>
class FewRows {
  static constexpr int width = Simd<T>::width;
  static constexpr auto lanes = std::make_index_sequence<width>{};

 public:
  explicit FewRows(const Call& call) : call_(call), plan_(*call.plan), stride_(plan_.stride(width)) {
    lay_out_in(arena_, [this](Parts& parts) { z_ = parts.take<T>(plan_.n()), sums_ = parts.take<T>(call_.out_features); });
  }

  void forward() const {
    for (int64_t r = 0; r < call_.rows; ++r) {
      const S* x = static_cast<const S*>(call_.x.data) + r * call_.x.row_stride;
      S* y = static_cast<S*>(call_.y.data) + r * call_.y.row_stride;
      read_row(x, call_.x.column_stride, call_.in_features, plan_.n(), plan_.n(), z_);
      scale(call_.parameters.d_in);
      for (int32_t l = 0; l < plan_.given_stages(); ++l) mix(l);
      scale(call_.parameters.d_out);
      write_row(z_, plan_.n(), call_.out_features, static_cast<const T*>(call_.parameters.bias), call_.y.adds, sums_, y);
    }
  }

 private:
  void scale(const void* diagonal) const {
    if (!diagonal) return;
    const T* by = static_cast<const T*>(diagonal);
    for (int32_t i = 0; i < plan_.n(); i += width) store(z_ + i, load(z_ + i) * load(by + i));
  }

  void mix(int32_t l) const {
    const int32_t stage = plan_.first_given() + l;
    const T* blocks = static_cast<const T*>(call_.parameters.blocks) + int64_t{l} * (kRotation ? 1 : 4) * plan_.pairs();
    if (stride_[stage])
      with_stride<width>(stride_[stage], [&](auto stride) { mix_inside<stride()>(blocks); });
    else
      mix_units(blocks, plan_.members(stage), plan_.members(stage) + plan_.half());
  }

  void mix_units(const T* blocks, const int32_t* firsts, const int32_t* seconds) const {
    const int32_t pairs = plan_.pairs();
    for (int32_t p = 0; p < pairs; p += width) {
      T *first = z_ + firsts[p], *second = z_ + seconds[p];
      Vector<T> a = load(first), b = load(second);
      PairVector<T, kRotation>(blocks, pairs, p).apply(a, b);
      store(first, a), store(second, b);
    }
  }

  template <int kStride>
  void mix_inside(const T* blocks) const {
    const int32_t pairs = plan_.pairs();
    for (int32_t p = 0; p < pairs; p += width) {
      T *low = z_ + 2 * p, *high = low + width;
      Vector<T> a = load(low), b = load(high);
      PairedLanes<T, kStride>::split(a, b, lanes);
      PairVector<T, kRotation>(blocks, pairs, p).apply(a, b);
      PairedLanes<T, kStride>::join(a, b, lanes);
      store(low, a), store(high, b);
    }
  }

  Arena arena_;
  const Call& call_;
  const Plan& plan_;
  const std::vector<int32_t>& stride_;
  T *z_, *sums_;
};

// Whether it was done: not if there are many rows, or pairs that do not fill vectors.
template <class S, class T>
bool few_rows_forward(const Call& call) {
  const Plan& plan = *call.plan;
  constexpr int width = Simd<T>::width;
  if (call.rows > kFewRows || plan.n() % (2 * width) || plan.lanes(width) != width) return false;
  call.rotation ? FewRows<S, T, true>(call).forward() : FewRows<S, T, false>(call).forward();
  return true;
}

}  // namespace
}  // namespace pairmix
