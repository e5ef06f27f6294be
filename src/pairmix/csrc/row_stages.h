// The first stages on the way between rows and tiles.
//
// Where the first stages are a run inside units, and a row is units one after the other, once or repeated, they need no pass of
// their own: they are computed while the rows are read into a tile, and back while its gradients are written to rows. The tile
// holds what is behind them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
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
  static constexpr int width = Simd<T>::width;

 public:
  static constexpr bool exists = kRunStages<kLanes> > 0;
  // A vector of a row has so many units, which are read and written together.
  static constexpr int together = width / kLanes;

  // Whether the first stages of this schedule can be computed on these rows, whose stages have these strides inside units.
  static bool fits(const Call& call, const std::vector<int32_t>& stride) {
    return exists && call.plan->n() % call.in_features == 0 && call.in_features % width == 0 && call.x.column_stride == 1 &&
           is_run<kLanes>(stride.data(), stride.size());
  }

  // For the tile of a workspace. `coeffs` are those of the first stage.
  RowStages(const T* coeffs, int64_t stage_size, int32_t features, int32_t n, const Workspace<T>& work)
      : coeffs_(coeffs), stage_size_(stage_size), features_(features), n_(n), work_(work) {}

  // All rows of a tile: a few after the other, since a vector may be less than a cache line of a row, or all of a unit at once.
  void read(const Tile<T>& tile) const {
    each_rows_and_units(tile, [&](const Chunk& chunk, int64_t first, int rows, auto vectors) __attribute__((always_inline)) {
      read_rows<vectors()>(chunk, first, rows);
    });
  }
  void read_unit(int32_t unit, Vector<T>* to) const {
    const Chunk chunk(*this, unit, column(unit), &to);
    in_blocks<T, kLanes>(work_.count, Share{}, [&](int64_t first, int rows, auto vectors) __attribute__((always_inline)) {
      read_rows<vectors()>(chunk, first, rows);
    });
  }

  // The tile has the gradients behind the first stages; those of the coefficients are added to `gradients`, if it is not null, and
  // those of the rows written, if they are wanted. If rows are repeated, those are still to be summed, and go to the tile.
  void write_back(const Tile<T>& tile, T* gradients) const {
    with_wanted(gradients, [&](auto parameters, auto input) {
      each_rows_and_units(tile, [&](Chunk& chunk, int64_t first, int rows, auto vectors) __attribute__((always_inline)) {
        write_rows_back<parameters(), input(), vectors()>(chunk, first, rows);
        if constexpr (parameters()) add_gradients(chunk, gradients);
      });
    });
  }
  void write_unit_back(int32_t unit, Vector<T>* g, T* gradients) const {
    with_wanted(gradients, [&](auto parameters, auto input) {
      Chunk chunk(*this, unit, column(unit), &g);
      in_blocks<T, kLanes>(work_.count, Share{}, [&](int64_t first, int rows, auto vectors) __attribute__((always_inline)) {
        write_rows_back<parameters(), input(), vectors()>(chunk, first, rows);
      });
      if constexpr (parameters()) add_gradients(chunk, gradients);
    });
  }

 private:
  static int64_t place(int64_t unit) { return 2 * kLanes * unit; }

  // Where a row has a column.
  template <class Number>
  static Number* at(const Rows& rows, int64_t row, int32_t column) {
    return static_cast<Number*>(rows.data) + row * rows.row_stride + column;
  }
  // The column that goes to the first lane of a unit.
  int32_t column(int32_t unit) const { return unit * kLanes % features_; }

  // The units that are in a vector of a row.
  struct Chunk {
    int32_t first_unit, column;  // the first of them, and where it is in the row
    Vector<T>* units[together];  // where they are in the tile
    Block blocks[together];

    [[gnu::always_inline]] Chunk(const RowStages& rows, int32_t unit, int32_t column, Vector<T>* const* units)
        : Chunk(rows, unit, column, units, std::make_index_sequence<together>{}) {}
    template <size_t... I>
    [[gnu::always_inline]] Chunk(const RowStages& rows, int32_t unit, int32_t column, Vector<T>* const* units, std::index_sequence<I...>)
        : first_unit(unit), column(column), units{units[I]...}, blocks{Block(rows.coeffs_ + place(unit + I), rows.stage_size_)...} {}
  };

  [[gnu::always_inline]] void add_gradients(const Chunk& chunk, T* gradients) const {
    for (int u = 0; u < together; ++u) chunk.blocks[u].add_gradients_to(gradients + place(chunk.first_unit + u), stage_size_);
  }

  // Calls f with whether the gradients of the coefficients, and those of the rows, are wanted. One of them is.
  template <class F>
  void with_wanted(const T* gradients, F f) const {
    if (gradients && work_.grad_x.data) return f(std::true_type{}, std::true_type{});
    if (gradients) return f(std::true_type{}, std::false_type{});
    f(std::false_type{}, std::true_type{});
  }

  template <class F>
  [[gnu::always_inline]] void each_rows_and_units(const Tile<T>& tile, F f) const {
    const int64_t count = features_ / width;
    in_blocks<T, kLanes>(work_.count, Share{}, [&](int64_t first, int rows, auto vectors) {
      for (int32_t copy = 0; copy < n_; copy += features_)
        for (int64_t k = work_.share.begin(count); k < work_.share.end(count); ++k) {
          const auto column = static_cast<int32_t>(k * width), unit = (copy + column) / kLanes;
          Vector<T>* units[together];
          for (int u = 0; u < together; ++u) units[u] = tile.unit(unit + u);
          Chunk chunk(*this, unit, column, units);
          f(chunk, first, rows, vectors);
        }
    });
  }

  // A vector's width of columns, as vectors of one unit each. Rows that are not there are zero.
  template <int kVectors>
  [[gnu::always_inline]] static void load_units(const S* from, int64_t stride, int rows, Vector<T>* v) {
#pragma GCC unroll 8
    for (int k = 0; k < kVectors * together; ++k) v[k] = k < rows ? load_widened<S, T>(from + k * stride) : Vector<T>{};
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) transpose<T, kLanes>(v + k * together);
  }
  template <int kVectors>
  [[gnu::always_inline]] static void store_units(Vector<T>* v, int64_t stride, int rows, bool adds, S* to) {
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) transpose<T, kLanes>(v + k * together);
#pragma GCC unroll 8
    for (int k = 0; k < kVectors * together; ++k)
      if (k < rows) store_or_add<S, T>(to + k * stride, v[k], adds);
  }

  // So many rows from `first` on.
  template <int kVectors>
  [[gnu::always_inline]] void read_rows(const Chunk& chunk, int64_t first, int rows) const {
    Vector<T> v[kVectors * together];
    load_units<kVectors>(at<const S>(work_.x, first, chunk.column), work_.x.row_stride, rows, v);
#pragma GCC unroll 8
    for (int u = 0; u < together; ++u)
      for (int k = 0; k < kVectors; ++k) chunk.units[u][first / together + k] = chunk.blocks[u].forward(v[k * together + u]);
  }

  template <bool kParameters, bool kInput, int kVectors>
  [[gnu::always_inline]] void write_rows_back(Chunk& chunk, int64_t first, int rows) const {
    const bool repeats = features_ < n_;
    Vector<T> z[kVectors * together] = {};
    if constexpr (kParameters) load_units<kVectors>(at<const S>(work_.x, first, chunk.column), work_.x.row_stride, rows, z);
#pragma GCC unroll 8
    for (int u = 0; u < together; ++u) {
      Vector<T> inputs[kVectors], g[kVectors], *of_unit = chunk.units[u] + first / together;
      for (int k = 0; k < kVectors; ++k) inputs[k] = z[k * together + u], g[k] = of_unit[k];
      chunk.blocks[u].template backward<kParameters, kVectors>(inputs, g);
      for (int k = 0; k < kVectors; ++k) z[k * together + u] = g[k];
      if (kInput && repeats) std::copy_n(g, kVectors, of_unit);
    }
    if (kInput && !repeats)
      store_units<kVectors>(z, work_.grad_x.row_stride, rows, work_.grad_x.adds, at<S>(work_.grad_x, first, chunk.column));
  }

  const T* coeffs_;
  const int64_t stage_size_;
  const int32_t features_, n_;
  const Workspace<T>& work_;
};

}  // namespace
}  // namespace pairmix
