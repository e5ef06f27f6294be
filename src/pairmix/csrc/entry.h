// The first stages on the way between rows and tiles.
//
// Where the first three stages are inside units, and a row is units one after the other, they need no pass of their own:
// they are computed while the rows are read into a tile, and back while its gradients are written to rows. The tile holds
// what is behind them.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "halves.h"
#include "kernel.h"
#include "scratch.h"
#include "stages.h"
#include "tiles.h"

namespace pairmix {
namespace {

constexpr int32_t kEntryStages = 3;

template <class S, class T, int kLanes>
class Entry {
  using Block = InsideBlock<T, kLanes, 1, 2, 4>;

 public:
  static constexpr bool exists = kLanes >= 8 && kLanes == Simd<T>::width;

  // Whether these rows can be entered by this schedule, whose stages have these strides inside units.
  static bool fits(const Call& call, const std::vector<int32_t>& stride) {
    return exists && call.in_features == call.plan->even() && call.x.column_stride == 1 &&
           are_inside_1_2_4(stride.data(), stride.size());
  }

  Entry(const T* coeffs, int64_t stage_size, int32_t units) : coeffs_(coeffs), stage_size_(stage_size), units_(units) {}

  void read(const Rows& x, int64_t start, int64_t count, const Tile<T>& tile, const Share& share) const {
    in_blocks(count, [&](int64_t first, auto together) {
      const S* from = row<const S>(x, start + first);
      for (int64_t unit = share.begin(units_); unit < share.end(units_); ++unit) {
        const Block block(coeffs_ + place(unit), stage_size_);
        Vector<T>* to = tile.unit(unit) + first;
        for (int k = 0; k < together; ++k) to[k] = block.forward(load_widened<S, T>(from + k * x.row_stride + unit * kLanes));
      }
    });
  }

  // `tile` has the gradients behind the entry; those of its coefficients are added to `gradients`, and `grad_x` is written,
  // if they are not null.
  void write_back(const Tile<T>& tile, const Rows& x, T* gradients, const Rows& grad_x, int64_t start, int64_t count,
                  const Share& share) const {
    if (gradients && grad_x.data) return write_back<true, true>(tile, x, gradients, grad_x, start, count, share);
    if (gradients) return write_back<true, false>(tile, x, gradients, grad_x, start, count, share);
    write_back<false, true>(tile, x, gradients, grad_x, start, count, share);
  }

 private:
  static constexpr int kRowsTogether = 4;  // streams that the processor can prefetch

  template <class Number>
  static Number* row(const Rows& rows, int64_t number) {
    return static_cast<Number*>(rows.data) + number * rows.row_stride;
  }
  static int64_t place(int64_t unit) { return 2 * kLanes * unit; }

  template <class F>
  static void in_blocks(int64_t count, F f) {
    int64_t first = 0;
    for (; first + kRowsTogether <= count; first += kRowsTogether) f(first, std::integral_constant<int, kRowsTogether>{});
    for (; first < count; ++first) f(first, std::integral_constant<int, 1>{});
  }

  template <bool kParameters, bool kInput>
  void write_back(const Tile<T>& tile, const Rows& x, T* gradients, const Rows& grad_x, int64_t start, int64_t count,
                  const Share& share) const {
    in_blocks(count, [&](int64_t first, auto together) {
      const S* input = kParameters ? row<const S>(x, start + first) : nullptr;
      S* to = kInput ? row<S>(grad_x, start + first) : nullptr;
      for (int64_t unit = share.begin(units_); unit < share.end(units_); ++unit) {
        Block block(coeffs_ + place(unit), stage_size_);
        const Vector<T>* g = tile.unit(unit) + first;
        for (int k = 0; k < together; ++k) {
          Vector<T> z{};
          if constexpr (kParameters) z = load_widened<S, T>(input + k * x.row_stride + unit * kLanes);
          const Vector<T> of_z = block.template backward<kParameters>(z, g[k]);
          if constexpr (kInput) store_narrowed<S, T>(to + k * grad_x.row_stride + unit * kLanes, of_z);
        }
        if constexpr (kParameters) block.add_gradients_to(gradients + place(unit), stage_size_);
      }
    });
  }

  const T* coeffs_;
  const int64_t stage_size_;
  const int32_t units_;
};

}  // namespace
}  // namespace pairmix
