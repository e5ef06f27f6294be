// The coefficients as the stages read them, and their gradients on the way back to the parameters.
//
// The blocks of a stage are rows of numbers, one per pair: a, b, c, d, or for rotations cos, sin. They are packed so that
// what belongs to a unit is in one place: rows of `lanes` numbers. The first and the last stage also take in the diagonals:
// a block [[a, b], [c, d]] between the coordinates i and j becomes [[o_i a s_i, o_i b s_j], [o_j c s_i, o_j d s_j]], with
// s = d_in at the first stage and o = d_out at the last. Stages inside units are packed as p and q, with which lane k
// becomes p[k] z[k] + q[k] z[k ^ stride]. The coordinate that an odd width leaves over is the first of one more pair, whose
// a is the residual scale.
//
// A product of a coefficient and a diagonal may be too large or too small for its type where what it is multiplied with would
// make up for that, and so may its gradient. `is_exact` tells; the diagonals then have to be stages of their own, which a plan
// can have.
//
// For a few rows packing would take longer than all the rest, so most stages are then read from where the parameters are.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel.h"
#include "scratch.h"
#include "sincos.h"
#include "stages.h"
#include "team.h"

namespace pairmix {
namespace {

constexpr int64_t kRowsWorthPacking = 16;
constexpr float kModerate = 1 << 16;  // a diagonal between this and its inverse may be multiplied into coefficients

template <class T, int kLanes>
class Coeffs {
  using L = Lanes<T, kLanes>;

 public:
  Coeffs(const Call& call, const Layout& layout)
      : plan_(*call.plan),
        layout_(layout),
        rotation_(call.rotation),
        reads_in_place_(call.rows * call.steps < kRowsWorthPacking && plan_.n() % 2 == 0),
        half_(plan_.half()),
        given_(call.parameters) {}

  // How many numbers a stage takes, in coefficients and in gradients.
  int64_t stage_size() const { return 4 * half_; }

  void lay_out(Parts& parts) {
    copies_ = parts.take<T>(plan_.stages() * stage_size());
    plain_ = parts.take<T>(plan_.stages() * stage_size());
    for (T** diagonal : {&ones_, &d_in_, &d_out_}) *diagonal = parts.take<T>(plan_.even());
    sincos_ = parts.take<T>(rotation_ ? int64_t{2} * plan_.given_stages() * plan_.pairs() : 0);
  }

  Kind kind(int32_t l) const {
    if (layout_.stride[l]) return plan_.scales(l) ? Kind::scale : Kind::inside;
    return rotation_ && !takes_diagonal(l) && plan_.n() % 2 == 0 ? Kind::rotation : Kind::general;
  }
  bool is_read_in_place(int32_t l) const { return reads_in_place_ && !layout_.stride[l] && !takes_diagonal(l); }
  const T* of(int32_t l) const { return is_read_in_place(l) ? parameter_rows(l) : copy(l); }
  // From pair to pair and from row to row.
  int64_t step(int32_t l) const { return is_read_in_place(l) ? 1 : 4; }
  int64_t row(int32_t l) const { return is_read_in_place(l) ? half_ : kLanes; }

  // Makes the copies, where `lay_out` has put them, if they are not there yet.
  void prepare() {
    if (is_prepared_) return;
    is_prepared_ = true;
    std::fill(ones_, ones_ + plan_.even(), T(1));
    pad(given_.d_in, d_in_);
    pad(given_.d_out, d_out_);
    is_moderate_ = plan_.scales_apart() || (is_moderate(given_.d_in, d_in_) && is_moderate(given_.d_out, d_out_));
    if (!is_moderate_) return;
    const T* angles = static_cast<const T*>(given_.blocks);
    if (rotation_)
      for (int64_t l = 0, pairs = plan_.pairs(); l < plan_.given_stages(); ++l)
        fill_sincos(angles + l * pairs, pairs, sincos_ + 2 * l * pairs, sincos_ + (2 * l + 1) * pairs);
    for (int32_t l = 0; l < plan_.stages(); ++l) {
      if (is_read_in_place(l)) continue;
      if (plan_.scales(l)) {
        pack_scales(l);
        continue;
      }
      if (has_plain_copy(l)) write_plain(l);
      if (layout_.stride[l])
        with_stride<kLanes>(layout_.stride[l], [&](auto stride) { interleave<stride()>(l); });
      else if (takes_diagonal(l))
        pack_with_diagonals(l);
      else
        pack_rows(l);
    }
  }

  // Whether the diagonals are moderate, and so are the coefficients that they were multiplied with: then no product was rounded
  // to zero, to infinity, or to a number of fewer digits.
  bool is_exact() const {
    if (plan_.scales_apart()) return true;  // there are none
    if (!is_moderate_) return false;
    for (int lane = 0; lane < kLanes; ++lane)
      if (lost_[lane]) return false;
    return true;
  }

  // The gradients of the parameters, from the sums that each thread has of the gradients of the coefficients. They are
  // added up in the order of the threads, so that the result is the same on every run. Returns whether all of those are
  // finite that a diagonal is still to be multiplied with: it might have kept them so.
  bool collect(const std::vector<T*>& sums, const Parameters& gradients, int32_t threads) const {
    const bool large = plan_.stages() * stage_size() > 8192;
    std::atomic<bool> is_finite = true;
    in_shares(large ? threads : 1, [&](const Share& mine) {
      for (auto l = mine.begin(plan_.stages()); l < mine.end(plan_.stages()); ++l)
        if (!collect_stage(static_cast<int32_t>(l), sums, gradients)) is_finite = false;
    });
    return is_finite;
  }

 private:
  bool takes_diagonal(int32_t l) const { return !plan_.scales_apart() && (l == 0 || l == plan_.stages() - 1); }
  int rows() const { return rotation_ ? 2 : 4; }
  int64_t given(int32_t l) const { return l - plan_.first_given(); }
  const T* parameter_rows(int32_t l) const {
    return (rotation_ ? sincos_ : static_cast<const T*>(given_.blocks)) + given(l) * rows() * plan_.pairs();
  }
  T* copy(int32_t l) const { return copies_ + l * stage_size(); }
  // The rows as the parameters have them, general if they are not used as rotations, with the pair of an odd width.
  const T* plain(int32_t l) const { return has_plain_copy(l) ? plain_copy(l) : parameter_rows(l); }
  T* plain_copy(int32_t l) const { return plain_ + l * stage_size(); }
  bool has_plain_copy(int32_t l) const {
    return plan_.n() % 2 || (rotation_ && kind(l) != Kind::rotation);
  }
  const T* scale_in(int32_t l) const { return l == 0 ? d_in_ : ones_; }
  const T* scale_out(int32_t l) const { return l == plan_.stages() - 1 ? d_out_ : ones_; }

  void pad(const void* diagonal, T* to) const {
    std::fill(to, to + plan_.even(), T(1));
    if (diagonal) std::copy_n(static_cast<const T*>(diagonal), plan_.n(), to);
  }

  // The lanes whose number is zero or within these bounds.
  template <class V>
  static auto is_within(V numbers, T least, T most) {
    const V magnitude = numbers < 0 ? -numbers : numbers;
    return ((magnitude >= least) & (magnitude <= most)) | (numbers == 0);
  }

  // Whether what is multiplied with a diagonal hardly moves between zero and infinity: then it does not matter much when.
  bool is_moderate(const void* given, const T* diagonal) const {
    constexpr int width = Simd<T>::width;
    if (!given) return true;
    auto within = is_within(Vector<T>{}, 0, 0);
    int32_t i = 0;
    for (; i + width <= plan_.even(); i += width) within &= is_within(load(diagonal + i), 1 / kModerate, kModerate);
    T rest[width] = {};
    std::copy(diagonal + i, diagonal + plan_.even(), rest);
    within &= is_within(load(rest), 1 / kModerate, kModerate);
    for (int lane = 0; lane < width; ++lane)
      if (!within[lane]) return false;
    return true;
  }

  void write_plain(int32_t l) const {
    T *a = plain_copy(l), *b = a + half_, *c = b + half_, *d = c + half_;
    for (int row = 0; row < rows(); ++row) {
      std::copy_n(parameter_rows(l) + int64_t{row} * plan_.pairs(), plan_.pairs(), a + row * half_);
      if (plan_.n() % 2) a[row * half_ + half_ - 1] = row ? 0 : residual_scale(l);
    }
    if (rotation_ && kind(l) != Kind::rotation) {
      std::copy(b, c, c);
      std::copy(a, b, d);
      for (int32_t p = 0; p < half_; ++p) b[p] = -b[p];
    }
  }
  T residual_scale(int32_t l) const { return given_.residual_scale ? static_cast<const T*>(given_.residual_scale)[given(l)] : 1; }

  // Where the coefficients of kLanes pairs start, and what the numbers of their rows are exclusive-ored with: as if the second
  // members were the first ones, a and d, b and c change places. Without branches: half of the pairs would surprise the processor.
  struct Place {
    int64_t start;
    int32_t turn;
  };
  Place place_of(int32_t l, int32_t pair) const {
    const int32_t place = layout_.places[l].empty() ? pair : layout_.places[l][pair], turned = place >> 31;
    return {int64_t{4} * (place ^ turned), turned & 3};
  }

  using Numbers = typename L::Numbers;
  void put(int32_t l, int32_t pair, Numbers a, Numbers b, Numbers c, Numbers d) const {
    const auto [start, turn] = place_of(l, pair);
    T* const to = copy(l) + start;
    L::store(to + (0 ^ turn) * kLanes, a);
    L::store(to + (1 ^ turn) * kLanes, b);
    L::store(to + (2 ^ turn) * kLanes, c);
    L::store(to + (3 ^ turn) * kLanes, d);
  }

  void pack_rows(int32_t l) const {
    const T* from = plain(l);
    const bool turns = kind(l) == Kind::rotation;
    for (int32_t p = 0; p < half_; p += kLanes) {
      const auto first = L::load(from + p), second = L::load(from + half_ + p);
      if (turns)
        put(l, p, first, second, -second, first);
      else
        put(l, p, first, second, L::load(from + 2 * half_ + p), L::load(from + 3 * half_ + p));
    }
  }

  static auto total(const std::vector<T*>& sums, int64_t at) {
    auto numbers = L::load(sums[0] + at);
    for (size_t t = 1; t < sums.size(); ++t) numbers += L::load(sums[t] + at);
    return numbers;
  }
  void unpack_rows(const std::vector<T*>& sums, int32_t l, T* to) const {
    const bool turns = kind(l) == Kind::rotation;
    for (int32_t p = 0; p < half_; p += kLanes) {
      const auto [start, turn] = place_of(l, p);
      const int64_t at = l * stage_size() + start;
      if (turns)
        L::store(to + p, total(sums, at) * (turn ? T(-1) : T(1)));
      else
        for (int row = 0; row < 4; ++row) L::store(to + row * half_ + p, total(sums, at + (row ^ turn) * kLanes));
    }
  }

  void pack_scales(int32_t l) const {
    const T* scales = l == 0 ? d_in_ : d_out_;
    T* to = copy(l);
    for (int32_t i = 0; i < plan_.even(); i += kLanes, to += 2 * kLanes) L::store(to, L::load(scales + i));
  }

  // A coefficient between the diagonals of its row and its column.
  typename L::Numbers between(typename L::Numbers out, typename L::Numbers coeff, typename L::Numbers in) {
    constexpr T kTwice = kModerate * kModerate;
    lost_ |= ~is_within(coeff, std::numeric_limits<T>::min() * kTwice, std::numeric_limits<T>::max() / kTwice);
    return out * coeff * in;
  }

  void pack_with_diagonals(int32_t l) {
    const int32_t *firsts = plan_.members(l), *seconds = firsts + half_;
    const T *rows = plain(l), *in = scale_in(l), *out = scale_out(l);
    for (int32_t p = 0; p < half_; p += kLanes) {
      const int32_t i = firsts[p], j = seconds[p];
      const auto si = L::load(in + i), sj = L::load(in + j), oi = L::load(out + i), oj = L::load(out + j);
      put(l, p, between(oi, L::load(rows + p), si), between(oi, L::load(rows + half_ + p), sj),
          between(oj, L::load(rows + 2 * half_ + p), si), between(oj, L::load(rows + 3 * half_ + p), sj));
    }
  }

  // The numbers of pairs, at the lanes of their first and at the lanes of their second members.
  template <int kStride, size_t... I>
  static auto spread_out(const T* at_firsts, const T* at_seconds, std::index_sequence<I...>) {
    using H = Lanes<T, kLanes / 2>;
    constexpr auto pair = [](int lane) { return lane / (2 * kStride) * kStride + lane % kStride; };
    return __builtin_shufflevector(H::load(at_firsts), H::load(at_seconds), (I & kStride ? kLanes / 2 + pair(I) : pair(I))...);
  }

  template <int kStride>
  void interleave(int32_t l) {
    const T *a = plain(l), *b = a + half_, *c = b + half_, *d = c + half_, *in = scale_in(l), *out = scale_out(l);
    T* to = copy(l);
    for (int32_t i = 0; i < plan_.even(); i += kLanes, to += 2 * kLanes) {
      constexpr auto lanes = std::make_index_sequence<kLanes>{};
      const auto p = spread_out<kStride>(a + i / 2, d + i / 2, lanes), q = spread_out<kStride>(b + i / 2, c + i / 2, lanes);
      if (!takes_diagonal(l)) {
        L::store(to, p), L::store(to + kLanes, q);
        continue;
      }
      const auto si = L::load(in + i), oi = L::load(out + i);
      const auto sj = shuffled(si, lanes, Exchanged<kStride>{});
      L::store(to, between(oi, p, si));
      L::store(to + kLanes, between(oi, q, sj));
    }
  }

  // The lanes of the pairs' first members, or of their second ones.
  template <int kStride, int kMember, size_t... I>
  static void store_members(T* to, typename L::Numbers numbers, std::index_sequence<I...>) {
    constexpr auto lane = [](int pair) { return pair / kStride * 2 * kStride + pair % kStride + kMember * kStride; };
    Lanes<T, kLanes / 2>::store(to, __builtin_shufflevector(numbers, numbers, lane(I)...));
  }

  template <int kStride>
  void deinterleave(const std::vector<T*>& sums, int64_t at, T* to) const {
    T *a = to, *b = a + half_, *c = b + half_, *d = c + half_;
    for (int32_t k = 0; k < half_; k += kLanes / 2, at += 2 * kLanes) {
      constexpr auto pairs = std::make_index_sequence<kLanes / 2>{};
      const auto p = total(sums, at), q = total(sums, at + kLanes);
      store_members<kStride, 0>(a + k, p, pairs), store_members<kStride, 1>(d + k, p, pairs);
      store_members<kStride, 0>(b + k, q, pairs), store_members<kStride, 1>(c + k, q, pairs);
    }
  }

  void collect_scales(const std::vector<T*>& sums, int64_t at, T* to) const {
    T numbers[kLanes];
    for (int32_t i = 0; i < plan_.n() && to; i += kLanes, at += 2 * kLanes) {
      L::store(numbers, total(sums, at));
      std::copy_n(numbers, std::min(kLanes, plan_.n() - i), to + i);
    }
  }

  bool collect_stage(int32_t l, const std::vector<T*>& sums, const Parameters& gradients) const {
    if (plan_.scales(l)) {
      collect_scales(sums, l * stage_size(), static_cast<T*>(l == 0 ? gradients.d_in : gradients.d_out));
      return true;
    }
    T* blocks = static_cast<T*>(gradients.blocks);
    if (blocks) blocks += given(l) * (rotation_ ? 1 : 4) * plan_.pairs();
    const bool as_they_are = blocks && !takes_diagonal(l) && plan_.n() % 2 == 0 && (!rotation_ || kind(l) == Kind::rotation);
    T* const rows = as_they_are ? blocks : copy(l);  // the coefficients themselves are no longer needed
    if (layout_.stride[l])
      with_stride<kLanes>(layout_.stride[l], [&](auto stride) { deinterleave<stride()>(sums, l * stage_size(), rows); });
    else
      unpack_rows(sums, l, rows);
    if (as_they_are) return true;
    const bool is_finite = !takes_diagonal(l) || take_out_diagonals(l, rows, gradients);
    T* residual_scale = static_cast<T*>(gradients.residual_scale);
    if (residual_scale && plan_.n() % 2) residual_scale[given(l)] = rows[half_ - 1];
    if (!blocks) return is_finite;
    if (rotation_) {
      // cos * across - sin * along, with across = g2 x1 - g1 x2 and along = g1 x1 + g2 x2
      const T *cos = parameter_rows(l), *sin = cos + plan_.pairs();
      const T *a = rows, *b = a + half_, *c = b + half_, *d = c + half_;
      for (int32_t p = 0; p < plan_.pairs(); ++p) blocks[p] = cos[p] * (c[p] - b[p]) - sin[p] * (a[p] + d[p]);
    } else {
      for (int row = 0; row < 4; ++row) std::copy_n(rows + row * half_, plan_.pairs(), blocks + int64_t{row} * plan_.pairs());
    }
    return is_finite;
  }

  // From the gradients of a block with the diagonals to those of the block without them, in place, and of the diagonals.
  // Returns whether the former are finite.
  bool take_out_diagonals(int32_t l, T* rows, const Parameters& gradients) const {
    const T *a = plain(l), *b = a + half_, *c = b + half_, *d = c + half_, *in = scale_in(l), *out = scale_out(l);
    T *ga = rows, *gb = ga + half_, *gc = gb + half_, *gd = gc + half_;
    T* d_in = l == 0 ? static_cast<T*>(gradients.d_in) : nullptr;
    T* d_out = l == plan_.stages() - 1 ? static_cast<T*>(gradients.d_out) : nullptr;
    const int32_t *firsts = plan_.members(l), *seconds = firsts + half_;
    T magnitude = 0;
    for (int32_t p = 0; p < half_; ++p) {
      const int32_t i = firsts[p], j = seconds[p];
      const T si = in[i], sj = in[j], oi = out[i], oj = out[j];
      const bool j_exists = j < plan_.n();
      magnitude += std::abs(ga[p]);
      if (j_exists) magnitude += std::abs(gb[p]) + std::abs(gc[p]) + std::abs(gd[p]);
      if (d_in) {
        d_in[i] = oi * a[p] * ga[p] + oj * c[p] * gc[p];
        if (j_exists) d_in[j] = oi * b[p] * gb[p] + oj * d[p] * gd[p];
      }
      if (d_out) {
        d_out[i] = a[p] * si * ga[p] + b[p] * sj * gb[p];
        if (j_exists) d_out[j] = c[p] * si * gc[p] + d[p] * sj * gd[p];
      }
      ga[p] *= oi * si, gb[p] *= oi * sj, gc[p] *= oj * si, gd[p] *= oj * sj;
    }
    return std::isfinite(magnitude);
  }

  const Plan& plan_;
  const Layout& layout_;
  const bool rotation_, reads_in_place_;
  const int64_t half_;
  const Parameters given_;
  bool is_prepared_ = false, is_moderate_ = true;
  decltype(typename L::Numbers{} == typename L::Numbers{}) lost_{};  // in the lanes where it is not zero
  T *copies_, *plain_, *ones_, *d_in_, *d_out_;
  T* sincos_;  // cos and sin
};

}  // namespace
}  // namespace pairmix
