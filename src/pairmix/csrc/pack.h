// The parameters in the order in which the stages read them, and the way back for their gradients.
//
// The diagonals become part of the first and the last stage: a block [[a, b], [c, d]] between the coordinates i and j is
// packed as [[o_i a s_i, o_i b s_j], [o_j c s_i, o_j d s_j]], with s = d_in at the first stage and o = d_out at the last.
// The gradients of a block and of the diagonals then follow from those of what was packed.
#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "kernel.h"
#include "stages.h"

namespace pairmix {
namespace {

template <class T>
using Block = std::array<T, 4>;  // a, b, c, d

template <class T>
class Packer {
 public:
  Packer(const Call& call, const Layout& layout)
      : plan_(*call.plan),
        layout_(layout),
        rotation_(call.rotation),
        blocks_(static_cast<const T*>(call.parameters.blocks)),
        d_in_(static_cast<const T*>(call.parameters.d_in)),
        d_out_(static_cast<const T*>(call.parameters.d_out)),
        residual_scale_(static_cast<const T*>(call.parameters.residual_scale)) {
    if (rotation_) compute_cos_and_sin(call.threads);
  }

  Kind kind(int32_t l) const {
    if (layout_.stride[l]) return Kind::inside;
    return rotation_ && l != 0 && l != plan_.stages() - 1 ? Kind::rotation : Kind::general;
  }

  template <int kLanes>
  void pack(T* packed, int32_t threads) const {
    for_each_slot<kLanes>(threads, [&](int32_t l, int32_t first, int32_t second, int64_t slot) {
      T* to = packed + slot;
      switch (kind(l)) {
        case Kind::rotation:
          return pack_rotations<kLanes>(l, first, to);
        case Kind::general:
          return pack_pairs<kLanes>(l, first, second, to);
        default:
          return with_stride<kLanes>(layout_.stride[l], [&](auto stride) { pack_inside<kLanes, stride()>(l, first, to); });
      }
    });
  }

  // The gradients of the parameters from those of what was packed. These come from several threads and are summed up in
  // the first one's place, always in the same order.
  template <int kLanes>
  void unpack(const std::vector<T*>& packed, const Parameters& gradients, int32_t threads) const {
    T* const totals = packed[0];
    const auto total = [&](int64_t slot) { return totals[slot]; };
    for_each_slot<kLanes>(threads, [&](int32_t l, int32_t first, int32_t second, int64_t slot) {
      for (size_t t = 1; t < packed.size(); ++t)
        for (int k = 0; k < (layout_.stride[l] ? 2 : 4) * kLanes; ++k) totals[slot + k] += packed[t][slot + k];
      if (kind(l) == Kind::rotation) {
        for (int k = 0; k < kLanes; ++k)
          unpack_rotation(l, first + k, total(slot + k), total(slot + kLanes + k), gradients);
        return;
      }
      const bool inside = kind(l) == Kind::inside;
      const int32_t* pairs = plan_.pair_at(l) + first;
      if (!inside && !rotation_ && !has_diagonal(l) && is_run<kLanes>(pairs)) {
        if (T* to = static_cast<T*>(gradients.blocks)) {
          to += int64_t{l} * 4 * plan_.pairs() + pairs[0];
          for (int row = 0; row < 4; ++row)
            for (int k = 0; k < kLanes; ++k) to[int64_t{row} * plan_.pairs() + k] = totals[slot + row * kLanes + k];
        }
        return;
      }
      for (int k = 0; k < kLanes; ++k) {
        if (!inside) {
          unpack_block(l, first + k, second + k,
                       {total(slot + k), total(slot + kLanes + k), total(slot + 2 * kLanes + k),
                        total(slot + 3 * kLanes + k)},
                       gradients);
        } else if (const int other = k ^ layout_.stride[l]; k < other) {
          unpack_block(l, first + k, first + other,
                       {total(slot + k), total(slot + kLanes + k), total(slot + kLanes + other), total(slot + other)},
                       gradients);
        }
      }
    });
  }

 private:
  // Calls f(stage, first coordinate of the unit, that of the unit it meets, where its packed numbers start).
  template <int kLanes, class F>
  void for_each_slot(int32_t threads, F f) const {
    for (const Group& group : layout_.groups) {
      const auto components = static_cast<int64_t>(group.components.size());
#pragma omp parallel for num_threads(threads) schedule(static) if (layout_.coeffs > 32768)
      for (int64_t number = 0; number < components; ++number) {
        const Component& component = group.components[number];
        const int32_t* units = layout_.unit_list.data() + component.units_begin;
        const Pair* pairs = layout_.pairs.data() + component.pairs_begin;
        int64_t slot = component.coeffs_begin;
        for (int32_t l = group.first_stage; l < group.last_stage; ++l) {
          if (layout_.stride[l]) {
            for (int32_t k = 0; k < component.units; ++k, slot += 2 * kLanes)
              f(l, units[k] * kLanes, units[k] * kLanes, slot);
          } else {
            for (int32_t p = 0; p < component.units / 2; ++p, ++pairs, slot += 4 * kLanes)
              f(l, units[pairs->first] * kLanes, units[pairs->second] * kLanes, slot);
          }
        }
      }
    }
  }

  template <int kLanes>
  static bool is_run(const int32_t* pairs) {
    for (int k = 0; k < kLanes; ++k)
      if (pairs[k] < 0 || pairs[k] == Plan::kNoPair || pairs[k] != pairs[0] + k) return false;
    return true;
  }

  T input_scale(int32_t l, int32_t i) const { return l == 0 && d_in_ && i < plan_.n() ? d_in_[i] : T(1); }
  T output_scale(int32_t l, int32_t i) const {
    return l == plan_.stages() - 1 && d_out_ && i < plan_.n() ? d_out_[i] : T(1);
  }

  // The block between i and j as the parameters have it, i first.
  Block<T> block(int32_t l, int32_t i) const {
    const int32_t code = plan_.pair_at(l)[i];
    if (code == Plan::kNoPair) {
      const T scale = residual_scale_ && l < plan_.given_stages() ? residual_scale_[l] : T(1);
      return i < plan_.n() ? Block<T>{scale, 0, 0, 1} : Block<T>{1, 0, 0, scale};
    }
    const int32_t p = code < 0 ? ~code : code;
    Block<T> result;
    if (rotation_) {
      const int64_t at = int64_t{l} * plan_.pairs() + p;
      result = {cos_[at], -sin_[at], sin_[at], cos_[at]};
    } else {
      const T* from = blocks_ + int64_t{l} * 4 * plan_.pairs() + p;
      for (int row = 0; row < 4; ++row) result[row] = from[int64_t{row} * plan_.pairs()];
    }
    return code < 0 ? Block<T>{result[3], result[2], result[1], result[0]} : result;
  }

  Block<T> packed_block(int32_t l, int32_t i, int32_t j) const {
    const auto [a, b, c, d] = block(l, i);
    const T si = input_scale(l, i), sj = input_scale(l, j), oi = output_scale(l, i), oj = output_scale(l, j);
    return {oi * a * si, oi * b * sj, oj * c * si, oj * d * sj};
  }

  void unpack_block(int32_t l, int32_t i, int32_t j, const Block<T>& g, const Parameters& gradients) const {
    const auto [a, b, c, d] = block(l, i);
    const T si = input_scale(l, i), sj = input_scale(l, j), oi = output_scale(l, i), oj = output_scale(l, j);
    const auto set = [n = plan_.n()](void* to, int32_t at, T value) {
      if (to && at < n) static_cast<T*>(to)[at] = value;
    };
    if (l == 0) {
      set(gradients.d_in, i, oi * a * g[0] + oj * c * g[2]);
      set(gradients.d_in, j, oi * b * g[1] + oj * d * g[3]);
    }
    if (l == plan_.stages() - 1) {
      set(gradients.d_out, i, a * si * g[0] + b * sj * g[1]);
      set(gradients.d_out, j, c * si * g[2] + d * sj * g[3]);
    }
    if (l >= plan_.given_stages()) return;
    const Block<T> of_block = {oi * si * g[0], oi * sj * g[1], oj * si * g[2], oj * sj * g[3]};
    const int32_t code = plan_.pair_at(l)[i];
    if (code == Plan::kNoPair) {
      if (gradients.residual_scale)
        static_cast<T*>(gradients.residual_scale)[l] = i < plan_.n() ? of_block[0] : of_block[3];
      return;
    }
    if (!gradients.blocks) return;
    T* to = static_cast<T*>(gradients.blocks);
    const int32_t p = code < 0 ? ~code : code;
    if (rotation_) {
      unpack_rotation(l, i, of_block[2] - of_block[1], of_block[0] + of_block[3], gradients);
    } else {
      to += int64_t{l} * 4 * plan_.pairs() + p;
      for (int row = 0; row < 4; ++row) to[int64_t{row} * plan_.pairs()] = of_block[code < 0 ? 3 - row : row];
    }
  }

  void unpack_rotation(int32_t l, int32_t i, T across, T along, const Parameters& gradients) const {
    const int32_t code = plan_.pair_at(l)[i];
    if (code == Plan::kNoPair) {
      if (gradients.residual_scale) static_cast<T*>(gradients.residual_scale)[l] = along;
    } else if (gradients.blocks) {
      const int64_t at = int64_t{l} * plan_.pairs() + (code < 0 ? ~code : code);
      static_cast<T*>(gradients.blocks)[at] = cos_[at] * (code < 0 ? -across : across) - sin_[at] * along;
    }
  }

  // d_in and d_out as they apply to the lanes of a unit at this stage.
  template <int kLanes>
  struct Scales {
    T in[kLanes], out[kLanes];
    Scales(const Packer& packer, int32_t l, int32_t first) {
      for (int k = 0; k < kLanes; ++k) {
        in[k] = packer.input_scale(l, first + k);
        out[k] = packer.output_scale(l, first + k);
      }
    }
  };

  // Where the coefficients a of neighbouring pairs start; b, c and d follow at distances of the number of pairs.
  const T* run_of_blocks(int32_t l, int32_t pair) const { return blocks_ + int64_t{l} * 4 * plan_.pairs() + pair; }
  bool has_diagonal(int32_t l) const { return l == 0 || l == plan_.stages() - 1; }

  template <int kLanes>
  void pack_pairs(int32_t l, int32_t first, int32_t second, T* to) const {
    const int32_t* pairs = plan_.pair_at(l) + first;
    if (rotation_ || !is_run<kLanes>(pairs)) {
      for (int k = 0; k < kLanes; ++k) {
        const Block<T> block = packed_block(l, first + k, second + k);
        for (int row = 0; row < 4; ++row) to[row * kLanes + k] = block[row];
      }
      return;
    }
    const T* from = run_of_blocks(l, pairs[0]);
    for (int row = 0; row < 4; ++row)
      for (int k = 0; k < kLanes; ++k) to[row * kLanes + k] = from[int64_t{row} * plan_.pairs() + k];
    if (!has_diagonal(l)) return;
    const Scales<kLanes> i(*this, l, first), j(*this, l, second);
    for (int k = 0; k < kLanes; ++k) {
      to[k] *= i.out[k] * i.in[k];
      to[kLanes + k] *= i.out[k] * j.in[k];
      to[2 * kLanes + k] *= j.out[k] * i.in[k];
      to[3 * kLanes + k] *= j.out[k] * j.in[k];
    }
  }

  template <int kLanes, int kStride>
  void pack_inside(int32_t l, int32_t first, T* to) const {
    const int32_t* pairs = plan_.pair_at(l) + first;
    T *p = to, *q = to + kLanes;
    if (rotation_ || !is_run_inside<kLanes, kStride>(pairs)) {
      for (int k = 0; k < kLanes; ++k) {
        const Block<T> block = packed_block(l, first + k, first + (k ^ kStride));
        p[k] = block[0], q[k] = block[1];
      }
      return;
    }
    const T* from = run_of_blocks(l, pairs[0]);
    const int64_t row = plan_.pairs();
    for (int k = 0; k < kLanes; ++k) {
      if (k & kStride) continue;
      p[k] = *from, q[k] = from[row], q[k ^ kStride] = from[2 * row], p[k ^ kStride] = from[3 * row];
      ++from;
    }
    if (!has_diagonal(l)) return;
    const Scales<kLanes> scale(*this, l, first);
    for (int k = 0; k < kLanes; ++k) {
      p[k] *= scale.out[k] * scale.in[k];
      q[k] *= scale.out[k] * scale.in[k ^ kStride];
    }
  }

  template <int kLanes, int kStride>
  static bool is_run_inside(const int32_t* pairs) {
    int32_t next = pairs[0];
    for (int k = 0; k < kLanes; ++k)
      if (!(k & kStride)) {
        if (pairs[k] < 0 || pairs[k] == Plan::kNoPair || pairs[k] != next) return false;
        ++next;
      }
    return true;
  }

  template <int kLanes>
  void pack_rotations(int32_t l, int32_t first, T* to) const {
    for (int k = 0; k < kLanes; ++k) {
      // A coordinate left over meets one that is always zero: with sin = 0 it is only scaled.
      const Block<T> turned = block(l, first + k);
      to[k] = turned[0];
      to[kLanes + k] = turned[2];
    }
  }

  void compute_cos_and_sin(int32_t threads) {
    const int64_t count = int64_t{plan_.given_stages()} * plan_.pairs();
    cos_.resize(count);
    sin_.resize(count);
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 4096)
    for (int64_t at = 0; at < count; ++at) {
      cos_[at] = std::cos(blocks_[at]);
      sin_[at] = std::sin(blocks_[at]);
    }
  }

  const Plan& plan_;
  const Layout& layout_;
  const bool rotation_;
  const T *blocks_, *d_in_, *d_out_, *residual_scale_;
  std::vector<T> cos_, sin_;
};

}  // namespace
}  // namespace pairmix
