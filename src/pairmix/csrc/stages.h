// The stages on a component, forward and backward: where the time goes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blocks.h"
#include "plan.h"
#include "simd.h"

namespace pairmix {
namespace {

// Everything that a stage of a component needs, except its vectors.
template <class T>
struct Stage {
  Kind kind;
  int32_t stride;
  const Pair* pairs;
  const int32_t* unit_list;  // the units of the component
  int32_t units;             // how many
  int32_t padding;           // as in Component
  // Whole units: those of pair k start at coeffs[k * step], b, c and d follow at distances of `row`. Inside units, and of
  // scales: p and q of one unit after the other.
  const T* coeffs;
  int64_t step, row;
  T* gradients;        // of the coefficients, as if they were packed; null if they are not needed
  int64_t stage_size;  // from the coefficients of a stage inside units to those of the next one
  bool goes_on;        // backward: the gradient of the input is needed
  int32_t depth;

  const T* of_pair(const Pair& pair) const { return coeffs + pair.number * step; }
  T* gradients_of(const Pair& pair) const { return gradients + int64_t{4} * pair.number; }
  int64_t place_of_unit(int32_t unit, int lanes) const { return int64_t{2} * lanes * unit_list[unit]; }
};

// Pointers to the units of the component, `depth` vectors each.
template <class T>
using Units = Vector<T>* const*;

template <class T, int kLanes>
inline void clear_padding(const Stage<T>& stage, Units<T> units) {
  if (stage.padding < 0) return;
  for (int32_t r = 0; r < stage.depth; ++r) units[stage.padding][r] = ClearPadding<T, kLanes>()(units[stage.padding][r]);
}

template <class Block, class T>
[[gnu::always_inline]] inline void pair_forward(const Stage<T>& stage, int32_t p, Units<T> from, Units<T> to) {
  const int32_t i = stage.pairs[p].first, j = stage.pairs[p].second;
  const Block block(stage.of_pair(stage.pairs[p]), stage.row);
  const Vector<T>*x1 = from[i], *x2 = from[j];
  Vector<T>*y1 = to[i], *y2 = to[j];
#pragma GCC unroll 4
  for (int32_t r = 0; r < stage.depth; ++r) {
    const auto first = x1[r], second = x2[r];
    y1[r] = block.first(first, second);
    y2[r] = block.second(first, second);
  }
}

template <class Block, class T, int kLanes>
void pairs_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  for (int32_t p = 0; p < stage.units / 2; ++p) pair_forward<Block, T>(stage, p, from, to);
  clear_padding<T, kLanes>(stage, to);
}

// Two stages at once, which fall into quads. What is between them is written to `middle` only if it is kept.
template <class Block, class T, int kLanes, bool kKeepsMiddle>
void quads_forward(const Stage<T>& stage, const Stage<T>& next, Units<T> from, Units<T> middle, Units<T> to) {
  for (int32_t p = 0; p < stage.units / 2; p += 2) {
    const int32_t a = stage.pairs[p].first, b = stage.pairs[p].second;
    const int32_t c = stage.pairs[p + 1].first, d = stage.pairs[p + 1].second;
    if (stage.padding == a || stage.padding == b || stage.padding == c || stage.padding == d) {  // to be cleared between them
      const Units<T> between = kKeepsMiddle ? middle : to;
      for (const int32_t k : {p, p + 1}) pair_forward<Block, T>(stage, k, from, between);
      clear_padding<T, kLanes>(stage, between);
      for (const int32_t k : {p, p + 1}) pair_forward<Block, T>(next, k, between, to);
      continue;
    }
    const Block ab(stage.of_pair(stage.pairs[p]), stage.row), cd(stage.of_pair(stage.pairs[p + 1]), stage.row);
    const Block ac(next.of_pair(next.pairs[p]), next.row), bd(next.of_pair(next.pairs[p + 1]), next.row);
    const Vector<T>*xa = from[a], *xb = from[b], *xc = from[c], *xd = from[d];
    Vector<T>*ma = nullptr, *mb = nullptr, *mc = nullptr, *md = nullptr;
    if constexpr (kKeepsMiddle) ma = middle[a], mb = middle[b], mc = middle[c], md = middle[d];
    Vector<T>*ya = to[a], *yb = to[b], *yc = to[c], *yd = to[d];
#pragma GCC unroll 2
    for (int32_t r = 0; r < stage.depth; ++r) {
      const auto za = ab.first(xa[r], xb[r]), zb = ab.second(xa[r], xb[r]);
      const auto zc = cd.first(xc[r], xd[r]), zd = cd.second(xc[r], xd[r]);
      if constexpr (kKeepsMiddle) ma[r] = za, mb[r] = zb, mc[r] = zc, md[r] = zd;
      ya[r] = ac.first(za, zc);
      yc[r] = ac.second(za, zc);
      yb[r] = bd.first(zb, zd);
      yd[r] = bd.second(zb, zd);
    }
  }
  clear_padding<T, kLanes>(next, to);
}

// From the gradients g of a pair's outputs to those of its inputs x, which are h; those of the coefficients are added up.
template <bool kParameters, class Block, class V>
[[gnu::always_inline]] inline void back_through(Block& block, int32_t depth, bool goes_on, const V* x1, const V* x2, const V* g1,
                                                const V* g2, V* h1, V* h2) {
#pragma GCC unroll 2
  for (int32_t r = 0; r < depth; ++r) {
    const V back1 = block.first_transposed(g1[r], g2[r]), back2 = block.second_transposed(g1[r], g2[r]);
    if constexpr (kParameters) block.add(x1[r], x2[r], g1[r], g2[r], back1, back2);
    if (goes_on) h1[r] = back1, h2[r] = back2;
  }
}

template <class Block, bool kParameters, class T>
[[gnu::always_inline]] inline void pair_backward(const Stage<T>& stage, int32_t p, Units<T> z, Units<T> g) {
  const int32_t i = stage.pairs[p].first, j = stage.pairs[p].second;
  Block block(stage.of_pair(stage.pairs[p]), stage.row);
  const Vector<T>*x1 = kParameters ? z[i] : nullptr, *x2 = kParameters ? z[j] : nullptr;
  back_through<kParameters>(block, stage.depth, stage.goes_on, x1, x2, g[i], g[j], g[i], g[j]);
  if constexpr (kParameters) block.add_gradients_to(stage.gradients_of(stage.pairs[p]));
}

// g, the gradient of the stage's output, becomes that of its input z.
template <class Block, class T, int kLanes, bool kParameters>
void pairs_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  for (int32_t p = 0; p < stage.units / 2; ++p) pair_backward<Block, kParameters>(stage, p, z, g);
  clear_padding<T, kLanes>(stage, g);
}

// Whether two stages are walked back through at once. The sums of a quad take half of 32 registers, and leave none of 16.
constexpr bool kWalksBackInQuads = kVectorBytes == 64;

// The compiler must not know what this points to: what is read through it is read again, and not kept in registers.
template <class P>
[[gnu::always_inline]] inline void forget(P*& pointer) {
  asm volatile("" : "+r"(pointer));
}

// Gets so many numbers into the L1 cache, in time for when they are needed.
template <class T>
[[gnu::always_inline]] inline void prefetch(const T* from, int64_t numbers) {
  for (int64_t k = 0; k < numbers; k += 64 / sizeof(T)) __builtin_prefetch(from + k);
}

// The blocks of two stages between the units of a quad: first those of (a, b) and (c, d), then those of (a, c) and (b, d).
template <class Matrix>
struct Quad {
  Matrix ab, cd, ac, bd;
};

// Sums over rows of the products of one input of a quad with the gradients of its outputs a to d.
template <class V>
struct Products {
  V a{}, b{}, c{}, d{};
  [[gnu::always_inline]] void add(V x, V ga, V gb, V gc, V gd) { a += ga * x, b += gb * x, c += gc * x, d += gd * x; }
};

// Back through two stages that fall into quads. The gradients of all four blocks follow from the sums of the 16 products of an input
// with the gradient of an output, so that what is between the stages is not needed at all; only where there is padding it is
// computed again, in `middle`.
template <class Block, class T, int kLanes, bool kParameters>
void quads_backward(const Stage<T>& stage, const Stage<T>& next, Units<T> z, Units<T> middle, Units<T> g) {
  using V = Vector<T>;
  using Matrix = typename Block::Matrix;
  for (int32_t p = 0; p < stage.units / 2; p += 2) {
    const Pair &pair_ab = stage.pairs[p], &pair_cd = stage.pairs[p + 1];
    const Pair &pair_ac = next.pairs[p], &pair_bd = next.pairs[p + 1];
    const int32_t a = pair_ab.first, b = pair_ab.second, c = pair_cd.first, d = pair_cd.second;
    if (stage.padding == a || stage.padding == b || stage.padding == c || stage.padding == d) {
      if constexpr (kParameters) {
        for (const int32_t k : {p, p + 1}) pair_forward<Block, T>(stage, k, z, middle);
        clear_padding<T, kLanes>(stage, middle);
      }
      for (const int32_t k : {p, p + 1}) pair_backward<Block, kParameters>(next, k, middle, g);
      clear_padding<T, kLanes>(next, g);
      for (const int32_t k : {p, p + 1}) pair_backward<Block, kParameters>(stage, k, z, g);
      continue;
    }
    const Quad<Matrix> quad{{stage.of_pair(pair_ab), stage.row},
                            {stage.of_pair(pair_cd), stage.row},
                            {next.of_pair(pair_ac), next.row},
                            {next.of_pair(pair_bd), next.row}};
    const Quad<Matrix>* blocks = &quad;
    const V *xa = nullptr, *xb = nullptr, *xc = nullptr, *xd = nullptr;
    if constexpr (kParameters) {
      xa = z[a], xb = z[b], xc = z[c], xd = z[d];
      for (const Pair* pair : {&pair_ab, &pair_cd}) prefetch(stage.gradients_of(*pair), Matrix::kGradients * kLanes);
      for (const Pair* pair : {&pair_ac, &pair_bd}) prefetch(next.gradients_of(*pair), Matrix::kGradients * kLanes);
    }
    V *ga = g[a], *gb = g[b], *gc = g[c], *gd = g[d];
    Products<V> of_a, of_b, of_c, of_d;
    for (int32_t r = 0; r < stage.depth; ++r) {
      const V oa = ga[r], ob = gb[r], oc = gc[r], od = gd[r];
      if constexpr (kParameters) {
        of_a.add(xa[r], oa, ob, oc, od), of_b.add(xb[r], oa, ob, oc, od);
        of_c.add(xc[r], oa, ob, oc, od), of_d.add(xd[r], oa, ob, oc, od);
        forget(blocks);  // the registers are for the sums
      }
      if (!stage.goes_on) continue;
      const V ha = blocks->ac.first_transposed(oa, oc), hc = blocks->ac.second_transposed(oa, oc);
      const V hb = blocks->bd.first_transposed(ob, od), hd = blocks->bd.second_transposed(ob, od);
      ga[r] = blocks->ab.first_transposed(ha, hb), gb[r] = blocks->ab.second_transposed(ha, hb);
      gc[r] = blocks->cd.first_transposed(hc, hd), gd[r] = blocks->cd.second_transposed(hc, hd);
    }
    if constexpr (kParameters) {
      const auto& [ab, cd, ac, bd] = quad;
      ac.add_gradients_to(next.gradients_of(pair_ac), ab.first(of_a.a, of_b.a), cd.first(of_c.a, of_d.a),
                          ab.first(of_a.c, of_b.c), cd.first(of_c.c, of_d.c));
      bd.add_gradients_to(next.gradients_of(pair_bd), ab.second(of_a.b, of_b.b), cd.second(of_c.b, of_d.b),
                          ab.second(of_a.d, of_b.d), cd.second(of_c.d, of_d.d));
      ab.add_gradients_to(stage.gradients_of(pair_ab), ac.first_transposed(of_a.a, of_a.c), ac.first_transposed(of_b.a, of_b.c),
                          bd.first_transposed(of_a.b, of_a.d), bd.first_transposed(of_b.b, of_b.d));
      cd.add_gradients_to(stage.gradients_of(pair_cd), ac.second_transposed(of_c.a, of_c.c), ac.second_transposed(of_d.a, of_d.c),
                          bd.second_transposed(of_c.b, of_c.d), bd.second_transposed(of_d.b, of_d.d));
    }
  }
  clear_padding<T, kLanes>(stage, g);
}

// Calls f(unit, what happens to it after every stage).
template <class T, int kLanes, class F>
inline void each_unit(const Stage<T>& stage, F f) {
  for (int32_t unit = 0; unit < stage.units; ++unit)
    if (unit == stage.padding)
      f(unit, ClearPadding<T, kLanes>());
    else
      f(unit, Keep());
}

template <class Block, class T, int kLanes>
void inside_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  each_unit<T, kLanes>(stage, [&](int32_t unit, auto after_stage) {
    const Block block(stage.coeffs + stage.place_of_unit(unit, kLanes), stage.stage_size);
    const Vector<T>* x = from[unit];
    Vector<T>* y = to[unit];
#pragma GCC unroll 4
    for (int32_t r = 0; r < stage.depth; ++r) y[r] = block.forward(x[r], after_stage);
  });
}

template <class Block, class T, int kLanes, bool kParameters>
void inside_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  each_unit<T, kLanes>(stage, [&](int32_t unit, auto after_stage) {
    Block block(stage.coeffs + stage.place_of_unit(unit, kLanes), stage.stage_size);
    const Vector<T>* x = kParameters ? z[unit] : nullptr;
    int32_t r = 0;
    for (; r + 4 <= stage.depth; r += 4) block.template backward<kParameters, 4>(x + r, g[unit] + r, after_stage);
    for (; r < stage.depth; ++r) block.template backward<kParameters, 1>(x + r, g[unit] + r, after_stage);
    if constexpr (kParameters) block.add_gradients_to(stage.gradients + stage.place_of_unit(unit, kLanes), stage.stage_size);
  });
}

// Calls f with the stride as a compile-time constant; kLanes is larger than every stride.
template <int kLanes, int kStride = 1, class F>
inline void with_stride(int32_t stride, F f) {
  if constexpr (kStride < kLanes) {
    if (stride == kStride)
      f(std::integral_constant<int, kStride>{});
    else
      with_stride<kLanes, 2 * kStride>(stride, f);
  }
}

// Calls f with the block of pairs of whole units as the member `type` of what it is given.
template <class Block>
struct BlockType {
  using type = Block;
};
template <class T, int kLanes, class F>
inline void with_block(Kind kind, F f) {
  if (kind == Kind::rotation)
    f(BlockType<RotationBlock<T, kLanes>>{});
  else
    f(BlockType<GeneralBlock<T, kLanes>>{});
}

template <class T, int kLanes>
inline void stage_forward(const Stage<T>& stage, Units<T> from, Units<T> to) {
  if (stage.kind == Kind::general)
    pairs_forward<GeneralBlock<T, kLanes>, T, kLanes>(stage, from, to);
  else if (stage.kind == Kind::rotation)
    pairs_forward<RotationBlock<T, kLanes>, T, kLanes>(stage, from, to);
  else if (stage.kind == Kind::scale)
    inside_forward<ScaleBlock<T, kLanes>, T, kLanes>(stage, from, to);
  else if (stage.kind == Kind::inside)
    with_stride<kLanes>(stage.stride, [&](auto stride) {
      inside_forward<InsideBlock<T, kLanes, stride()>, T, kLanes>(stage, from, to);
    });
  else if constexpr (kRunStages<kLanes> > 0)
    inside_forward<RunBlock<T, kLanes>, T, kLanes>(stage, from, to);
}

template <class T, int kLanes, bool kKeepsMiddle>
inline void stages_forward(const Stage<T>& stage, const Stage<T>& next, Units<T> from, Units<T> middle, Units<T> to) {
  with_block<T, kLanes>(stage.kind, [&](auto block) {
    quads_forward<typename decltype(block)::type, T, kLanes, kKeepsMiddle>(stage, next, from, middle, to);
  });
}

template <class T, int kLanes, bool kParameters>
inline void stages_backward(const Stage<T>& stage, const Stage<T>& next, Units<T> z, Units<T> middle, Units<T> g) {
  with_block<T, kLanes>(stage.kind, [&](auto block) {
    quads_backward<typename decltype(block)::type, T, kLanes, kParameters>(stage, next, z, middle, g);
  });
}

template <class T, int kLanes, bool kParameters>
inline void stage_backward(const Stage<T>& stage, Units<T> z, Units<T> g) {
  if (stage.kind == Kind::general)
    pairs_backward<GeneralBlock<T, kLanes>, T, kLanes, kParameters>(stage, z, g);
  else if (stage.kind == Kind::rotation)
    pairs_backward<RotationBlock<T, kLanes>, T, kLanes, kParameters>(stage, z, g);
  else if (stage.kind == Kind::scale)
    inside_backward<ScaleBlock<T, kLanes>, T, kLanes, kParameters>(stage, z, g);
  else if (stage.kind == Kind::inside)
    with_stride<kLanes>(stage.stride, [&](auto stride) {
      inside_backward<InsideBlock<T, kLanes, stride()>, T, kLanes, kParameters>(stage, z, g);
    });
  else if constexpr (kRunStages<kLanes> > 0)
    inside_backward<RunBlock<T, kLanes>, T, kLanes, kParameters>(stage, z, g);
}

}  // namespace
}  // namespace pairmix
