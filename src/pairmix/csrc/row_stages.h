// The first stages on the way between rows and tiles.
//
// Where the first stages are a run inside units, and a row is units one after the other, once or repeated, they need no pass of
// their own: they are computed while the rows are read into a tile, and back while its gradients are written to rows. The tile
// holds what is behind them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "half_precision.h"
#include "kernel.h"
#include "stages.h"
#include "team.h"
#include "tiles.h"

namespace pairmix {
namespace {

template <class S, class T, int kLanes>
class RowStages {
  using Block = RunBlock<T, kLanes>;
  static constexpr int width = Simd<T>::width, rows_in_vector = kRowsInVector<T, kLanes>;

 public:
  static constexpr bool exists = kRunStages<kLanes> > 0;

  // Whether the first stages of this schedule can be computed on these rows, whose stages have these strides inside units.
  static bool fits(const Call& call, const std::vector<int32_t>& stride) {
    return exists && call.plan->n() % call.in_features == 0 && call.in_features % width == 0 && call.x.column_stride == 1 &&
           is_run<kLanes>(stride.data(), stride.size());
  }

  RowStages(const T* coeffs, int64_t stage_size, int32_t features, int32_t n)
      : coeffs_(coeffs), stage_size_(stage_size), features_(features), n_(n) {}

  void read(const Rows& x, int64_t count, const Tile<T>& tile, const Share& share) const {
    in_blocks<T, kLanes>(count, Share{}, [&](int64_t first, int rows, auto vectors) {
      const S* from = row<const S>(x, first);
      each_column(share, [&](int32_t column, int32_t first_unit) {
        Vector<T> v[vectors * rows_in_vector];
        load_units<vectors()>(from + column, x.row_stride, rows, v);
#pragma GCC unroll 8
        for (int u = 0; u < rows_in_vector; ++u) {
          const Block block(coeffs_ + place(first_unit + u), stage_size_);
          Vector<T>* to = tile.unit(first_unit + u) + first / rows_in_vector;
          for (int k = 0; k < vectors; ++k) to[k] = block.forward(v[k * rows_in_vector + u]);
        }
      });
    });
  }

  // `tile` has the gradients behind these stages; those of its coefficients are added to `gradients`, and `grad_x` is written,
  // if they are not null. If rows are repeated, the gradients before these stages go to the tile instead: they are still to be
  // summed.
  void write_back(const Tile<T>& tile, const Rows& x, T* gradients, const Rows& grad_x, int64_t count, const Share& share) const {
    if (gradients && grad_x.data) return write_back<true, true>(tile, x, gradients, grad_x, count, share);
    if (gradients) return write_back<true, false>(tile, x, gradients, grad_x, count, share);
    write_back<false, true>(tile, x, gradients, grad_x, count, share);
  }

 private:
  template <class Number>
  static Number* row(const Rows& rows, int64_t number) {
    return static_cast<Number*>(rows.data) + number * rows.row_stride;
  }
  static int64_t place(int64_t unit) { return 2 * kLanes * unit; }

  // Calls f(column, unit) with the first of every vector of a row, as often as the row is repeated.
  template <class F>
  void each_column(const Share& share, F f) const {
    const int32_t count = features_ / width;
    for (int32_t copy = 0; copy < n_; copy += features_)
      for (int64_t k = share.begin(count); k < share.end(count); ++k)
        f(static_cast<int32_t>(k * width), static_cast<int32_t>(copy + k * width) / kLanes);
  }

  // A vector's width of columns, as vectors of one unit each. Rows that are not there are zero.
  template <int kVectors>
  [[gnu::always_inline]] static void load_units(const S* from, int64_t stride, int rows, Vector<T>* v) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors * rows_in_vector; ++k) v[k] = k < rows ? load_widened<S, T>(from + k * stride) : Vector<T>{};
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) transpose<T, kLanes>(v + k * rows_in_vector);
  }
  template <int kVectors>
  [[gnu::always_inline]] static void store_units(Vector<T>* v, int64_t stride, int rows, bool adds, S* to) {
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) transpose<T, kLanes>(v + k * rows_in_vector);
#pragma GCC unroll 8
    for (int k = 0; k < kVectors * rows_in_vector; ++k)
      if (k < rows) store_or_add<S, T>(to + k * stride, v[k], adds);
  }

  template <bool kParameters, bool kInput>
  void write_back(const Tile<T>& tile, const Rows& x, T* gradients, const Rows& grad_x, int64_t count, const Share& share) const {
    in_blocks<T, kLanes>(count, Share{}, [&](int64_t first, int rows, auto vectors) {
      const S* input = kParameters ? row<const S>(x, first) : nullptr;
      S* to = kInput ? row<S>(grad_x, first) : nullptr;
      each_column(share, [&](int32_t column, int32_t first_unit) {
        Vector<T> z[vectors * rows_in_vector] = {};
        if constexpr (kParameters) load_units<vectors()>(input + column, x.row_stride, rows, z);
#pragma GCC unroll 8
        for (int u = 0; u < rows_in_vector; ++u) {
          const int64_t coeffs = place(first_unit + u);
          Block block(coeffs_ + coeffs, stage_size_);
          Vector<T>* of_unit = tile.unit(first_unit + u) + first / rows_in_vector;
          Vector<T> inputs[vectors()], g[vectors()];
          for (int k = 0; k < vectors; ++k) inputs[k] = z[k * rows_in_vector + u], g[k] = of_unit[k];
          block.template backward<kParameters, vectors()>(inputs, g);
          for (int k = 0; k < vectors; ++k) z[k * rows_in_vector + u] = g[k];
          if (kInput && features_ < n_) std::copy_n(g, vectors(), of_unit);
          if constexpr (kParameters) block.add_gradients_to(gradients + coeffs, stage_size_);
        }
        if (kInput && features_ == n_) store_units<vectors()>(z, grad_x.row_stride, rows, grad_x.adds, to + column);
      });
    });
  }

  const T* coeffs_;
  const int64_t stage_size_;
  const int32_t features_, n_;
};

}  // namespace
}  // namespace pairmix
