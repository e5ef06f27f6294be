// Rows of the caller's memory in and out of tiles.
//
// A tile holds some rows of all coordinates: for every unit `depth` vectors, one below the other. A vector holds one unit
// of width / lanes rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "half_precision.h"
#include "kernel.h"
#include "simd.h"
#include "team.h"

namespace pairmix {
namespace {

template <class T>
struct Tile {
  Vector<T>* vectors;
  const int32_t* offset;

  Vector<T>* unit(int32_t u) const { return vectors + offset[u]; }
};

template <class S, class T>
inline void store_or_add(S* to, Vector<T> v, bool adds) {
  store_narrowed<S, T>(to, adds ? v + load_widened<S, T>(to) : v);
}

// A row of features, repeated up to n, and zeros.
template <class S, class T>
inline void read_row(const S* row, int64_t column_stride, int32_t features, int32_t n, int32_t padded, T* to) {
  if (column_stride == 1)
    widen(row, features, to);
  else
    for (int32_t i = 0; i < features; ++i) widen(row + i * column_stride, 1, to + i);
  for (int32_t i = features; i < n; ++i) to[i] = to[i - features];
  for (int32_t i = n; i < padded; ++i) to[i] = 0;
}

// The sums of the numbers at equal places modulo `features`, and the bias; and what is there, if the row `adds`.
template <class S, class T>
inline void write_row(const T* from, int32_t n, int32_t features, const T* bias, bool adds, T* sums, S* row) {
  std::fill(sums, sums + features, T(0));
  if (adds) widen(row, features, sums);
  for (int32_t o = 0; o < features; ++o) sums[o] += from[o] + (bias ? bias[o] : T(0));
  for (int32_t start = features; start < n; start += features)
    for (int32_t o = 0; o < std::min(features, n - start); ++o) sums[o] += from[start + o];
  narrow(sums, features, row);
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

// So many vectors and rows are copied side by side: as streams that the processor can prefetch, to or from whole lines.
template <class T, int kLanes>
constexpr int kRowsInVector = Simd<T>::width / kLanes;
template <class T, int kLanes>
constexpr int kVectorsTogether = std::max(1, 4 / kRowsInVector<T, kLanes>);
template <class T, int kLanes>
constexpr int kRowsTogether = kVectorsTogether<T, kLanes> * kRowsInVector<T, kLanes>;

// Calls f(first row, how many rows, how many vectors they fill) for blocks, then for vectors; the last may not be full.
template <class T, int kLanes, class F>
[[gnu::always_inline]] inline void in_blocks(int64_t count, const Share& share, F f) {
  constexpr int vector = kRowsInVector<T, kLanes>, block = kRowsTogether<T, kLanes>;
  const int64_t blocks = (count + block - 1) / block;
  int64_t first = share.begin(blocks) * block;
  count = std::min(count, share.end(blocks) * block);
  for (; first + block <= count; first += block) f(first, block, std::integral_constant<int, kVectorsTogether<T, kLanes>>{});
  for (; first < count; first += vector)
    f(first, static_cast<int>(std::min<int64_t>(vector, count - first)), std::integral_constant<int, 1>{});
}

// Moves rows of the caller's memory into tiles and out of them.
//
// Rows as wide as the tile go straight to their places, and so do those that it is a multiple of, if they are whole vectors: they
// are repeated or summed on the way. All others, and those with gaps between the columns, go through a buffer.
template <class S, class T, int kLanes>
class Mover {
 public:
  static constexpr int width = Simd<T>::width;
  static constexpr int rows_in_vector = kRowsInVector<T, kLanes>, rows_together = kRowsTogether<T, kLanes>;

  Mover(int32_t n, int32_t padded) : n_(n), padded_(padded) {}

  // How many numbers the buffer takes.
  int64_t buffer_size() const { return (rows_together + int64_t{1}) * (padded_ + width); }

  // Fill the tile with the first `count` rows. Rows that fill up the last vectors are zero. `column_sums`, if not null, gets
  // the sum of each feature added.
  void read(const Rows& rows, int64_t count, int32_t features, const Tile<T>& tile, T* buffer, T* column_sums,
            const Share& share) const {
    const S* data = static_cast<const S*>(rows.data);
    const bool direct = goes_straight(features) && rows.column_stride == 1;
    in_blocks<T, kLanes>(count, share, [&](int64_t first, int together, auto vectors) {
      const S* row = data + first * rows.row_stride;
      if (direct) {
        for (int32_t copy = 0; copy < n_; copy += features)
          read_block<vectors()>(row, rows.row_stride, together, features, tile, copy, first, copy ? nullptr : column_sums);
        return;
      }
      for (int k = 0; k < together; ++k) {
        T* values = buffer + int64_t{k} * padded_;
        read_row(row + k * rows.row_stride, rows.column_stride, features, n_, padded_, values);
        if (column_sums)
          for (int32_t i = 0; i < features; ++i) column_sums[i] += values[i];
      }
      read_block<vectors()>(buffer, padded_, together, padded_, tile, 0, first, nullptr);
    });
  }

  // Write the first `count` rows of the tile.
  void write(const Tile<T>& tile, const T* bias, const Rows& rows, int64_t count, int32_t features, T* buffer,
             const Share& share) const {
    S* data = static_cast<S*>(rows.data);
    in_blocks<T, kLanes>(count, share, [&](int64_t first, int together, auto vectors) {
      S* row = data + first * rows.row_stride;
      if (goes_straight(features)) {
        if (features < n_) fold<vectors()>(tile, first, features);
        return write_block<vectors()>(tile, first, bias, rows.adds, row, rows.row_stride, together, features);
      }
      write_block<vectors()>(tile, first, static_cast<const T*>(nullptr), false, buffer, padded_, together, padded_);
      for (int k = 0; k < together; ++k)
        write_row(buffer + int64_t{k} * padded_, n_, features, bias, rows.adds, buffer + int64_t{rows_together} * padded_,
                  row + k * rows.row_stride);
    });
  }

 private:
  bool goes_straight(int32_t features) const { return features == n_ || (n_ % features == 0 && features % width == 0); }

  // The columns go to the coordinates from `start` on. If these are the last ones, the padding becomes zero.
  template <int kVectors, class From>
  void read_block(const From* from, int64_t stride, int together, int32_t columns, const Tile<T>& tile, int32_t start,
                  int64_t first, T* column_sums) const {
    constexpr int rows = kVectors * rows_in_vector;
    Vector<T>* const to = tile.vectors + first / rows_in_vector;
    int32_t i = 0;
    if (together == rows)
      for (; i + width <= columns; i += width) {
        Vector<T> v[rows], sum{};
        for (int k = 0; k < rows; ++k) {
          v[k] = load_widened<From, T>(from + k * stride + i);
          sum += v[k];
        }
        if (column_sums) store(column_sums + i, load(column_sums + i) + sum);
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) {
          transpose<T, kLanes>(v + k * rows_in_vector);
          for (int u = 0; u < rows_in_vector; ++u) to[tile.offset[(start + i) / kLanes + u] + k] = v[k * rows_in_vector + u];
        }
      }
    for (; i < columns; ++i)
      for (int k = 0; k < rows; ++k) {
        T value = 0;
        if (k < together) widen(from + k * stride + i, 1, &value);
        number(to, tile, start + i, k) = value;
        if (column_sums) column_sums[i] += value;
      }
    if (start + columns >= n_)
      for (i = start + columns; i < padded_; ++i)
        for (int k = 0; k < rows; ++k) number(to, tile, i, k) = 0;
  }

  // To the first `features` coordinates those are added that they would be repeated at.
  template <int kVectors>
  void fold(const Tile<T>& tile, int64_t first, int32_t features) const {
    const int32_t units = features / kLanes;
    for (int32_t unit = 0; unit < units; ++unit) {
      Vector<T>* to = tile.unit(unit) + first / rows_in_vector;
      for (int32_t copy = unit + units; copy < n_ / kLanes; copy += units)
        for (int k = 0; k < kVectors; ++k) to[k] += tile.unit(copy)[first / rows_in_vector + k];
    }
  }

  template <int kVectors, class To>
  void write_block(const Tile<T>& tile, int64_t first, const T* bias, bool adds, To* to, int64_t stride, int together,
                   int32_t columns) const {
    constexpr int rows = kVectors * rows_in_vector;
    const Vector<T>* const from = tile.vectors + first / rows_in_vector;
    int32_t i = 0;
    if (together == rows)
      for (; i + width <= columns; i += width) {
        const auto added = bias ? load(bias + i) : Vector<T>{};
        Vector<T> v[rows];
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) {
          for (int u = 0; u < rows_in_vector; ++u) v[k * rows_in_vector + u] = from[tile.offset[i / kLanes + u] + k];
          transpose<T, kLanes>(v + k * rows_in_vector);
        }
        for (int k = 0; k < rows; ++k) store_or_add<To, T>(to + k * stride + i, v[k] + added, adds);
      }
    for (; i < columns; ++i)
      for (int k = 0; k < together; ++k) {
        T value = number(from, tile, i, k) + (bias ? bias[i] : T(0)), before = 0;
        if (adds) widen(to + k * stride + i, 1, &before);
        value += before;
        narrow(&value, 1, to + k * stride + i);
      }
  }

  // Of row k in the vectors that start here, at a coordinate.
  template <class Vectors>
  static auto& number(Vectors* start, const Tile<T>& tile, int32_t coordinate, int k) {
    using Number = std::conditional_t<std::is_const_v<Vectors>, const T, T>;
    Number* numbers = reinterpret_cast<Number*>(start + tile.offset[coordinate / kLanes] + k / rows_in_vector);
    return numbers[k % rows_in_vector * kLanes + coordinate % kLanes];
  }

  const int32_t n_, padded_;
};

}  // namespace
}  // namespace pairmix
