// The nonlinear functions of recurrent networks, on vectors.
#pragma once

#include <cstdint>

#include "simd.h"

namespace pairmix {
namespace {

// How numbers are made of bits, and ln 2 in two parts, of which the first has few enough bits to be multiplied exactly.
template <class T>
struct Binary;
template <>
struct Binary<float> {
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 23, bias = 127, terms = 7;
  static constexpr float rounder = 0x1.8p23f;  // what is added to it is rounded to an integer, in its lowest bits
  static constexpr float ln2 = 0x1.62e4p-1f, ln2_rest = 0x1.7f7d1cp-20f, largest = 87;
};
template <>
struct Binary<double> {
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 52, bias = 1023, terms = 13;
  static constexpr double rounder = 0x1.8p52;
  static constexpr double ln2 = 0x1.62e42fefap-1, ln2_rest = 0x1.cf79abc9e3b3ap-40, largest = 708;
};

template <class T>
inline Vector<T> limited(Vector<T> x, T most) {
  using Bits = typename Binary<T>::Bits;
  const Vector<T> high = most - Vector<T>{}, low = -high;
  const Bits above = (Bits)(x > high), below = (Bits)(x < low);  // neither, if it is no number
  return (Vector<T>)((above & (Bits)high) | (below & (Bits)low) | (~(above | below) & (Bits)x));
}

// e^x - 1, exact to about a unit in the last place also where x is small, for |x| <= Binary<T>::largest: x = k ln 2 + r, and
// the Taylor series of e^r - 1, of which so many terms are enough for |r| <= ln 2 / 2.
template <class T>
inline Vector<T> exp_minus_one(Vector<T> x) {
  using B = Binary<T>;
  const Vector<T> shifted = x * T(1.4426950408889634) + B::rounder, k = shifted - B::rounder;
  const Vector<T> r = (x - k * B::ln2) - k * B::ln2_rest;
  Vector<T> series = T(1) + Vector<T>{};
#pragma GCC unroll 16
  for (int term = B::terms; term > 1; --term) series = series * r * (T(1) / T(term)) + T(1);
  const Vector<T> rounder = B::rounder - Vector<T>{};
  const auto exponent = (typename B::Bits)shifted - (typename B::Bits)rounder + B::bias;
  const Vector<T> power = (Vector<T>)(exponent << B::mantissa);
  return power * (series * r) + (power - T(1));
}

template <class T>
inline Vector<T> sigmoid(Vector<T> x) {
  return T(1) / (exp_minus_one<T>(limited<T>(-x, Binary<T>::largest)) + T(2));
}

template <class T>
inline Vector<T> tanh(Vector<T> x) {
  const Vector<T> e = exp_minus_one<T>(limited<T>(x + x, 44));
  return e / (e + T(2));
}

}  // namespace
}  // namespace pairmix
