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
template <class S, class T>
[[gnu::always_inline]] inline void store_or_add(S* to, Vector<T> v, bool adds, int count) {
  if (count == Simd<T>::width) return store_or_add<S, T>(to, v, adds);
  store_narrowed<S, T>(to, adds ? v + load_widened<S, T>(to, count) : v, count);
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

  // The columns go to the coordinates from `start` on. Rows and columns that are not there become zero.
  template <int kVectors, class From>
  void read_block(const From* from, int64_t stride, int together, int32_t columns, const Tile<T>& tile, int32_t start,
                  int64_t first, T* column_sums) const {
    constexpr int rows = kVectors * rows_in_vector;
    Vector<T>* const to = tile.vectors + first / rows_in_vector;
    const int32_t end = start + columns < n_ ? columns : padded_ - start;
    const auto copy = [&](int32_t i, int32_t count, auto whole) __attribute__((always_inline)) {
      Vector<T> v[rows], sum{};
      for (int k = 0; k < rows; ++k) {
        if constexpr (whole())
          v[k] = load_widened<From, T>(from + k * stride + i);
        else
          v[k] = k < together ? load_widened<From, T>(from + k * stride + i, count) : Vector<T>{};
        sum += v[k];
      }
      if (column_sums) store_or_add<T, T>(column_sums + i, sum, true, whole() ? width : count);
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        transpose<T, kLanes>(v + k * rows_in_vector);
        for (int u = 0; u < rows_in_vector && (whole() || i + u * kLanes < end); ++u)
          to[tile.offset[(start + i) / kLanes + u] + k] = v[k * rows_in_vector + u];
      }
    };
    each_columns(columns, together == rows, copy);
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
    const auto copy = [&](int32_t i, int32_t count, auto whole) __attribute__((always_inline)) {
      Vector<T> added{}, v[rows];
      if (bias) added = whole() ? load(bias + i) : load_widened<T, T>(bias + i, count);
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        for (int u = 0; u < rows_in_vector; ++u)
          v[k * rows_in_vector + u] = whole() || u * kLanes < count ? from[tile.offset[i / kLanes + u] + k] : Vector<T>{};
        transpose<T, kLanes>(v + k * rows_in_vector);
      }
      for (int k = 0; k < rows; ++k)
        if constexpr (whole())
          store_or_add<To, T>(to + k * stride + i, v[k] + added, adds);
        else if (k < together)
          store_or_add<To, T>(to + k * stride + i, v[k] + added, adds, count);
    };
    each_columns(columns, together == rows, copy);
  }

  // Calls f(first column, how many, whether all of them and all rows are there) for a vector's width of columns after the other.
  template <class F>
  [[gnu::always_inline]] static void each_columns(int32_t columns, bool all_rows, F f) {
    int32_t i = 0;
    if (all_rows)
      for (; i + width <= columns; i += width) f(i, width, std::true_type{});
    for (; i < columns; i += width) f(i, std::min<int32_t>(width, columns - i), std::false_type{});
  }

  const int32_t n_, padded_;
};

}  // namespace
}  // namespace pairmix
