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

// The same for vectors.
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
using Floats = Vector<float>;

inline Floats widened(Halves value, BFloat16) { return (Floats)(__builtin_convertvector(value, Words) << 16); }
inline Floats widened(Halves value, Float16) {
  const Words bits = __builtin_convertvector(value, Words), magnitude = bits & 0x7fff;
  const Floats scaled = (Floats)(magnitude << 13) * float_of((254u - 15) << 23);
  const Words special = (Words)(magnitude >= 0x7c00) & 0x7f800000u;
  return (Floats)((Words)scaled | special | (bits & 0x8000) << 16);
}
inline Halves narrowed(Floats value, BFloat16) {
  const Words bits = (Words)value, is_nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((((bits >> 16) | 0x40) & is_nan) | (rounded & ~is_nan), Halves);
}
inline Halves narrowed(Floats value, Float16) {
  const Words bits = (Words)value, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  const Words tiny = (Words)((Floats)magnitude + 0.5f) - bits_of(0.5f);
  const Words normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Words large = 0x7c00u + ((Words)(magnitude > 0x7f800000) & 0x200);
  const Words is_large = (Words)(magnitude >= 0x477ff000), is_tiny = (Words)(magnitude < (113u << 23));
  return __builtin_convertvector(sign | (large & is_large) | (tiny & is_tiny) | (normal & ~is_large & ~is_tiny), Halves);
}

// Where the units of a tile are, counted in units. Those at distances of a power of two would share a few sets of the L1
// cache, so after every eighth, 64th, ... unit one place is left free.
inline int32_t place(int32_t unit) { return unit + (unit >> 3) + (unit >> 6) + (unit >> 9) + (unit >> 12); }

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

// Matrices of chunks of kLanes numbers, a row a vector, are transposed: chunk k of vector j and chunk j of vector k change
// places.
template <class T, int kLanes, int kDistance>
struct ExchangedChunks {
  static constexpr int width = Simd<T>::width;
  static constexpr int low(int lane) { return lane / kLanes & kDistance ? width + lane - kDistance * kLanes : lane; }
  static constexpr int high(int lane) { return lane / kLanes & kDistance ? width + lane : lane + kDistance * kLanes; }

  template <size_t... I>
  [[gnu::always_inline]] static void apply(Vector<T>& a, Vector<T>& b, std::index_sequence<I...>) {
    const Vector<T> first = __builtin_shufflevector(a, b, low(I)...);
    b = __builtin_shufflevector(a, b, high(I)...);
    a = first;
  }
};

template <class T, int kLanes, int kDistance = Simd<T>::width / kLanes / 2>
[[gnu::always_inline]] inline void transpose(Vector<T>* v) {  // inline, so that the vectors stay in registers
  constexpr int width = Simd<T>::width;
  if constexpr (kDistance > 0) {
#pragma GCC unroll 16
    for (int k = 0; k < width / kLanes; ++k)
      if (!(k & kDistance))
        ExchangedChunks<T, kLanes, kDistance>::apply(v[k], v[k + kDistance], std::make_index_sequence<width>{});
    transpose<T, kLanes, kDistance / 2>(v);
  }
}

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

// Moves rows of the caller's memory into tiles and out of them.
//
// A square operator's rows go straight to their places. Those of a rectangular one, or with gaps between the columns, go
// through a buffer in which they are tiled or folded.
template <class S, class T, int kLanes>
class Mover {
 public:
  static constexpr int width = Simd<T>::width;
  static constexpr int rows_in_vector = width / kLanes;

  Mover(int32_t n, int32_t units) : n_(n), units_(units), padded_(units * kLanes) {}

  // How many numbers the buffer takes.
  int64_t buffer_size() const { return (kRowsTogether + int64_t{1}) * (padded_ + width); }

  // Fill the tile with `count` rows from `start` on. Rows that fill up the last vectors are zero. `column_sums`, if not
  // null, gets the sum of each feature added.
  void read(const Rows& rows, int64_t start, int64_t count, int32_t features, const Tile<T>& tile, T* buffer,
            T* column_sums) const {
    const S* data = static_cast<const S*>(rows.data) + start * rows.row_stride;
    const bool direct = features == n_ && rows.column_stride == 1;
    for (int64_t first = 0; first < count; first += kRowsTogether) {
      const int together = static_cast<int>(std::min<int64_t>(kRowsTogether, count - first));
      const S* row = data + first * rows.row_stride;
      if (direct) {
        read_together<S>(row, rows.row_stride, together, n_, tile, first, column_sums);
        continue;
      }
      for (int k = 0; k < together; ++k) {
        T* values = buffer + int64_t{k} * padded_;
        read_row(row + k * rows.row_stride, rows.column_stride, features, n_, padded_, values);
        if (column_sums)
          for (int32_t i = 0; i < features; ++i) column_sums[i] += values[i];
      }
      read_together<T>(buffer, padded_, together, padded_, tile, first, nullptr);
    }
  }

  // Write the first `count` rows of the tile to the rows from `start` on.
  void write(const Tile<T>& tile, const T* bias, const Rows& rows, int64_t start, int64_t count, int32_t features,
             T* buffer) const {
    S* data = static_cast<S*>(rows.data) + start * rows.row_stride;
    for (int64_t first = 0; first < count; first += kRowsTogether) {
      const int together = static_cast<int>(std::min<int64_t>(kRowsTogether, count - first));
      S* row = data + first * rows.row_stride;
      if (features == n_) {
        write_together<S>(tile, first, bias, row, rows.row_stride, together, n_);
        continue;
      }
      write_together<T>(tile, first, nullptr, buffer, padded_, together, padded_);
      for (int k = 0; k < together; ++k)
        write_row(buffer + int64_t{k} * padded_, n_, features, bias, buffer + int64_t{kRowsTogether} * padded_,
                  row + k * rows.row_stride);
    }
  }

 private:
  // So many rows are copied side by side: as streams that the processor can prefetch, to or from whole cache lines.
  static constexpr int kRowsTogether = std::max(4, rows_in_vector);
  static constexpr int kVectorsTogether = kRowsTogether / rows_in_vector;

  template <class From>
  void read_together(const From* from, int64_t stride, int together, int32_t columns, const Tile<T>& tile,
                     int64_t first, T* column_sums) const {
    Vector<T>* const to = tile.vectors + first / rows_in_vector;
    int32_t i = 0;
    if (together == kRowsTogether)
      for (; i + width <= columns; i += width) {
        Vector<T> v[kRowsTogether], sum{};
        for (int k = 0; k < kRowsTogether; ++k) {
          v[k] = load_widened<From, T>(from + k * stride + i);
          sum += v[k];
        }
        if (column_sums) store(column_sums + i, load(column_sums + i) + sum);
#pragma GCC unroll 4
        for (int k = 0; k < kVectorsTogether; ++k) {
          transpose<T, kLanes>(v + k * rows_in_vector);
          for (int u = 0; u < rows_in_vector; ++u) to[tile.offset[i / kLanes + u] + k] = v[k * rows_in_vector + u];
        }
      }
    const int filled = (together + rows_in_vector - 1) / rows_in_vector * rows_in_vector;
    for (; i < padded_; ++i)
      for (int k = 0; k < filled; ++k) {
        const T value = k < together && i < columns ? widened(from[k * stride + i]) : T(0);
        reinterpret_cast<T*>(to + tile.offset[i / kLanes] + k / rows_in_vector)[k % rows_in_vector * kLanes + i % kLanes] = value;
        if (column_sums && i < columns) column_sums[i] += value;
      }
  }

  template <class To>
  void write_together(const Tile<T>& tile, int64_t first, const T* bias, To* to, int64_t stride, int together,
                      int32_t columns) const {
    const Vector<T>* const from = tile.vectors + first / rows_in_vector;
    int32_t i = 0;
    if (together == kRowsTogether)
      for (; i + width <= columns; i += width) {
        const auto added = bias ? load(bias + i) : Vector<T>{};
        Vector<T> v[kRowsTogether];
#pragma GCC unroll 4
        for (int k = 0; k < kVectorsTogether; ++k) {
          for (int u = 0; u < rows_in_vector; ++u) v[k * rows_in_vector + u] = from[tile.offset[i / kLanes + u] + k];
          transpose<T, kLanes>(v + k * rows_in_vector);
        }
        for (int k = 0; k < kRowsTogether; ++k) store_narrowed<To, T>(to + k * stride + i, v[k] + added);
      }
    for (; i < columns; ++i)
      for (int k = 0; k < together; ++k) {
        const T* vector = reinterpret_cast<const T*>(from + tile.offset[i / kLanes] + k / rows_in_vector);
        narrow(vector[k % rows_in_vector * kLanes + i % kLanes] + (bias ? bias[i] : T(0)), to[k * stride + i]);
      }
  }

  const int32_t n_, units_, padded_;
};

}  // namespace
}  // namespace pairmix
