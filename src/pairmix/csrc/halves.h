// bfloat16 and float16, which are computed in float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace pairmix {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
using Floats = Vector<float>;

inline Floats widened(Halves value, BFloat16) { return (Floats)(__builtin_convertvector(value, Words) << 16); }
inline Floats widened(Halves value, Float16) {
  // Shifted into place, the exponent is 112 too small; a multiplication by 2^112 repairs that for subnormal numbers too.
  const Words bits = __builtin_convertvector(value, Words), magnitude = bits & 0x7fff;
  const Floats scaled = (Floats)(magnitude << 13) * 0x1p112f;
  const Words special = (Words)(magnitude >= 0x7c00) & 0x7f800000u;  // infinities and NaN
  return (Floats)((Words)scaled | special | (bits & 0x8000) << 16);
}

// To the nearest, ties to even; NaN stays NaN.
inline Halves narrowed(Floats value, BFloat16) {
  const Words bits = (Words)value, is_nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((((bits >> 16) | 0x40) & is_nan) | (rounded & ~is_nan), Halves);
}
inline Halves narrowed(Floats value, Float16) {
  const Words bits = (Words)value, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Subnormal halves are rounded by adding a number whose last place is theirs: 0.5, whose bits are 126 << 23.
  const Words tiny = (Words)((Floats)magnitude + 0.5f) - (126u << 23);
  const Words normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Words large = 0x7c00u + ((Words)(magnitude > 0x7f800000) & 0x200);
  const Words is_large = (Words)(magnitude >= 0x477ff000), is_tiny = (Words)(magnitude < (113u << 23));
  return __builtin_convertvector(sign | (large & is_large) | (tiny & is_tiny) | (normal & ~is_large & ~is_tiny), Halves);
}

// From what is stored to what is computed with, and back; both may be the same.
template <class S, class T>
inline Vector<T> load_widened(const S* from) {
  if constexpr (std::is_same_v<S, T>) {
    return load(from);
  } else {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return widened(bits, S{});
  }
}
template <class S, class T>
inline void store_narrowed(S* to, Vector<T> v) {
  if constexpr (std::is_same_v<S, T>) {
    store(to, v);
  } else {
    const Halves bits = narrowed(v, S{});
    std::memcpy(to, &bits, sizeof bits);
  }
}

template <class S, class T>
inline void widen(const S* from, int64_t count, T* to) {
  constexpr int width = Simd<T>::width;
  for (; count >= width; from += width, to += width, count -= width) store(to, load_widened<S, T>(from));
  S rest[width] = {};
  std::copy_n(from, count, rest);
  T values[width];
  store(values, load_widened<S, T>(rest));
  std::copy_n(values, count, to);
}
template <class S, class T>
inline void narrow(const T* from, int64_t count, S* to) {
  constexpr int width = Simd<T>::width;
  for (; count >= width; from += width, to += width, count -= width) store_narrowed<S, T>(to, load(from));
  T rest[width] = {};
  std::copy_n(from, count, rest);
  S values[width];
  store_narrowed<S, T>(values, load(rest));
  std::copy_n(values, count, to);
}

}  // namespace
}  // namespace pairmix
