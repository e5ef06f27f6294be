// The stages of a call, one by one or as many as are computed at once.
#pragma once

#include <cstdint>
#include <vector>

#include "blocks.h"
#include "coeffs.h"
#include "plan.h"

namespace pairmix {
namespace {

// One stage of a group, or several that are computed as one: what does not depend on the component.
struct Step {
  int32_t stage;
  Kind kind;
  bool quads;                   // forward, it is computed together with the next one
  int32_t earlier_whole_units;  // stages before it in its group that pair whole units
};

// Those of every group.
template <int kLanes, class T>
std::vector<std::vector<Step>> steps_of(const Layout& layout, const Coeffs<T, kLanes>& coeffs) {
  std::vector<std::vector<Step>> all;
  for (const Group& group : layout.groups) {
    std::vector<Step>& steps = all.emplace_back();
    int32_t whole_units = 0;
    for (int32_t l = group.first_stage; l < group.last_stage; ++l) {
      const int32_t* stride = layout.stride.data() + l;
      const bool run = is_run<kLanes>(stride, group.last_stage - l);
      const bool quads = layout.quads[l] && coeffs.kind(l) == coeffs.kind(l + 1);
      steps.push_back({l, run ? Kind::inside_run : coeffs.kind(l), quads, whole_units});
      whole_units += !*stride;
      if (run) l += kRunStages<kLanes> - 1;
    }
  }
  return all;
}

}  // namespace
}  // namespace pairmix
