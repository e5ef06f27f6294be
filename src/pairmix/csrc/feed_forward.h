// Feed-forward blocks: a wide map, an activation and a narrow map, in one call.
//
// A tile of rows goes all the way, so that the hidden layer is never in memory as a whole. Backward starts from the inputs
// again, and keeps nothing of a tile when the next one begins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "kernel.h"
#include "run.h"
#include "scratch.h"
#include "several.h"
#include "team.h"

namespace pairmix {
namespace {

template <class S, class T, int kLanes>
class FeedForwardRun {
  using Map = Run<S, T, kLanes>;
  static constexpr int kTogether = 4;  // vectors that are activated at a time

 public:
  FeedForwardRun(const FeedForward& block, bool backward) : it_(block), gated_(block.ups == 2) {
    const int32_t depth = Map::depth_in_chain(it_.down);
    for (int32_t k = 0; k < it_.ups; ++k) up_[k] = std::make_unique<Map>(it_.up[k], backward, depth);
    down_ = std::make_unique<Map>(it_.down, backward, depth, /*reads_rows=*/false);
    const int64_t hidden = int64_t{down_->units()} * kLanes, n = it_.down.plan->n();
    lay_out_in(arena_, [&](Parts& parts) {
      for (int32_t k = 0; k < it_.ups; ++k) bias_[k] = parts.take<T>(hidden);
      tiles_.assign(down_->threads(), {});
      for (Tiles& tiles : tiles_)
        for (int32_t k = 0; k < it_.ups; ++k) tiles.hidden[k] = {parts.take<Vector<T>>(down_->tile_size()), down_->offset()};
    });
    for (int32_t k = 0; k < it_.ups; ++k) {
      const T* given = static_cast<const T*>(it_.up[k].parameters.bias);
      std::fill(bias_[k], bias_[k] + hidden, T(0));
      if (given) std::copy_n(given, n, bias_[k]);
    }
  }

  bool is_exact() const { return up_[0]->is_exact() && (!gated_ || up_[1]->is_exact()) && down_->is_exact(); }

  void forward() {
    each_tile([this](Work& work) { tile_forward(work); });
  }

  // Returns what `Run::collect` does, of all maps.
  bool backward() {
    each_tile([this](Work& work) { tile_backward(work); });
    bool all = down_->collect();
    for (int32_t k = 0; k < it_.ups; ++k) all = up_[k]->collect() && all;
    return all;
  }

 private:
  struct Tiles {
    Tile<T> hidden[2];  // what the wide maps give, without bias
  };
  // What a share of the tiles is computed with.
  struct Work {
    Tiles& tiles;
    Workspace<T>* up[2];
    Workspace<T>& down;
  };

  template <class F>
  void each_tile(F f) {
    const int64_t rows = down_->rows_per_tile(), count = (it_.down.rows + rows - 1) / rows;
    in_shares(down_->threads(), [&](const Share& mine) {
      const auto me = static_cast<int32_t>(mine.member);
      Work work{tiles_[me], {&up_[0]->workspace(me), gated_ ? &up_[1]->workspace(me) : nullptr}, down_->workspace(me)};
      for (int32_t k = 0; k < it_.ups; ++k) up_[k]->clear_sums(*work.up[k]);
      down_->clear_sums(work.down);
      for (int64_t tile = mine.begin(count); tile < mine.end(count); ++tile) {
        for (int32_t k = 0; k < it_.ups; ++k) up_[k]->begin_at(tile * rows, *work.up[k]);
        down_->begin_at(tile * rows, work.down);
        f(work);
      }
    });
  }

  void tile_forward(Work& work) const {
    for (int32_t k = 0; k < it_.ups; ++k) {
      up_[k]->read_input(work.tiles.hidden[k], *work.up[k]);
      up_[k]->mix(work.tiles.hidden[k], *work.up[k]);
    }
    const Tile<T>& z = work.tiles.hidden[0];
    activate(work, z);
    down_->mix(z, work.down);
    down_->write_output(z, work.down);
  }

  void tile_backward(Work& work) const {
    for (int32_t k = 0; k < it_.ups; ++k) {
      if (up_[k]->wants_parameters()) {
        up_[k]->mix_and_keep(work.tiles.hidden[k], *work.up[k]);
      } else {
        up_[k]->read_input(work.tiles.hidden[k], *work.up[k]);
        up_[k]->mix(work.tiles.hidden[k], *work.up[k]);
      }
    }
    activate_and_differentiate(work, down_->wants_parameters() ? &work.down.kept[0] : nullptr);
    if (down_->wants_parameters()) down_->keep_inputs(work.down);
    down_->read_gradient(work.down);
    down_->mix_back(work.down);
    activate_back(work);
    for (int32_t k = 0; k < it_.ups; ++k) {
      if (!up_[k]->wants_parameters() && !it_.up[k].grad_x.data) continue;
      up_[k]->mix_back(*work.up[k]);
      up_[k]->write_gradient(*work.up[k]);
    }
  }

  // Calls f with the activation as a type.
  template <class F>
  void with_activation(F f) const {
    switch (it_.activation) {
      case Activation::relu: return f(Relu<T>());
      case Activation::gelu: return f(Gelu<T>());
      case Activation::gelu_tanh: return f(GeluTanh<T>());
      case Activation::silu: return f(Silu<T>());
    }
  }

  // Calls f(unit, first vector, how many) for all vectors of the hidden layer: several at a time, then one by one.
  template <class F>
  [[gnu::always_inline]] void each_vectors(const Work& work, F f) const {
    for (int32_t unit = 0; unit < down_->units(); ++unit) {
      int32_t r = 0;
      for (; r + kTogether <= work.down.depth; r += kTogether) f(unit, r, std::integral_constant<int, kTogether>());
      for (; r < work.down.depth; ++r) f(unit, r, std::integral_constant<int, 1>());
    }
  }

  // Some vectors of what a wide map gives, with its bias.
  template <int n>
  [[gnu::always_inline]] Several<T, n> biased(const Work& work, int map, int32_t unit, int32_t r) const {
    const Several<T, n> bias = spread<kLanes>(bias_[map] + int64_t{unit} * kLanes);
    return Several<T, n>::load(work.tiles.hidden[map].unit(unit) + r) + bias;
  }

  // The input of the narrow map, from what the wide ones gave.
  void activate(Work& work, const Tile<T>& to) const {
    with_activation([&](auto activation) {
      each_vectors(work, [&](int32_t unit, int32_t r, auto count) {
        Several<T, count()> z = activation.value(biased<count()>(work, 0, unit, r));
        if (gated_) z = z * biased<count()>(work, 1, unit, r);
        z.store(to.unit(unit) + r);
      });
    });
  }

  // Likewise, if `to` is not null; and what the wide maps gave becomes what its gradient is to be multiplied with.
  void activate_and_differentiate(Work& work, const Tile<T>* to) const {
    with_activation([&](auto activation) {
      each_vectors(work, [&](int32_t unit, int32_t r, auto count) {
        auto [value, slope] = activation.both(biased<count()>(work, 0, unit, r));
        if (gated_) {
          const Several<T, count()> factor = biased<count()>(work, 1, unit, r);
          value.store(work.tiles.hidden[1].unit(unit) + r);
          value = value * factor, slope = slope * factor;
        }
        if (to) value.store(to->unit(unit) + r);
        slope.store(work.tiles.hidden[0].unit(unit) + r);
      });
    });
  }

  // The gradients of what the wide maps gave, from that of the input of the narrow one.
  void activate_back(Work& work) const {
    for (int32_t k = 0; k < it_.ups; ++k)
      for (int32_t unit = 0; unit < down_->units(); ++unit) {
        const Vector<T>*slope = work.tiles.hidden[k].unit(unit), *g = work.down.gradient.unit(unit);
        Vector<T>* h = work.up[k]->gradient.unit(unit);
        Vector<T> sum[1] = {};
        for (int32_t r = 0; r < work.down.depth; ++r) sum[0] += h[r] = g[r] * slope[r];
        if (it_.up[k].gradients.bias) add_folded<kLanes, T>(work.up[k]->bias_gradient + int64_t{unit} * kLanes, sum);
      }
  }

  Arena arena_;
  const FeedForward& it_;
  const bool gated_;
  std::unique_ptr<Map> up_[2], down_;
  T* bias_[2];  // of the wide maps, with zeros where there are none
  std::vector<Tiles> tiles_;
};

}  // namespace
}  // namespace pairmix
