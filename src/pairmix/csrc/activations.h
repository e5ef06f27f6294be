// The nonlinear functions of recurrent networks and feed-forward blocks, on vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "several.h"
#include "simd.h"

namespace pairmix {
namespace {

// How numbers are made of bits, and ln 2 in two parts, of which the first has few enough bits to be multiplied exactly.
template <class T>
struct Binary;
template <>
struct Binary<float> {
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float rounder = 0x1.8p23f;  // what is added to it is rounded to an integer, in its lowest bits
  static constexpr float ln2 = 0x1.62e4p-1f, ln2_rest = 0x1.7f7d1cp-20f, largest = 87;
  static constexpr float taylor[] = {1, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
};
template <>
struct Binary<double> {
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double rounder = 0x1.8p52;
  static constexpr double ln2 = 0x1.62e42fefap-1, ln2_rest = 0x1.cf79abc9e3b3ap-40, largest = 708;
  static constexpr double taylor[] = {1,           1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,
                                      1.0 / 720,   1.0 / 5040,   1.0 / 40320,   1.0 / 362880,   1.0 / 3628800,
                                      1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
};

template <class T, int n>
[[gnu::always_inline]] inline Several<T, n> at_least(Several<T, n> x, T least) {
  const Vector<T> low = least - Vector<T>{};
  return each(x, [=](Vector<T> v) { return v < low ? low : v; });  // what is no number stays none
}

template <class T, int n>
[[gnu::always_inline]] inline Several<T, n> limited(Several<T, n> x, T most) {
  const Vector<T> high = most - Vector<T>{};
  return at_least(each(x, [=](Vector<T> v) { return v > high ? high : v; }), -most);
}

// first + x (second + x (third + ...))
template <class T, int n, int kTerms>
[[gnu::always_inline]] inline Several<T, n> polynomial(const T (&coefficients)[kTerms], Several<T, n> x) {
  Several<T, n> sum = coefficients[kTerms - 1];
#pragma GCC unroll 16
  for (int term = 2; term <= kTerms; ++term) sum = sum * x + coefficients[kTerms - term];
  return sum;
}

// e^x = power (1 + rest), for |x| <= Binary<T>::largest: x = k ln 2 + r, and the Taylor series of e^r - 1, of which so many
// terms are enough for |r| <= ln 2 / 2.
template <class T, int n>
struct Exponential {
  Several<T, n> power, rest;
};
template <class T, int n>
[[gnu::always_inline]] inline Exponential<T, n> exponential(Several<T, n> x) {
  using B = Binary<T>;
  const Several<T, n> shifted = x * T(1.4426950408889634) + B::rounder, k = shifted - B::rounder;
  const Several<T, n> r = (x - k * B::ln2) - k * B::ln2_rest;
  const auto power = [](Vector<T> v) {
    const Vector<T> rounder = B::rounder - Vector<T>{};
    const auto exponent = (typename B::Bits)v - (typename B::Bits)rounder + B::bias;
    return (Vector<T>)(exponent << B::mantissa);
  };
  return {each(shifted, power), polynomial(B::taylor, r) * r};
}

// e^x - 1, exact to about a unit in the last place also where x is small.
template <class T, int n>
[[gnu::always_inline]] inline Several<T, n> exp_minus_one(Several<T, n> x) {
  const auto [power, rest] = exponential(x);
  return power * rest + (power - T(1));
}

template <class T, int n>
[[gnu::always_inline]] inline Several<T, n> sigmoid(Several<T, n> x) {
  return T(1) / (exp_minus_one(limited(T(0) - x, Binary<T>::largest)) + T(2));
}

template <class T, int n>
[[gnu::always_inline]] inline Several<T, n> tanh(Several<T, n> x) {
  const Several<T, n> e = exp_minus_one(limited(x + x, T(44)));
  return e / (e + T(2));
}

// Of a single vector.
template <class T>
[[gnu::always_inline]] inline Vector<T> sigmoid(Vector<T> x) {
  return sigmoid(Several<T, 1>::load(&x)).v[0];
}
template <class T>
[[gnu::always_inline]] inline Vector<T> tanh(Vector<T> x) {
  return tanh(Several<T, 1>::load(&x)).v[0];
}

// The probability that a normal variable is below x: 1/2 + x P(s) with s = 2 (x / 5.42)^2 - 1, where P has the least absolute
// error; beyond that it is 0 or 1.
template <int n>
[[gnu::always_inline]] inline Several<float, n> normal_below(Several<float, n> x) {
  static constexpr float kMost = 5.42f, kSeries[] = {
      0.130445957f,   -0.0650940537f,  0.0483472683f,  -0.0391298197f,  0.0321063474f,   -0.0257774889f,
      0.0198384002f,  -0.0143590597f,  0.00963162258f, -0.00625204761f, 0.00406432338f,  -0.00210059667f,
      0.000672553258f, -0.000453334156f, 0.000490109029f, -0.000179264534f};
  const Several<float, n> within = limited(x, kMost);
  const Several<float, n> p = within * polynomial(kSeries, within * within * (2 / (kMost * kMost)) - 1.0f) + 0.5f;
  const Vector<float> none{}, all = 1.0f - none;
  return each(within, p, [=](Vector<float> v, Vector<float> p) { return v >= kMost ? all : v <= -kMost ? none : p; });
}
// One number after the other: double precision is for tests.
template <int n>
[[gnu::always_inline]] inline Several<double, n> normal_below(Several<double, n> x) {
  return each(x, [](Vector<double> v) {
    for (int lane = 0; lane < Simd<double>::width; ++lane) v[lane] = 0.5 + 0.5 * std::erf(v[lane] * 0.70710678118654752);
    return v;
  });
}

// e^x for any x that is not above 0.
template <class T, int n>
[[gnu::always_inline]] inline Several<T, n> exp_of_negative(Several<T, n> x) {
  const auto [power, rest] = exponential(at_least(x, -Binary<T>::largest));
  return power * rest + power;
}

// What an activation gives, and its derivative.
template <class T, int n>
struct ValueAndSlope {
  Several<T, n> value, slope;
};

template <class T>
struct Relu {
  using Bits = typename Binary<T>::Bits;

  template <int n>
  [[gnu::always_inline]] static Several<T, n> value(Several<T, n> x) {  // what is no number stays none
    return each(x, [](Vector<T> v) { return (Vector<T>)(~(Bits)(v < T(0)) & (Bits)v); });
  }
  template <int n>
  [[gnu::always_inline]] static ValueAndSlope<T, n> both(Several<T, n> x) {
    return {value(x), each(x, [](Vector<T> v) { return (Vector<T>)(~(Bits)(v <= T(0)) & (Bits)(T(1) - Vector<T>{})); })};
  }
};

// x times the probability that a normal variable is below x.
template <class T>
struct Gelu {
  template <int n>
  [[gnu::always_inline]] static Several<T, n> value(Several<T, n> x) {
    return x * normal_below(x);
  }
  template <int n>
  [[gnu::always_inline]] static ValueAndSlope<T, n> both(Several<T, n> x) {
    const Several<T, n> p = normal_below(x);
    return {x * p, p + x * T(0.39894228040143268) * exp_of_negative(x * x * T(-0.5))};
  }
};

// A sigmoid and its derivative, neither of which is a difference of numbers that are almost equal.
template <class T, int n>
[[gnu::always_inline]] inline ValueAndSlope<T, n> sigmoid_and_slope(Several<T, n> x) {
  const Several<T, n> e = exp_of_negative(each(x, [](Vector<T> v) { return v < T(0) ? v : -v; }));
  const Several<T, n> q = T(1) / (T(1) + e), smaller = e * q;
  Several<T, n> value;
  for (int k = 0; k < n; ++k) value.v[k] = x.v[k] < T(0) ? smaller.v[k] : q.v[k];
  return {value, smaller * q};
}

// x sigmoid(2 u), which is x (1 + tanh u) / 2.
template <class T>
struct GeluTanh {
  static constexpr T kTwice = T(2 * 0.79788456080286536), kCubic = T(0.044715);

  template <int n>
  [[gnu::always_inline]] static ValueAndSlope<T, n> below(Several<T, n> x) {
    return sigmoid_and_slope(kTwice * (x + kCubic * x * x * x));
  }
  template <int n>
  [[gnu::always_inline]] static Several<T, n> value(Several<T, n> x) {
    return x * below(x).value;
  }
  template <int n>
  [[gnu::always_inline]] static ValueAndSlope<T, n> both(Several<T, n> x) {
    const Several<T, n> near = limited(x, T(64));  // where the square is finite; beyond it nothing changes any more
    const ValueAndSlope<T, n> p = below(near);
    return {x * p.value, p.value + near * p.slope * (kTwice * (T(1) + T(3) * kCubic * near * near))};
  }
};

template <class T>
struct Silu {
  template <int n>
  [[gnu::always_inline]] static Several<T, n> value(Several<T, n> x) {
    return x * sigmoid_and_slope(x).value;
  }
  template <int n>
  [[gnu::always_inline]] static ValueAndSlope<T, n> both(Several<T, n> x) {
    const ValueAndSlope<T, n> s = sigmoid_and_slope(x);
    return {x * s.value, s.value + x * s.slope};
  }
};

}  // namespace
}  // namespace pairmix
