// Several vectors that the same is done to, one operation after the other: what one of them waits for, the others do not.
#pragma once

#include "simd.h"

namespace pairmix {
namespace {

template <class T, int kCount>
struct Several {
  Vector<T> v[kCount];

  Several() = default;
  Several(T number) : Several(number - Vector<T>{}) {}
  Several(Vector<T> same) {
    for (int k = 0; k < kCount; ++k) v[k] = same;
  }

  static Several load(const Vector<T>* from) {
    Several several;
    for (int k = 0; k < kCount; ++k) several.v[k] = from[k];
    return several;
  }
  void store(Vector<T>* to) const {
    for (int k = 0; k < kCount; ++k) to[k] = v[k];
  }

  [[gnu::always_inline]] friend Several operator+(const Several& a, const Several& b) {
    return each(a, b, [](Vector<T> x, Vector<T> y) { return x + y; });
  }
  [[gnu::always_inline]] friend Several operator-(const Several& a, const Several& b) {
    return each(a, b, [](Vector<T> x, Vector<T> y) { return x - y; });
  }
  [[gnu::always_inline]] friend Several operator*(const Several& a, const Several& b) {
    return each(a, b, [](Vector<T> x, Vector<T> y) { return x * y; });
  }
  [[gnu::always_inline]] friend Several operator/(const Several& a, const Several& b) {
    return each(a, b, [](Vector<T> x, Vector<T> y) { return x / y; });
  }

  // What f makes of every vector, or of every two.
  template <class F>
  [[gnu::always_inline]] friend Several each(const Several& a, F f) {
    Several result;
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) result.v[k] = f(a.v[k]);
    return result;
  }
  template <class F>
  [[gnu::always_inline]] friend Several each(const Several& a, const Several& b, F f) {
    Several result;
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) result.v[k] = f(a.v[k], b.v[k]);
    return result;
  }
};

}  // namespace
}  // namespace pairmix
