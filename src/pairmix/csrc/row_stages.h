// The first stages on the way between rows and tiles.
//
// Where the first stages are a run inside units, and a row is units one after the other, they need no pass of their own:
// they are computed while the rows are read into a tile, and back while its gradients are written to rows. The tile holds
// what is behind them.
#pragma once

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
    return exists && call.in_features == call.plan->even() && call.in_features % width == 0 &&
           call.x.column_stride == 1 && is_run<kLanes>(stride.data(), stride.size());
  }

  RowStages(const T* coeffs, int64_t stage_size, int32_t units) : coeffs_(coeffs), stage_size_(stage_size), units_(units) {}

  void read(const Rows& x, int64_t count, const Tile<T>& tile, const Share& share) const {
    in_blocks<T, kLanes>(count, Share{}, [&](int64_t first, int rows, auto vectors) {
      const S* from = row<const S>(x, first);
      each_column(share, [&](int32_t column) {
        Vector<T> v[vectors * rows_in_vector];
        load_units<vectors()>(from + column, x.row_stride, rows, v);
#pragma GCC unroll 8
        for (int u = 0; u < rows_in_vector; ++u) {
          const int32_t unit = column / kLanes + u;
          const Block block(coeffs_ + place(unit), stage_size_);
          Vector<T>* to = tile.unit(unit) + first / rows_in_vector;
          for (int k = 0; k < vectors; ++k) to[k] = block.forward(v[k * rows_in_vector + u]);
        }
      });
    });
  }

  // `tile` has the gradients behind these stages; those of its coefficients are added to `gradients`, and `grad_x` is written,
  // if they are not null.
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

  // Calls f with the first column of every `rows_in_vector` units.
  template <class F>
  void each_column(const Share& share, F f) const {
    const int32_t count = units_ / rows_in_vector;
    for (int64_t k = share.begin(count); k < share.end(count); ++k) f(static_cast<int32_t>(k * width));
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
      each_column(share, [&](int32_t column) {
        Vector<T> z[vectors * rows_in_vector] = {};
        if constexpr (kParameters) load_units<vectors()>(input + column, x.row_stride, rows, z);
#pragma GCC unroll 8
        for (int u = 0; u < rows_in_vector; ++u) {
          const int32_t unit = column / kLanes + u;
          Block block(coeffs_ + place(unit), stage_size_);
          const Vector<T>* g = tile.unit(unit) + first / rows_in_vector;
          for (int k = 0; k < vectors; ++k) {
            Vector<T>& it = z[k * rows_in_vector + u];
            it = block.template backward<kParameters>(it, g[k]);
          }
          if constexpr (kParameters) block.add_gradients_to(gradients + place(unit), stage_size_);
        }
        if constexpr (kInput) store_units<vectors()>(z, grad_x.row_stride, rows, grad_x.adds, to + column);
      });
    });
  }

  const T* coeffs_;
  const int64_t stage_size_;
  const int32_t units_;
};

}  // namespace
}  // namespace pairmix
