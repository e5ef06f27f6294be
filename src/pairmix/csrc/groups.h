// The groups of stages on a tile: component by component, or along rings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "coeffs.h"
#include "plan.h"
#include "rings.h"
#include "stages.h"
#include "steps.h"
#include "tiles.h"
#include "workspace.h"

namespace pairmix {
namespace {

// For the tile that a workspace has at hand.
template <class T, int kLanes>
class Groups {
 public:
  // `wants_gradient_of_x`: back through the first stage, too. `depth` is that of a full tile.
  Groups(const Layout& layout, const std::vector<std::vector<Step>>& steps, const Coeffs<T, kLanes>& coeffs,
         bool wants_gradient_of_x, int32_t depth, Workspace<T>& work)
      : layout_(layout), steps_(steps), coeffs_(coeffs), wants_gradient_of_x_(wants_gradient_of_x), depth_(depth), work_(work) {}

  // In place, if `from` and `to` are the same tile; never along rings.
  void forward(size_t number, const Tile<T>& from, const Tile<T>& to) const {
    if (group(number).walks_rings())
      return with_rings(number, [&](const auto& walk) { walk.forward(from.vectors, to.vectors); });
    each_component(number, [&](const Component& component) {
      const Units<T> inputs = locate(component, from, work_.from);
      const Units<T> outputs = from.vectors == to.vectors ? inputs : locate(component, to, work_.to);
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
    const Units<T> gradient = locate(component, work_.gradient, work_.to);
    const Units<T> first = kParameters ? locate(component, work_.kept[number], work_.from) : nullptr;
    const auto input = [&](size_t k) -> Units<T> { return k ? work_.levels + (k - 1) * layout_.largest : first; };
    if constexpr (kParameters) steps_forward<true>(number, steps_[number].size() - 1, component, input);
    for (size_t k = steps_[number].size(); k-- > 0;)
      stage_backward<T, kLanes, kParameters>(stage(component, steps_[number][k]), kParameters ? input(k) : nullptr, gradient);
  }

  const Layout& layout_;
  const std::vector<std::vector<Step>>& steps_;
  const Coeffs<T, kLanes>& coeffs_;
  const bool wants_gradient_of_x_;
  const int32_t depth_;
  Workspace<T>& work_;
};

}  // namespace
}  // namespace pairmix
