// One call: all stages, forward or backward, on tiles of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "coeffs.h"
#include "groups.h"
#include "kernel.h"
#include "rings.h"
#include "row_stages.h"
#include "scratch.h"
#include "steps.h"
#include "team.h"
#include "tiles.h"
#include "tiling.h"
#include "workspace.h"

namespace pairmix {
namespace {

template <class S>
inline Rows from_row(Rows rows, int64_t start) {
  if (rows.data) rows.data = static_cast<S*>(rows.data) + start * rows.row_stride;
  return rows;
}

// Forward, which has nothing to sum up, each thread has so many shares of the tiles: others can take them over, if it is late.
constexpr int64_t kForwardShares = 4;

// A call, with everything about it that does not depend on the rows.
template <class S, class T, int kLanes>
class Run {
  using Sizes = Tiling<T, kLanes>;

 public:
  // With a `depth`, tiles have so many vectors, and are handed from one run to the next: each thread has tiles of its own, and
  // only the first run of the chain has rows as its input.
  Run(const Call& call, bool backward, int32_t depth = 0, bool reads_rows = true)
      : call_(call),
        plan_(*call.plan),
        fuses_rows_(reads_rows && RowStages<S, T, kLanes>::fits(call, plan_.stride(Simd<T>::width))),
        shares_(!depth && Sizes::threads_share_tiles(call)),
        depth_(depth ? depth : Sizes::depth(call, shares_)),
        layout_(plan_.layout(Simd<T>::width, Sizes::budget(call, backward, depth_, fuses_rows_, depth > 0))),
        mover_(plan_.n(), layout_.units * kLanes),
        backward_(backward) {
    reads_units_ = Groups<S, T, kLanes>::can_read_units && fuses_rows_ && !layout_.groups.empty();
    rows_per_tile_ = int64_t{depth_} * (Simd<T>::width / kLanes);
    tiles_ = (call.rows + rows_per_tile_ - 1) / rows_per_tile_;
    const int32_t useful = depth ? call.threads : Sizes::threads(call, backward);  // in a chain all runs have the same
    threads_ = shares_ ? call.threads : static_cast<int32_t>(std::clamp<int64_t>(tiles_, 1, useful));
    const Parameters& g = call.gradients;
    wants_parameters_ = backward && (g.blocks || g.d_in || g.d_out || g.residual_scale);
    wants_rest_ = !backward || wants_parameters_ || call.grad_x.data || depth;

    if (int64_t{place(layout_.units)} * depth_ > std::numeric_limits<int32_t>::max())
      throw std::length_error("a width of " + std::to_string(plan_.n()) + " is more than the kernels can address");
    coeffs_ = std::vector<Coeffs<T, kLanes>>(shares_ ? 1 : threads_, {call, layout_});
    lay_out_in(arena_, [this](Parts& parts) { lay_out(parts); });
    for (size_t order = 0; order < layout_.orders.size(); ++order)
      for (int32_t unit = 0; unit < layout_.units; ++unit) offsets_[order][unit] = layout_.orders[order][unit] * depth_;
    steps_ = steps_of<kLanes>(layout_, coeffs_[0]);
  }

  // What to give as `depth` to all runs of a chain, of which this is the widest.
  static int32_t depth_in_chain(const Call& call) { return Sizes::depth(call, false); }

  int32_t threads() const { return threads_; }

  // Whether the coefficients are what the parameters say; if not, nothing is computed, and a plan with the diagonals apart has to
  // be run.
  bool is_exact() const { return prepared(0).is_exact(); }

  void forward() {
    each_tile([this](Workspace<T>& work) { tile_forward(work); });
  }

  // Returns what `collect` does.
  bool backward() {
    each_tile([this](Workspace<T>& work) { tile_backward(work); });
    return is_exact() && collect();
  }

  // The gradients of the parameters, from the sums of all shares. They are added up in the order of the shares, so that the
  // result is the same on every run. Returns whether they are what they should be; those of x and of the bias always are.
  bool collect() {
    T* bias_gradient = static_cast<T*>(call_.gradients.bias);
    if (bias_gradient)
      for (int32_t o = 0; o < call_.out_features; ++o) {
        bias_gradient[o] = 0;
        for (const Workspace<T>& work : workspaces_) bias_gradient[o] += work.bias_gradient[o];
      }
    if (!wants_parameters_) return true;
    std::vector<T*> coeff_gradients;
    for (const Workspace<T>& work : workspaces_)
      if (!shares_ || coeff_gradients.empty()) coeff_gradients.push_back(work.coeff_gradients);
    return prepared(0).collect(coeff_gradients, call_.gradients, call_.threads);
  }

  // For a thread that walks the rows of all steps on its own: the first `count` of these.
  void forward(int32_t thread, const Rows& x, const Rows& y, int64_t count) {
    Workspace<T>& work = workspaces_[thread];
    for (int64_t start = 0; start < count; start += rows_per_tile_) {
      begin(from_row<S>(x, start), from_row<S>(y, start), {}, {}, std::min(rows_per_tile_, count - start), work);
      tile_forward(work);
    }
  }
  void backward(int32_t thread, const Rows& grad, const Rows& grad_x, int64_t count) {
    Workspace<T>& work = workspaces_[thread];
    for (int64_t start = 0; start < count; start += rows_per_tile_) {
      begin({}, {}, from_row<S>(grad, start), from_row<S>(grad_x, start), std::min(rows_per_tile_, count - start), work);
      tile_backward(work);
    }
  }

  // What follows are the parts of a tile's way, for a run of several operators one after the other.

  Workspace<T>& workspace(int32_t thread) { return workspaces_[thread]; }
  bool wants_parameters() const { return wants_parameters_; }
  int32_t units() const { return layout_.units; }
  int64_t rows_per_tile() const { return rows_per_tile_; }
  // How many vectors a tile has in memory, and where its units are.
  int64_t tile_size() const { return int64_t{place(layout_.units)} * depth_; }
  const int32_t* offset() const { return offsets_[0]; }

  // What is added up over tiles becomes zero.
  void clear_sums(Workspace<T>& work) const {
    const int64_t sums = wants_parameters_ ? plan_.stages() * stage_size() : 0;
    std::fill(work.coeff_gradients + work.share.begin(sums), work.coeff_gradients + work.share.end(sums), T(0));
    if (backward_ && call_.gradients.bias) std::fill_n(work.bias_gradient, layout_.units * kLanes, T(0));
  }

  // The tile that starts with this row.
  void begin_at(int64_t start, Workspace<T>& work) const {
    begin(from_row<S>(call_.x, start), from_row<S>(call_.y, start), from_row<S>(call_.grad, start),
          from_row<S>(call_.grad_x, start), std::min(rows_per_tile_, call_.rows - start), work);
  }

  // Unless the first group reads it.
  void read_input(const Tile<T>& tile, Workspace<T>& work) const {
    if (reads_units_) return;
    if constexpr (RowStages<S, T, kLanes>::exists)
      if (fuses_rows_) {
        row_stages(work).read(tile);
        return work.wait_for_others();
      }
    mover_.read(work.x, work.count, call_.in_features, tile, work.buffer, nullptr, work.share);
    work.wait_for_others();
  }

  // All groups, in place. Rings go to another tile; where all went is returned.
  Tile<T> mix(Tile<T> z, Workspace<T>& work) const {
    for (size_t k = 0; k < layout_.groups.size(); ++k) {
      const Tile<T> from = z;
      if (layout_.groups[k].walks_rings())
        z = {work.kept[from.vectors == work.kept[0].vectors].vectors, offsets_[order(k + 1)]};
      groups(work).forward(k, from, z);
    }
    return z;
  }

  void write_output(const Tile<T>& z, Workspace<T>& work) const {
    mover_.write(z, static_cast<const T*>(call_.parameters.bias), work.y, work.count, call_.out_features, work.buffer,
                 work.share);
  }

  // From the input of the first group those of all others.
  void keep_inputs(Workspace<T>& work) const {
    for (size_t k = 0; k + 1 < layout_.groups.size(); ++k) groups(work).forward(k, work.kept[k], work.kept[k + 1]);
  }

  // The output, from rows; the inputs of all groups are kept.
  void mix_and_keep(const Tile<T>& to, Workspace<T>& work) const {
    if (layout_.groups.empty()) return read_input(to, work);  // the stages of rows are all there is
    read_input(work.kept[0], work);
    keep_inputs(work);
    const size_t last = layout_.groups.size() - 1;
    groups(work).forward(last, work.kept[last], to);
  }

  void read_gradient(Workspace<T>& work) const {
    work.gradient.offset = offsets_[gradient_order(layout_.groups.size())];
    mover_.read(work.grad, work.count, call_.out_features, work.gradient, work.buffer, work.bias_gradient, work.share);
    work.wait_for_others();
  }

  // From the gradient of the output to that of the input.
  void mix_back(Workspace<T>& work) const {
    for (size_t k = layout_.groups.size(); k-- > 0;) {
      if (layout_.groups[k].walks_rings()) {  // they go from one tile to the other
        std::swap(work.gradient, work.other_gradient);
        work.gradient.offset = offsets_[gradient_order(k)];
      }
      groups(work).backward(k, wants_parameters_);
    }
  }

  // Unless the first group has written it.
  void write_gradient(Workspace<T>& work) const {
    if constexpr (RowStages<S, T, kLanes>::exists)
      if (fuses_rows_) {
        if (!reads_units_) row_stages(work).write_back(work.gradient, wants_parameters_ ? work.coeff_gradients : nullptr);
        if (call_.in_features == plan_.n()) return;
        work.wait_for_others();
      }
    if (call_.grad_x.data)
      mover_.write(work.gradient, nullptr, work.grad_x, work.count, call_.in_features, work.buffer, work.share);
  }

 private:
  // Threads take shares of the tiles, or all of them a share of every tile.
  template <class F>
  void each_tile(F f) {
    const auto walk = [&](Workspace<T>& work, const Share& tiles) {
      if (!coeffs_of(work).is_exact()) return;
      clear_sums(work);
      work.wait_for_others();
      for (int64_t t = tiles.begin(tiles_); t < tiles.end(tiles_); ++t) {
        begin_at(t * rows_per_tile_, work);
        f(work);
        work.wait_for_others();
      }
    };
    if (!shares_ && backward_) return in_shares(threads_, [&](const Share& mine) { walk(workspaces_[mine.member], mine); });
    if (!shares_)
      return in_shares(threads_, static_cast<int32_t>(std::min<int64_t>(tiles_, kForwardShares * threads_)),
                       [&](const Share& mine, int32_t thread) { walk(workspaces_[thread], mine); });
    if (!is_exact()) return;
    size_t team = 0;  // OpenMP may give fewer threads than it was asked for
    const NumberMode mode;
#pragma omp parallel num_threads(threads_)
    {
      const NumberMode::TakenOver here(mode);
      const Share mine{omp_get_thread_num(), omp_get_num_threads()};
      if (mine.member == 0) team = mine.team;
      Workspace<T>& work = workspaces_[mine.member];
      work.share = mine;
      walk(work, Share{});
    }
    workspaces_.resize(team);
  }

  int64_t stage_size() const { return coeffs_[0].stage_size(); }

  // Of the units that group k reads, and of the gradient of its input.
  int32_t order(size_t k) const { return k < layout_.groups.size() ? layout_.groups[k].order : 0; }
  int32_t gradient_order(size_t k) const { return k > 0 ? layout_.groups[k - 1].gradient_order : 0; }

  // Each thread makes the copy that it reads: it would take longer to get one out of the cache of another core.
  const Coeffs<T, kLanes>& coeffs_of(const Workspace<T>& work) const { return prepared(shares_ ? 0 : work.number); }
  const Coeffs<T, kLanes>& prepared(int32_t copy) const {
    if (wants_rest_) coeffs_[copy].prepare();
    return coeffs_[copy];
  }

  void begin(const Rows& x, const Rows& y, const Rows& grad, const Rows& grad_x, int64_t count, Workspace<T>& work) const {
    constexpr int64_t together = Simd<T>::width / kLanes;
    work.x = x, work.y = y, work.grad = grad, work.grad_x = grad_x, work.count = count;
    work.depth = static_cast<int32_t>((count + together - 1) / together);
  }

  void lay_out(Parts& parts) {
    const int64_t tile = int64_t{place(layout_.units)} * depth_, largest = layout_.largest;
    const int64_t levels = backward_ && wants_parameters_ ? layout_.longest : 0;
    const bool has_rings = layout_.orders.size() > 1;
    for (auto& copy : coeffs_) copy.lay_out(parts);
    offsets_.clear();
    for (size_t k = 0; k < layout_.orders.size(); ++k) offsets_.push_back(parts.take<int32_t>(layout_.units));
    workspaces_.assign(threads_, {});
    for (Workspace<T>& work : workspaces_) {
      const bool owns = !shares_ || &work == workspaces_.data();
      if (!owns) work = workspaces_[0];
      work.number = static_cast<int32_t>(&work - workspaces_.data());
      const size_t kept = wants_parameters_ ? layout_.groups.size() : backward_ ? 0 : has_rings ? 2 : 1;
      for (size_t k = 0; k < kept && owns; ++k) work.kept.push_back({parts.take<Vector<T>>(tile), offsets_[order(k)]});
      work.room = parts.take<Vector<T>>(has_rings ? kRingUnits * depth_ : 0);
      work.buffer = parts.take<T>(mover_.buffer_size());
      work.pointers.resize((2 + levels) * largest);
      work.from = work.pointers.data(), work.to = work.from + largest, work.levels = work.to + largest;
      Vector<T>* vectors = parts.take<Vector<T>>(levels * largest * depth_);
      for (int64_t k = 0; k < levels * largest; ++k) work.levels[k] = vectors + k * depth_;
      if (!backward_) continue;
      if (owns) work.gradient = {parts.take<Vector<T>>(tile), offsets_[0]};
      if (has_rings) work.other_gradient = {parts.take<Vector<T>>(tile), offsets_[0]};
      if (call_.gradients.bias) work.bias_gradient = parts.take<T>(int64_t{layout_.units} * kLanes);
      if (wants_parameters_ && owns) work.coeff_gradients = parts.take<T>(plan_.stages() * stage_size());
    }
  }

  RowStages<S, T, kLanes> row_stages(const Workspace<T>& work) const {
    return {coeffs_of(work).of(0), stage_size(), call_.in_features, plan_.n(), work};
  }

  Groups<S, T, kLanes> groups(Workspace<T>& work) const {
    return {layout_, steps_, coeffs_of(work), row_stages(work), reads_units_, call_.grad_x.data != nullptr, depth_, work};
  }

  void tile_forward(Workspace<T>& work) const {
    read_input(work.kept[0], work);
    write_output(mix(work.kept[0], work), work);
  }

  void tile_backward(Workspace<T>& work) const {
    if (wants_parameters_ && !layout_.groups.empty()) {  // there are none, if the stages of rows are all there is
      read_input(work.kept[0], work);
      keep_inputs(work);
    }
    read_gradient(work);
    if (!wants_rest_) return;
    mix_back(work);
    write_gradient(work);
  }

  Arena arena_;
  const Call& call_;
  const Plan& plan_;
  const bool fuses_rows_, shares_;
  const int32_t depth_;
  const Layout& layout_;
  const Mover<S, T, kLanes> mover_;
  mutable std::vector<Coeffs<T, kLanes>> coeffs_;  // made when they are first read
  const bool backward_;
  bool reads_units_;  // of rows, by the first group
  bool wants_parameters_, wants_rest_;
  int64_t rows_per_tile_, tiles_;
  int32_t threads_;
  std::vector<int32_t*> offsets_;  // of every order of units
  std::vector<Workspace<T>> workspaces_;
  std::vector<std::vector<Step>> steps_;  // of every group
};

}  // namespace
}  // namespace pairmix
