// The groups of stages on a tile: component by component, or along rings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "coeffs.h"
#include "plan.h"
#include "rings.h"
#include "row_stages.h"
#include "stages.h"
#include "steps.h"
#include "tiles.h"
#include "workspace.h"

namespace pairmix {
namespace {

// For the tile that a workspace has at hand.
template <class S, class T, int kLanes>
class Groups {
  using FirstStages = RowStages<S, T, kLanes>;

 public:
  // Whether a unit of a row is a whole cache line. The first group then reads rows unit by unit, and goes on with them while they
  // are in the L1 cache.
  static constexpr bool can_read_units = FirstStages::exists && kVectorBytes == 64;

  // If it `reads_rows`, the first group does so, and writes them on the way back. `wants_gradient_of_x`: back through the first
  // stage, too. `depth` is that of a full tile.
  Groups(const Layout& layout, const std::vector<std::vector<Step>>& steps, const Coeffs<T, kLanes>& coeffs,
         const FirstStages& rows, bool reads_rows, bool wants_gradient_of_x, int32_t depth, Workspace<T>& work)
      : layout_(layout),
        steps_(steps),
        coeffs_(coeffs),
        rows_(rows),
        reads_rows_(reads_rows),
        wants_gradient_of_x_(wants_gradient_of_x),
        depth_(depth),
        work_(work) {}

  // In place, if `from` and `to` are the same tile; never along rings.
  void forward(size_t number, const Tile<T>& from, const Tile<T>& to) const {
    if (group(number).walks_rings())
      return with_rings(number, [&](const auto& walk) { walk.forward(from.vectors, to.vectors); });
    const bool reads = reads_rows(number);
    each_component(number, [&](const Component& component) {
      const Units<T> outputs = locate(component, to, work_.to);
      const Units<T> inputs = reads || from.vectors == to.vectors ? outputs : locate(component, from, work_.from);
      if (reads) read_rows(component, outputs);
      steps_forward<false>(number, steps_[number].size(), component, [&](size_t k) { return k ? outputs : inputs; });
    });
  }

  // The workspace's gradient becomes that of the group's input, from what it is now, or along rings from the other one.
  void backward(size_t number, bool wants_parameters) const {
    if (wants_parameters)
      backward<true>(number);
    else
      backward<false>(number);
  }

 private:
  const Group& group(size_t number) const { return layout_.groups[number]; }
  const int32_t* unit_list(const Component& component) const { return layout_.unit_list.data() + component.units_begin; }

  bool reads_rows(size_t number) const { return can_read_units && reads_rows_ && number == 0; }
  void read_rows(const Component& component, Units<T> to) const {
    if constexpr (can_read_units)
      for (int32_t k = 0; k < component.units; ++k) rows_.read_unit(unit_list(component)[k], to[k]);
  }
  void write_back_rows(const Component& component, Units<T> from, bool wants_parameters) const {
    if constexpr (can_read_units)
      for (int32_t k = 0; k < component.units; ++k)
        rows_.write_unit_back(unit_list(component)[k], from[k], wants_parameters ? work_.coeff_gradients : nullptr);
  }

  template <class F>
  void each_component(size_t number, F f) const {
    const std::vector<Component>& all = group(number).components;
    const int64_t count = all.size();
    for (int64_t k = work_.share.begin(count); k < work_.share.end(count); ++k) f(all[k]);
    work_.wait_for_others();
  }

  Units<T> locate(const Component& component, const Tile<T>& tile, Vector<T>** units) const {
    for (int32_t k = 0; k < component.units; ++k) units[k] = tile.unit(unit_list(component)[k]);
    return units;
  }

  Stage<T> stage(const Component& component, const Step& step) const {
    const int32_t pairs = component.pairs_begin + step.earlier_whole_units * (component.units / 2);
    return {step.kind,
            layout_.stride[step.stage],
            layout_.pairs.data() + pairs,
            unit_list(component),
            component.units,
            component.padding,
            coeffs_.of(step.stage),
            coeffs_.step(step.stage),
            coeffs_.row(step.stage),
            work_.coeff_gradients ? work_.coeff_gradients + step.stage * coeffs_.stage_size() : nullptr,
            coeffs_.stage_size(),
            step.stage > 0 || wants_gradient_of_x_,
            work_.depth};
  }

  // Calls f with the walk along the rings of a group.
  template <class F>
  void with_rings(size_t number, F f) const {
    const Component& all = group(number).components[0];
    if constexpr (kLanes == 1)
      with_ring_walk(group(number).rings, stage(all, steps_[number][0]), stage(all, steps_[number][1]), depth_, work_.room, f);
  }

  // The steps of a group up to `end` on one component. Step k reads units(k) and writes units(k + 1).
  template <bool kKeepsAll, class UnitsOfStep>
  void steps_forward(size_t number, size_t end, const Component& component, UnitsOfStep units) const {
    const auto stage_of = [&](size_t k) { return stage(component, steps_[number][k]); };
    for (size_t k = 0; k < end; ++k) {
      if (steps_[number][k].quads && k + 1 < end) {
        stages_forward<T, kLanes, kKeepsAll>(stage_of(k), stage_of(k + 1), units(k), units(k + 1), units(k + 2));
        ++k;
      } else {
        stage_forward<T, kLanes>(stage_of(k), units(k), units(k + 1));
      }
    }
  }

  template <bool kParameters>
  void backward(size_t number) const {
    if (group(number).walks_rings())
      return with_rings(number, [&](const auto& walk) {
        const Vector<T>* z = kParameters ? work_.kept[number].vectors : nullptr;
        walk.template backward<kParameters>(z, work_.other_gradient.vectors, work_.gradient.vectors);
      });
    each_component(number, [&](const Component& component) { component_backward<kParameters>(number, component); });
  }

  // Computes the inputs of the group's steps again, if they are needed, and walks back.
  template <bool kParameters>
  void component_backward(size_t number, const Component& component) const {
    const std::vector<Step>& steps = steps_[number];
    const Units<T> gradient = locate(component, work_.gradient, work_.to);
    const bool reads = reads_rows(number);
    const Units<T> first = !kParameters ? nullptr : reads ? work_.levels : locate(component, work_.kept[number], work_.from);
    const auto input = [&](size_t k) -> Units<T> { return k && kParameters ? work_.levels + k * layout_.largest : first; };
    if (kParameters && reads) read_rows(component, first);
    const auto stage_of = [&](size_t k) { return stage(component, steps[k]); };
    const auto in_quads = [&](size_t k) { return kWalksBackInQuads && k > 0 && steps[k - 1].quads; };
    const size_t last = steps.size() - 1;
    if constexpr (kParameters) steps_forward<!kWalksBackInQuads>(number, last - in_quads(last), component, input);
    for (size_t k = last + 1; k-- > 0;) {
      if (in_quads(k)) {
        stages_backward<T, kLanes, kParameters>(stage_of(k - 1), stage_of(k), input(k - 1), input(k), gradient);
        --k;
      } else {
        stage_backward<T, kLanes, kParameters>(stage_of(k), input(k), gradient);
      }
    }
    if (reads) write_back_rows(component, gradient, kParameters);
  }

  const Layout& layout_;
  const std::vector<std::vector<Step>>& steps_;
  const Coeffs<T, kLanes>& coeffs_;
  const FirstStages rows_;
  const bool reads_rows_;
  const bool wants_gradient_of_x_;
  const int32_t depth_;
  Workspace<T>& work_;
};

}  // namespace
}  // namespace pairmix
