// bfloat16 and float16, which are computed in float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

#if PAIRMIX_VECTOR_BYTES == 32 && defined(__AVX2__)  // a third of the instructions that the compiler finds
inline Words in_words(Halves value) { return (Words)_mm256_cvtepu16_epi32((__m128i)value); }
inline Halves in_halves(Words value) {  // words below 2^16
  const __m256i packed = _mm256_packus_epi32((__m256i)value, (__m256i)value);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
}
#else
inline Words in_words(Halves value) { return __builtin_convertvector(value, Words); }
inline Halves in_halves(Words value) { return __builtin_convertvector(value, Halves); }
#endif

// Narrowed to the nearest, ties to even; NaN stays NaN.
inline Floats widened(Halves value, BFloat16) { return (Floats)(in_words(value) << 16); }
inline Halves narrowed(Floats value, BFloat16) {
  const Words bits = (Words)value, is_nan = (Words)(value != value);
  return in_halves(((bits + 0x7fff + (bits >> 16 & 1)) | is_nan) >> 16);
}

#if PAIRMIX_VECTOR_BYTES == 32 && defined(__F16C__)
inline Floats widened(Halves value, Float16) { return (Floats)_mm256_cvtph_ps((__m128i)value); }
inline Halves narrowed(Floats value, Float16) { return (Halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT); }
#else
inline Floats widened(Halves value, Float16) {
  // Shifted into place, the exponent is 112 too small; a multiplication by 2^112 repairs that for subnormal numbers too.
  const Words bits = in_words(value), magnitude = bits & 0x7fff;
  const Floats scaled = (Floats)(magnitude << 13) * 0x1p112f;
  const Words special = (Words)(magnitude >= 0x7c00) & 0x7f800000u;  // infinities and NaN
  return (Floats)((Words)scaled | special | (bits & 0x8000) << 16);
}
inline Halves narrowed(Floats value, Float16) {
  const Words bits = (Words)value, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Subnormal halves are rounded by adding a number whose last place is theirs: 0.5, whose bits are 126 << 23.
  const Words tiny = (Words)((Floats)magnitude + 0.5f) - (126u << 23);
  const Words normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Words large = 0x7c00u + ((Words)(magnitude > 0x7f800000) & 0x200);
  const Words is_large = (Words)(magnitude >= 0x477ff000), is_tiny = (Words)(magnitude < (113u << 23));
  return in_halves(sign | (large & is_large) | (tiny & is_tiny) | (normal & ~is_large & ~is_tiny));
}
#endif

// From what is stored to what is computed with, and back; both may be the same. With a `count`, only the first numbers are read, and
// the others are zero, or only those are written.
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
inline Vector<T> load_widened(const S* from, int count) {
  const int bytes = count * static_cast<int>(sizeof(S));
  if constexpr (std::is_same_v<S, T>)
    return load_part<Vector<T>>(from, bytes);
  else
    return widened(load_part<Halves>(from, bytes), S{});
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
inline void store_narrowed(S* to, Vector<T> v, int count) {
  const int bytes = count * static_cast<int>(sizeof(S));
  if constexpr (std::is_same_v<S, T>)
    store_part(to, v, bytes);
  else
    store_part(to, narrowed(v, S{}), bytes);
}

template <class S, class T>
inline void widen(const S* from, int64_t count, T* to) {
  constexpr int width = Simd<T>::width;
  for (; count >= width; from += width, to += width, count -= width) store(to, load_widened<S, T>(from));
  if (count > 0) {
    const Vector<T> rest = load_widened<S, T>(from, static_cast<int>(count));
    store_part(to, rest, static_cast<int>(count * sizeof(T)));
  }
}
template <class S, class T>
inline void narrow(const T* from, int64_t count, S* to) {
  constexpr int width = Simd<T>::width;
  for (; count >= width; from += width, to += width, count -= width) store_narrowed<S, T>(to, load(from));
  if (count > 0)
    store_narrowed<S, T>(to, load_part<Vector<T>>(from, static_cast<int>(count * sizeof(T))), static_cast<int>(count));
}

}  // namespace
}  // namespace pairmix
