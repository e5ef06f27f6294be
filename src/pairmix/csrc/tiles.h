// Rows of the caller's memory in and out of tiles.
//
// A tile holds some rows of all coordinates: for every unit `depth` vectors, one below the other. A vector holds one unit
// of width / lanes rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernel.h"
#include "simd.h"

namespace pairmix {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widened(float value) { return value; }
inline double widened(double value) { return value; }
inline float widened(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }
inline float widened(Float16 value) {
  // Shifted into place, the exponent is 112 too small; a multiplication repairs that for subnormal numbers too.
  const uint32_t magnitude = uint32_t{value.bits} & 0x7fff;
  const float scaled = float_of(magnitude << 13) * float_of((254u - 15) << 23);
  const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000u : 0u;  // infinities and NaN
  return float_of(bits_of(scaled) | special | (uint32_t{value.bits} & 0x8000) << 16);
}

// To the nearest, ties to even; NaN stays NaN.
inline void narrow(float value, float& to) { to = value; }
inline void narrow(double value, double& to) { to = value; }
inline void narrow(float value, BFloat16& to) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}
inline void narrow(float value, Float16& to) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Subnormal halves are rounded by adding a number whose last place is theirs.
  const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const uint32_t large = magnitude > 0x7f800000 ? 0x7e00u : 0x7c00u;
  to.bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000 ? large : magnitude < (113u << 23) ? tiny : normal));
}

// Where the units of a tile are, counted in vectors. Units at distances of a power of two would share the same few sets
// of the L1 cache, so every eighth, 64th, ... unit moves the following ones by a cache line.
inline void place_units(int32_t units, int32_t depth, int32_t* offset) {
  constexpr int32_t line = std::max(1, 64 / kVectorBytes);
  for (int32_t u = 0; u < units; ++u) offset[u] = u * depth + line * ((u >> 3) + (u >> 6) + (u >> 9));
}
inline int64_t tile_vectors(int32_t units, int32_t depth) {
  return int64_t{units} * depth + std::max(1, 64 / kVectorBytes) * ((units >> 3) + (units >> 6) + (units >> 9) + 1);
}

template <class T>
struct Tile {
  Vector<T>* vectors;
  const int32_t* offset;

  Vector<T>* unit(int32_t u) const { return vectors + offset[u]; }
};

template <class S, class T>
inline void read_row(const S* row, int64_t column_stride, int32_t features, int32_t n, int32_t padded, T* to) {
  if (column_stride == 1)
    for (int32_t i = 0; i < features; ++i) to[i] = widened(row[i]);
  else
    for (int32_t i = 0; i < features; ++i) to[i] = widened(row[i * column_stride]);
  for (int32_t i = features; i < n; ++i) to[i] = to[i - features];
  for (int32_t i = n; i < padded; ++i) to[i] = 0;
}

template <class S, class T>
inline void write_row(const T* from, int32_t n, int32_t features, const T* bias, T* sums, S* row) {
  for (int32_t o = 0; o < features; ++o) sums[o] = from[o];
  for (int32_t start = features; start < n; start += features)
    for (int32_t o = 0; o < std::min(features, n - start); ++o) sums[o] += from[start + o];
  if (bias)
    for (int32_t o = 0; o < features; ++o) narrow(sums[o] + bias[o], row[o]);
  else
    for (int32_t o = 0; o < features; ++o) narrow(sums[o], row[o]);
}

// So many rows are copied side by side: as streams that the processor can prefetch, to or from whole cache lines.
constexpr int kRowsTogether = 4;

// Calls f(first, how many) for whole blocks and then for each one that remains.
template <int kBlock, class F>
inline void in_blocks(int64_t count, F f) {
  int64_t k = 0;
  for (; k + kBlock <= count; k += kBlock) f(k, std::integral_constant<int, kBlock>{});
  for (; k < count; ++k) f(k, std::integral_constant<int, 1>{});
}

// Fill the tile with `count` rows from `start` on. Rows that fill up the last vectors are zero. `column_sums`, if not
// null, gets the sum of each feature added.
template <class S, class T, int kLanes>
void read_tile(const Rows& rows, int64_t start, int64_t count, int32_t features, int32_t n, int32_t units,
               const Tile<T>& tile, T* buffer, T* column_sums) {
  constexpr int together = Simd<T>::width / kLanes;
  const S* data = static_cast<const S*>(rows.data) + start * rows.row_stride;
  const int32_t padded = units * kLanes;
  if constexpr (together == 1 && std::is_same_v<S, T>) {
    if (features == padded && rows.column_stride == 1) {
      in_blocks<kRowsTogether>(count, [&](int64_t r, auto block) {
        const T* row = data + r * rows.row_stride;
        const int32_t* offset = tile.offset;
        Vector<T>* const to = tile.vectors + r;
        for (int32_t u = 0; u < units; ++u) {
          Vector<T> sum{};
          for (int k = 0; k < block(); ++k) {
            const auto v = load(row + k * rows.row_stride + u * kLanes);
            to[offset[u] + k] = v;
            sum += v;
          }
          if (column_sums) store(column_sums + u * kLanes, load(column_sums + u * kLanes) + sum);
        }
      });
      return;
    }
  }
  for (int64_t r = 0; r * together < count; ++r) {
    for (int q = 0; q < together; ++q) {
      const int64_t row = r * together + q;
      T* values = buffer + int64_t{q} * padded;
      if (row >= count) {
        std::fill(values, values + padded, T(0));
        continue;
      }
      read_row(data + row * rows.row_stride, rows.column_stride, features, n, padded, values);
      if (column_sums)
        for (int32_t i = 0; i < features; ++i) column_sums[i] += values[i];
    }
    for (int32_t u = 0; u < units; ++u) {
      T* to = reinterpret_cast<T*>(tile.unit(u) + r);
      for (int q = 0; q < together; ++q) std::memcpy(to + q * kLanes, buffer + int64_t{q} * padded + u * kLanes, kLanes * sizeof(T));
    }
  }
}

// Write the first `count` rows of the tile to the rows from `start` on.
template <class S, class T, int kLanes>
void write_tile(const Tile<T>& tile, int32_t n, int32_t units, const T* bias, const Rows& rows, int64_t start,
                int64_t count, int32_t features, T* buffer) {
  constexpr int together = Simd<T>::width / kLanes;
  S* data = static_cast<S*>(rows.data) + start * rows.row_stride;
  const int32_t padded = units * kLanes;
  if constexpr (together == 1 && std::is_same_v<S, T>) {
    if (features == padded) {
      in_blocks<kRowsTogether>(count, [&](int64_t r, auto block) {
        T* row = data + r * rows.row_stride;
        const int32_t* offset = tile.offset;
        const Vector<T>* const from = tile.vectors + r;
        for (int32_t u = 0; u < units; ++u) {
          const auto added = bias ? load(bias + u * kLanes) : Vector<T>{};
          for (int k = 0; k < block(); ++k)
            store(row + k * rows.row_stride + u * kLanes, from[offset[u] + k] + added);
        }
      });
      return;
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    const int64_t r = row / together, q = row % together;
    for (int32_t u = 0; u < units; ++u)
      std::memcpy(buffer + int64_t{u} * kLanes, reinterpret_cast<const T*>(tile.unit(u) + r) + q * kLanes, kLanes * sizeof(T));
    write_row(buffer, n, features, bias, buffer + padded, data + row * rows.row_stride);
  }
}

}  // namespace
}  // namespace pairmix
