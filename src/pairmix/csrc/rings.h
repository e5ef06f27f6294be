// Two stages of pairs without a pattern at once, along their rings (see Rings in plan.h): tiles are read from one end to the
// other and written once for both, what is between them stays in the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "plan.h"
#include "simd.h"
#include "stages.h"

namespace pairmix {
namespace {

// So many units a walk keeps on its way.
constexpr int32_t kRingUnits = 9;

// Calls f with the depth of the tiles of wide layers as a constant, and others as 0.
template <class F>
inline void with_depth(int32_t depth, F f) {
  if (depth == 2)
    f(std::integral_constant<int, 2>{});
  else if (depth == 4)
    f(std::integral_constant<int, 4>{});
  else if (depth == 8)
    f(std::integral_constant<int, 8>{});
  else
    f(std::integral_constant<int, 0>{});
}

// First and Second are the blocks of the two stages. kDepth is how many vectors of a unit there are, or 0 if it is not one of the
// usual numbers.
template <class First, class Second, class T, int kDepth>
class RingWalk {
  using V = Vector<T>;

 public:
  // `room` is for kRingUnits units. From unit to unit there are `step` vectors in tiles, of which the first `depth` are used.
  RingWalk(const Rings& rings, const Stage<T>& first, const Stage<T>& second, int32_t step, V* room)
      : rings_(rings), first_(first), second_(second), step_(step) {
    for (V** unit : {&start_, &latest_, &carried_[0], &carried_[1], &g_start_, &g_second_, &g_even_[0], &g_even_[1], &g_odd_})
      *unit = room, room += depth();
  }

  // The second stage follows the first by one pair, since its pair k needs the pairs k and k + 1 of the first.
  void forward(const V* from, V* to) const {
    int32_t begin = 0;
    for (const int32_t end : rings_.ends) {
      mix<First>(first_, begin, unit(from, 2 * begin), unit(from, 2 * begin + 1), start_, carried_[0]);
      clear_if_padding(begin, start_);
      for (int32_t k = begin + 1; k < end; ++k) mix_both(k, from, to);
      V *last = next(to, 2 * end - 1), *start = next(to, 2 * begin);
      mix<Second>(second_, end - 1, carried_[0], start_, last, start);
      clear_if_padding(begin, start);
      begin = end;
    }
  }

  // From z, the inputs of the first stage, and the gradient g of the second one's outputs. A pair of the first stage is walked back
  // through as soon as both of its units have come back from the second. `to` becomes the gradient of z.
  template <bool kParameters>
  void backward(const V* z, const V* g, V* to) const {
    int32_t begin = 0;
    for (const int32_t end : rings_.ends) {
      const auto odd = [&](int32_t k) { return k == begin ? g_second_ : g_odd_; };
      if (kParameters) {
        mix<First>(first_, begin, unit(z, 2 * begin), unit(z, 2 * begin + 1), start_, carried_[begin % 2]);
        clear_if_padding(begin, start_);
      }
      for (int32_t k = begin + 1; k < end; ++k) {
        if (kParameters) mix<First>(first_, k, unit(z, 2 * k), unit(z, 2 * k + 1), latest_, carried_[k % 2]);
        back<Second, kParameters>(second_, k - 1, carried_[(k - 1) % 2], latest_, unit(g, 2 * k - 1), unit(g, 2 * k), odd(k - 1),
                                  g_even_[k % 2]);
        if (k - 1 > begin) back_through_first<kParameters>(k - 1, z, g_even_[(k - 1) % 2], g_odd_, to);
      }
      back<Second, kParameters>(second_, end - 1, carried_[(end - 1) % 2], start_, unit(g, 2 * end - 1), unit(g, 2 * begin),
                                odd(end - 1), g_start_);
      clear_if_padding(begin, g_start_);
      if (end - 1 > begin) back_through_first<kParameters>(end - 1, z, g_even_[(end - 1) % 2], g_odd_, to);
      back_through_first<kParameters>(begin, z, g_start_, g_second_, to);
      clear_if_padding(begin, before(to, 2 * begin));
      begin = end;
    }
  }

 private:
  int32_t depth() const { return kDepth ? kDepth : first_.depth; }

  // Unit k of the way: in a tile of this order, in that of the next group, and in the gradient for the group before.
  const V* unit(const V* tile, int64_t k) const { return tile + k * step_; }
  V* next(V* tile, int32_t k) const { return tile + int64_t{rings_.next[k]} * step_; }
  V* before(V* tile, int32_t k) const { return tile + int64_t{rings_.before[k]} * step_; }

  // The coordinate that an odd width does not have is the start of the first ring.
  void clear_if_padding(int32_t begin, V* unit) const {
    if (begin == 0 && first_.padding >= 0) std::fill_n(unit, depth(), V{});
  }

  // Pair k of a stage.
  template <class Block>
  [[gnu::always_inline]] void mix(const Stage<T>& stage, int64_t k, const V* x1, const V* x2, V* y1, V* y2) const {
    const Block block(stage.coeffs + 4 * k, 1);
    const int32_t depth = this->depth();
#pragma GCC unroll 4
    for (int32_t r = 0; r < depth; ++r) {
      const auto first = x1[r], second = x2[r];
      y1[r] = block.first(first, second);
      y2[r] = block.second(first, second);
    }
  }

  // Pair k of the first stage and pair k - 1 of the second.
  [[gnu::always_inline]] void mix_both(int64_t k, const V* from, V* to) const {
    const First block(first_.coeffs + 4 * k, 1);
    const Second following(second_.coeffs + 4 * (k - 1), 1);
    const V *x1 = unit(from, 2 * k), *x2 = unit(from, 2 * k + 1);
    V *y1 = next(to, 2 * k - 1), *y2 = next(to, 2 * k), *carried = carried_[0];
    const int32_t depth = this->depth();
#pragma GCC unroll 2
    for (int32_t r = 0; r < depth; ++r) {
      const auto before = carried[r], first = block.first(x1[r], x2[r]);
      carried[r] = block.second(x1[r], x2[r]);
      y1[r] = following.first(before, first);
      y2[r] = following.second(before, first);
    }
  }

  // Back through pair k of a stage: from the gradients g of its outputs to those of its inputs x, which are h.
  template <class Block, bool kParameters>
  [[gnu::always_inline]] void back(const Stage<T>& stage, int64_t k, const V* x1, const V* x2, const V* g1, const V* g2, V* h1,
                                   V* h2) const {
    Block block(stage.coeffs + 4 * k, 1);
    back_through<kParameters>(block, depth(), stage.goes_on, x1, x2, g1, g2, h1, h2);
    if constexpr (kParameters) block.add_gradients_to(stage.gradients + 4 * k);
  }
  template <bool kParameters>
  [[gnu::always_inline]] void back_through_first(int64_t k, const V* z, const V* g1, const V* g2, V* to) const {
    const V *x1 = kParameters ? unit(z, 2 * k) : nullptr, *x2 = kParameters ? unit(z, 2 * k + 1) : nullptr;
    back<First, kParameters>(first_, k, x1, x2, g1, g2, before(to, 2 * k), before(to, 2 * k + 1));
  }

  const Rings& rings_;
  const Stage<T>&first_, &second_;
  const int32_t step_;
  // Between the stages: the outputs of the first at the start of the ring, and of the pairs at hand.
  V *start_, *latest_, *carried_[2];
  // On the way back, likewise: the gradients at the first two units of the ring, and at the even and odd ones of the pairs at hand.
  V *g_start_, *g_second_, *g_even_[2], *g_odd_;
};

// Calls f with the walk along rings whose stages are these.
template <class T, class F>
inline void with_ring_walk(const Rings& rings, const Stage<T>& first, const Stage<T>& second, int32_t step, Vector<T>* room, F f) {
  with_block<T, 1>(first.kind, [&](auto block) {
    with_block<T, 1>(second.kind, [&](auto following) {
      with_depth(first.depth, [&](auto depth) {
        using Walk = RingWalk<typename decltype(block)::type, typename decltype(following)::type, T, depth()>;
        f(Walk(rings, first, second, step, room));
      });
    });
  });
}

}  // namespace
}  // namespace pairmix
