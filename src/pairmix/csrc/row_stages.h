// The first stages on the way between rows and tiles.
//
// Where the first stages are a run inside units, and a row is units one after the other, once or repeated, they need no pass of
// their own: they are computed while the rows are read into a tile, and back while its gradients are written to rows. The tile
// holds what is behind them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "half_precision.h"
#include "kernel.h"
#include "stages.h"
#include "team.h"
#include "tiles.h"
#include "workspace.h"

namespace pairmix {
namespace {

template <class S, class T, int kLanes>
class RowStages {
  using Block = RunBlock<T, kLanes>;

 public:
  // A unit is a vector of a row: where it is less, rows would have to be transposed, and a pass of their own is as fast.
  static constexpr bool exists = kRunStages<kLanes> > 0 && kLanes == Simd<T>::width;

  // Whether the first stages of this schedule can be computed on these rows, whose stages have these strides inside units.
  static bool fits(const Call& call, const std::vector<int32_t>& stride) {
    return exists && call.plan->n() % call.in_features == 0 && call.in_features % kLanes == 0 && call.x.column_stride == 1 &&
           is_run<kLanes>(stride.data(), stride.size());
  }

  // For the tile of a workspace. `coeffs` are those of the first stage.
  RowStages(const T* coeffs, int64_t stage_size, int32_t features, int32_t n, const Workspace<T>& work)
      : coeffs_(coeffs), stage_size_(stage_size), features_(features), n_(n), work_(work) {}

  // All rows of a tile: a few after the other, since a vector may be less than a cache line of a row, or all of a unit at once.
  void read(const Tile<T>& tile) const {
    each_rows([&](int64_t first, auto rows) __attribute__((always_inline)) {
      each_unit([&](int32_t unit, int32_t column) __attribute__((always_inline)) {
        read_rows<rows()>(block(unit), column, first, tile.unit(unit));
      });
    });
  }
  void read_unit(int32_t unit, Vector<T>* to) const {
    const Block block = this->block(unit);
    each_rows([&](int64_t first, auto rows) __attribute__((always_inline)) {
      read_rows<rows()>(block, column(unit), first, to);
      for (int k = 0; k < rows(); ++k) prefetch(at<const S>(work_.x, first + k, column(unit) + kAhead), kLanes);
    });
  }

  // The tile has the gradients behind the first stages; those of the coefficients are added to `gradients`, if it is not null, and
  // those of the rows written, if they are wanted. If rows are repeated, those are still to be summed, and go to the tile.
  void write_back(const Tile<T>& tile, T* gradients) const {
    with_wanted(gradients, [&](auto parameters, auto input) {
      each_rows([&](int64_t first, auto rows) __attribute__((always_inline)) {
        each_unit([&](int32_t unit, int32_t column) __attribute__((always_inline)) {
          Block block = this->block(unit);
          write_rows_back<parameters(), input(), rows()>(block, column, first, tile.unit(unit));
          if constexpr (parameters()) block.add_gradients_to(gradients + place(unit), stage_size_);
        });
      });
    });
  }
  void write_unit_back(int32_t unit, Vector<T>* g, T* gradients) const {
    with_wanted(gradients, [&](auto parameters, auto input) {
      Block block = this->block(unit);
      each_rows([&](int64_t first, auto rows) __attribute__((always_inline)) {
        write_rows_back<parameters(), input(), rows()>(block, column(unit), first, g);
      });
      if constexpr (parameters()) block.add_gradients_to(gradients + place(unit), stage_size_);
    });
  }

 private:
  static int64_t place(int64_t unit) { return 2 * kLanes * unit; }
  [[gnu::always_inline]] Block block(int32_t unit) const { return {coeffs_ + place(unit), stage_size_}; }

  // Of all rows one unit is read, and then the next one. That is no stream that the processor prefetches by itself: so far ahead.
  static constexpr int32_t kAhead = 4 * kLanes;

  // The column that goes to the first lane of a unit.
  int32_t column(int32_t unit) const { return unit * kLanes % features_; }

  template <class Number>
  static Number* at(const Rows& rows, int64_t row, int32_t column) {
    return static_cast<Number*>(rows.data) + row * rows.row_stride + column;
  }

  // Calls f(first row, how many), for a few rows after the other.
  template <class F>
  [[gnu::always_inline]] void each_rows(F f) const {
    in_blocks<T, kLanes>(work_.count, Share{}, [&](int64_t first, int, auto rows) __attribute__((always_inline)) { f(first, rows); });
  }

  // Calls f(unit, its column).
  template <class F>
  [[gnu::always_inline]] void each_unit(F f) const {
    const int32_t of_row = features_ / kLanes;
    for (int32_t copy = 0; copy < n_ / kLanes; copy += of_row)
      for (auto k = static_cast<int32_t>(work_.share.begin(of_row)); k < work_.share.end(of_row); ++k) f(copy + k, k * kLanes);
  }

  // Calls f with whether the gradients of the coefficients, and those of the rows, are wanted. One of them is.
  template <class F>
  void with_wanted(const T* gradients, F f) const {
    if (gradients && work_.grad_x.data) return f(std::true_type{}, std::true_type{});
    if (gradients) return f(std::true_type{}, std::false_type{});
    f(std::false_type{}, std::true_type{});
  }

  template <int kRows>
  [[gnu::always_inline]] void read_rows(const Block& block, int32_t column, int64_t first, Vector<T>* to) const {
    const S* from = at<const S>(work_.x, first, column);
    Vector<T> v[kRows];
#pragma GCC unroll 4
    for (int k = 0; k < kRows; ++k) v[k] = load_widened<S, T>(from + k * work_.x.row_stride);
#pragma GCC unroll 4
    for (int k = 0; k < kRows; ++k) to[first + k] = block.forward(v[k]);
  }

  template <bool kParameters, bool kInput, int kRows>
  [[gnu::always_inline]] void write_rows_back(Block& block, int32_t column, int64_t first, Vector<T>* of_unit) const {
    Vector<T> z[kRows] = {}, g[kRows];
    if constexpr (kParameters) {
      const S* from = at<const S>(work_.x, first, column);
#pragma GCC unroll 4
      for (int k = 0; k < kRows; ++k) z[k] = load_widened<S, T>(from + k * work_.x.row_stride);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kRows; ++k) g[k] = of_unit[first + k];
    block.template backward<kParameters, kRows>(z, g);
    if constexpr (kInput) {
      if (features_ < n_) return void(std::copy_n(g, kRows, of_unit + first));
      S* to = at<S>(work_.grad_x, first, column);
#pragma GCC unroll 4
      for (int k = 0; k < kRows; ++k) store_or_add<S, T>(to + k * work_.grad_x.row_stride, g[k], work_.grad_x.adds);
    }
  }

  const T* coeffs_;
  const int64_t stage_size_;
  const int32_t features_, n_;
  const Workspace<T>& work_;
};

}  // namespace
}  // namespace pairmix
