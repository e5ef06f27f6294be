// The cosines and sines of angles.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace pairmix {
namespace {

template <class T>
inline void sincos_one_by_one(const T* angles, int64_t count, T* cos, T* sin) {
  for (int64_t k = 0; k < count; ++k) cos[k] = std::cos(angles[k]), sin[k] = std::sin(angles[k]);
}

// A vector of float32 angles at once, to about a unit in the last place: the angle is reduced to a quarter turn, by pi / 2 in
// three parts of which the first two have few enough bits to be multiplied exactly, and polynomials do the rest.
// Returns false, and does nothing, if one is too large for this or no number.
inline bool sincos_vector(const float* angles, float* cos, float* sin) {
  using V = Vector<float>;
  constexpr float kLargest = 8192.0f, kRounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const V x = load(angles);
  const auto beyond = (x > kLargest) | (x < -kLargest) | (x != x);
  for (int k = 0; k < Simd<float>::width; ++k)
    if (beyond[k]) return false;

  const V shifted = x * 0.63661977236758134f + kRounder;
  const V quarters = shifted - kRounder;
  const V r = ((x - quarters * 1.5703125f) - quarters * 4.837512969970703125e-4f) - quarters * 7.549789948768648e-8f;
  const V z = r * r;
  const V s = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
  const V c = 1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));

  const Words quadrant = (Words)shifted;
  const Words is_odd = 0u - (quadrant & 1);
  const Words sine = ((Words)c & is_odd) | ((Words)s & ~is_odd), cosine = ((Words)s & is_odd) | ((Words)c & ~is_odd);
  store(sin, (V)(sine ^ ((quadrant & 2) << 30)));
  store(cos, (V)(cosine ^ (((quadrant + 1) & 2) << 30)));
  return true;
}

template <class T>
inline void fill_sincos(const T* angles, int64_t count, T* cos, T* sin) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr int width = Simd<T>::width;
    for (; count >= width; angles += width, cos += width, sin += width, count -= width)
      if (!sincos_vector(angles, cos, sin)) sincos_one_by_one(angles, width, cos, sin);
  }
  sincos_one_by_one(angles, count, cos, sin);
}

}  // namespace
}  // namespace pairmix
