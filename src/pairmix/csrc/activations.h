// The nonlinear functions of recurrent networks and feed-forward blocks, on vectors.
#pragma once

#include <cmath>
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
inline Vector<T> at_least(Vector<T> x, T least) {
  const Vector<T> low = least - Vector<T>{};
  return x < low ? low : x;  // what is no number stays none
}

template <class T>
inline Vector<T> limited(Vector<T> x, T most) {
  const Vector<T> high = most - Vector<T>{};
  return at_least<T>(x > high ? high : x, -most);
}

// e^x = power (1 + rest), for |x| <= Binary<T>::largest: x = k ln 2 + r, and the Taylor series of e^r - 1, of which so many
// terms are enough for |r| <= ln 2 / 2.
template <class T>
struct Exponential {
  Vector<T> power, rest;
};
template <class T>
inline Exponential<T> exponential(Vector<T> x) {
  using B = Binary<T>;
  const Vector<T> shifted = x * T(1.4426950408889634) + B::rounder, k = shifted - B::rounder;
  const Vector<T> r = (x - k * B::ln2) - k * B::ln2_rest;
  Vector<T> series = T(1) + Vector<T>{};
#pragma GCC unroll 16
  for (int term = B::terms; term > 1; --term) series = series * r * (T(1) / T(term)) + T(1);
  const Vector<T> rounder = B::rounder - Vector<T>{};
  const auto exponent = (typename B::Bits)shifted - (typename B::Bits)rounder + B::bias;
  return {(Vector<T>)(exponent << B::mantissa), series * r};
}

// e^x - 1, exact to about a unit in the last place also where x is small.
template <class T>
inline Vector<T> exp_minus_one(Vector<T> x) {
  const auto [power, rest] = exponential<T>(x);
  return power * rest + (power - T(1));
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

// erf(x) = x P(s) with s = 2 (x / 3.83...)^2 - 1, where P has the least relative error; beyond that it is 1. In float32 it is
// exact to about four units in the last place.
inline Vector<float> erf(Vector<float> x) {
  static constexpr float kMost = 3.83250689f, kSeries[] = {
      -0.000529100769f, 0.00141281914f, -0.00121793407f, 0.00181989081f, -0.00601096172f, 0.0115938568f,
      -0.0176490005f, 0.0271845218f, -0.0406198502f, 0.0561279766f, -0.0729095563f, 0.090808183f,
      -0.110675924f, 0.136747196f, -0.184114337f, 0.368958026f};
  x = limited<float>(x, kMost);
  const Vector<float> s = x * x * (2 / (kMost * kMost)) - 1.0f;
  Vector<float> series = kSeries[0] - Vector<float>{};
#pragma GCC unroll 16
  for (int term = 1; term < 16; ++term) series = series * s + kSeries[term];
  const Vector<float> one = 1.0f - Vector<float>{};
  return x >= kMost ? one : x <= -kMost ? -one : x * series;  // or what is below a gelu would stay, times a large number
}
// One number after the other: double precision is for tests.
inline Vector<double> erf(Vector<double> x) {
  for (int lane = 0; lane < Simd<double>::width; ++lane) x[lane] = std::erf(x[lane]);
  return x;
}

// e^x for any x that is not above 0.
template <class T>
inline Vector<T> exp_of_negative(Vector<T> x) {
  const auto [power, rest] = exponential<T>(at_least<T>(x, -Binary<T>::largest));
  return power * rest + power;
}

// What an activation gives, and its derivative.
template <class T>
struct ValueAndSlope {
  Vector<T> value, slope;
};

template <class T>
struct Relu {
  using Bits = typename Binary<T>::Bits;
  static Vector<T> value(Vector<T> x) { return (Vector<T>)(~(Bits)(x < T(0)) & (Bits)x); }  // what is no number stays none
  static ValueAndSlope<T> both(Vector<T> x) {
    return {value(x), (Vector<T>)(~(Bits)(x <= T(0)) & (Bits)(T(1) - Vector<T>{}))};
  }
};

// x times the probability that a normal variable is below x.
template <class T>
struct Gelu {
  static Vector<T> below(Vector<T> x) { return T(0.5) + T(0.5) * erf(x * T(0.70710678118654752)); }
  static Vector<T> value(Vector<T> x) { return x * below(x); }
  static ValueAndSlope<T> both(Vector<T> x) {
    const Vector<T> p = below(x);
    return {x * p, p + x * T(0.39894228040143268) * exp_of_negative<T>(x * x * T(-0.5))};
  }
};

// A sigmoid and its derivative, neither of which is a difference of numbers that are almost equal.
template <class T>
inline ValueAndSlope<T> sigmoid_and_slope(Vector<T> x) {
  const Vector<T> e = exp_of_negative<T>(x < T(0) ? x : -x), q = T(1) / (T(1) + e), smaller = e * q;
  return {x < T(0) ? smaller : q, smaller * q};
}

// x sigmoid(2 u), which is x (1 + tanh u) / 2.
template <class T>
struct GeluTanh {
  static constexpr T kTwice = T(2 * 0.79788456080286536), kCubic = T(0.044715);

  static ValueAndSlope<T> below(Vector<T> x) { return sigmoid_and_slope<T>(kTwice * (x + kCubic * x * x * x)); }
  static Vector<T> value(Vector<T> x) { return x * below(x).value; }
  static ValueAndSlope<T> both(Vector<T> x) {
    const ValueAndSlope<T> p = below(x);
    return {x * p.value, p.value + x * p.slope * (kTwice * (T(1) + T(3) * kCubic * x * x))};
  }
};

template <class T>
struct Silu {
  static Vector<T> value(Vector<T> x) { return x * sigmoid_and_slope<T>(x).value; }
  static ValueAndSlope<T> both(Vector<T> x) {
    const ValueAndSlope<T> s = sigmoid_and_slope<T>(x);
    return {x * s.value, s.value + x * s.slope};
  }
};

}  // namespace
}  // namespace pairmix
