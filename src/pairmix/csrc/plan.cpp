#include "plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "memory.h"

namespace pairmix {

Plan::Plan(const int32_t* order, int32_t stages, int32_t n, bool scales_apart)
    : n_(n), given_stages_(stages), scales_apart_(scales_apart || stages == 0), stages_(stages + (scales_apart_ ? 2 : 0)) {
  const int64_t all = int64_t{stages_} * even();
  members_.resize(all);
  partner_.resize(all);
  number_.resize(all);
  for (int32_t l = 0; l < stages; ++l) add_stage(first_given() + l, order + int64_t{l} * n);
  for (int32_t l = 0; l < stages_; ++l)
    if (scales(l)) std::iota(partner_.begin() + int64_t{l} * even(), partner_.begin() + int64_t{l + 1} * even(), 0);
}

void Plan::add_stage(int32_t l, const int32_t* order) {
  std::vector<bool> seen(n_, false);
  for (int32_t k = 0; k < n_; ++k) {
    const int32_t i = order[k];
    if (i < 0 || i >= n_ || seen[i])
      throw std::invalid_argument("stage " + std::to_string(l - first_given()) + " of the order is no permutation: coordinate " +
                                  std::to_string(i) + " is outside of it or there twice");
    seen[i] = true;
  }
  int32_t* members = members_.data() + int64_t{l} * even();
  std::copy(order, order + pairs(), members);
  std::copy(order + pairs(), order + 2 * pairs(), members + half());
  if (n_ % 2) members[half() - 1] = order[n_ - 1], members[even() - 1] = n_;
  for (int32_t p = 0; p < half(); ++p) {
    const int64_t first = int64_t{l} * even() + members[p], second = int64_t{l} * even() + members[half() + p];
    number_[first] = p, number_[second] = ~p;
    partner_[first] = members[half() + p], partner_[second] = members[p];
  }
}

const Plan& Plan::with_scales_apart() const {
  const std::lock_guard<std::mutex> lock(shared_state);
  if (scales_apart_) return *this;
  if (!apart_) {
    std::vector<int32_t> order;
    for (int32_t l = 0; l < stages_; ++l) {
      const int32_t* stage = members(l);
      order.insert(order.end(), stage, stage + pairs());
      order.insert(order.end(), stage + half(), stage + half() + pairs());
      if (n_ % 2) order.push_back(stage[half() - 1]);
    }
    apart_ = std::make_unique<Plan>(order.data(), stages_, n_, true);
  }
  return *apart_;
}

const Layout& Plan::layout(int32_t width, const Budget& budget) const {
  const Vectors& vectors = this->vectors(width);
  const std::lock_guard<std::mutex> lock(shared_state);
  for (const Made& made : made_)
    if (made.width == width && made.budget == budget) return made.layout;
  return made_.emplace_back(Made{width, budget, make_layout(vectors, budget)}).layout;
}

const Plan::Vectors& Plan::vectors(int32_t width) const {
  const std::lock_guard<std::mutex> lock(shared_state);
  for (const Vectors& vectors : vectors_)
    if (vectors.width == width) return vectors;
  Vectors vectors{width, width, {}};
  while (!fits(vectors.lanes, vectors.stride)) vectors.lanes /= 2;
  // Two of eight are not worth it: to fold the sums of gradients takes longer than to walk through twice as many rows. Through
  // twice as many again it does not.
  if (vectors.lanes == 2 && width == 8) fits(vectors.lanes = 1, vectors.stride);
  return vectors_.emplace_back(std::move(vectors));
}

// Whether units of so many lanes meet as a whole, or are closed in themselves, at every stage, and the numbers run along.
bool Plan::fits(int32_t lanes, std::vector<int32_t>& stride) const {
  if (even() % lanes) return false;
  stride.assign(stages_, 0);
  for (int32_t l = 0; l < stages_; ++l) {
    if (scales(l)) {
      stride[l] = kScales;
      continue;
    }
    const int32_t s = partner(l, 0) < lanes ? partner(l, 0) : 0;
    if (s & (s - 1)) return false;
    stride[l] = s;
    for (int32_t i = 0; i < even(); ++i) {
      const int32_t lane = i % lanes, unit = i - lane;
      if (s) {
        const int32_t expected = unit / 2 + lane / (2 * s) * s + lane % s;
        if (partner(l, i) != (i ^ s) || number(l, i) != (lane & s ? ~expected : expected)) return false;
      } else {
        const int32_t first = number(l, unit);
        if (partner(l, unit) % lanes || partner(l, i) != partner(l, unit) + lane) return false;
        if (number(l, i) != (first < 0 ? first - lane : first + lane)) return false;
      }
    }
  }
  return true;
}

bool Plan::in_quads(int32_t l, int32_t lanes) const {
  for (int32_t a = 0; a < even(); a += lanes) {
    if (number(l, a) < 0) continue;
    const int32_t b = partner(l, a), c = partner(l + 1, a), d = partner(l + 1, b);
    if (partner(l, c) != d || number(l, c) < 0 || (number(l + 1, a) < 0) != (number(l + 1, b) < 0)) return false;
  }
  return true;
}

Layout Plan::make_layout(const Vectors& vectors, const Budget& budget) const {
  const int32_t lanes = vectors.lanes, units = even() / lanes;
  Layout layout{lanes, units, 0, 0, vectors.stride, std::vector<bool>(stages_, false), {}, {}, {}, {}, {}};
  layout.places.resize(stages_);
  layout.orders.resize(1);
  for (int32_t unit = 0; unit < units; ++unit) layout.orders[0].push_back(place(unit));

  // Components are found by union-find; a group takes stages as long as its components stay small.
  std::vector<int32_t> root(units), size(units);
  const auto find = [&root](int32_t unit) {
    while (root[unit] != unit) unit = root[unit] = root[root[unit]];
    return unit;
  };
  const auto largest_after = [&](int32_t l) {
    for (int32_t unit = 0; unit < units; ++unit) {
      const int32_t a = find(unit), b = find(partner(l, unit * lanes) / lanes);
      if (a != b) root[b] = a, size[a] += size[b];
    }
    int32_t largest = 1;
    for (int32_t unit = 0; unit < units; ++unit) largest = std::max(largest, size[find(unit)]);
    return largest;
  };
  std::vector<bool> quads(stages_, false);  // with the next stage
  for (int32_t l = 0; l + 1 < stages_; ++l) quads[l] = !layout.stride[l] && !layout.stride[l + 1] && in_quads(l, lanes);
  // How many copies of a component a group keeps: the input of every stage, a run inside units counting as one, and so do
  // quads if they are walked back through at once; and a gradient. Counted stage by stage.
  int64_t inputs = 0;
  bool ends_quads = false;  // the next stage does
  const auto take = [&](int32_t l) {
    const bool continues_run = inputs > 0 && layout.stride[l] > 1 && layout.stride[l] == 2 * layout.stride[l - 1];
    inputs += !continues_run && !ends_quads;
    ends_quads = !ends_quads && budget.keeps_quads && quads[l];
  };
  const auto copies = [&] { return budget.keeps_stages ? inputs + 1 : 1; };
  for (int32_t l = budget.first_stage; l < stages_; ++l) take(l);
  const bool is_one_group = copies() * units <= budget.everything;
  for (int32_t first = budget.first_stage, last; first < stages_; first = last) {
    std::iota(root.begin(), root.end(), 0);
    std::fill(size.begin(), size.end(), 1);
    std::vector<int32_t> root_before = root;
    inputs = 0, ends_quads = false;
    int64_t copies_before = 1;
    for (last = first; last < stages_; ++last) {
      take(last);
      if (largest_after(last) * copies() > budget.component && last > first && !is_one_group) break;
      root_before = root, copies_before = copies();
    }
    const bool is_single = last == first + 1 && last < stages_;
    if (budget.allows_rings && lanes == 1 && is_single && !layout.stride[first] && !layout.stride[last]) {
      add_rings(layout, first);
      ++last;
      continue;
    }
    root = root_before;
    for (int32_t l = first; l + 1 < last; ++l)
      if (quads[l]) layout.quads[l++] = true;

    Group group{first, last, {}, {}, 0, 0};
    std::vector<int32_t> local(units);
    std::vector<std::vector<int32_t>> members(units);
    for (int32_t unit = 0; unit < units; ++unit) members[find(unit)].push_back(unit);
    for (const auto& closed : members) {
      if (closed.empty()) continue;
      const auto count = static_cast<int32_t>(closed.size());
      // Small ones are taken together.
      if (group.components.empty() || (group.components.back().units + count) * copies_before > budget.component)
        group.components.push_back({static_cast<int32_t>(layout.unit_list.size()), 0, 0, -1});
      layout.unit_list.insert(layout.unit_list.end(), closed.begin(), closed.end());
      group.components.back().units += count;
    }
    for (Component& component : group.components) {
      component.pairs_begin = static_cast<int32_t>(layout.pairs.size());
      add_pairs(layout, group, component, local);
      layout.largest = std::max(layout.largest, component.units);
    }
    layout.longest = std::max(layout.longest, last - first);
    layout.groups.push_back(std::move(group));
  }
  choose_orders(layout);
  return layout;
}

// Rings are read along their way, and write where others want to read; groups without rings leave every unit where it is.
void Plan::choose_orders(Layout& layout) {
  const auto along = [&layout](const Group& group, int32_t order) {
    const int32_t* way = layout.unit_list.data() + group.components[0].units_begin;
    std::vector<int32_t> places(layout.units);
    for (int32_t k = 0; k < layout.units; ++k) places[k] = layout.orders[order][way[k]];
    return places;
  };
  int32_t order = 0;
  for (auto group = layout.groups.rbegin(); group != layout.groups.rend(); ++group) {
    if (group->walks_rings())
      group->rings.next = along(*group, order), order = group->order;
    else
      group->order = order;
  }
  order = 0;
  for (Group& group : layout.groups) {
    if (group.walks_rings()) group.rings.before = along(group, order), order = group.order;
    group.gradient_order = order;
  }
}

void Plan::add_rings(Layout& layout, int32_t first) const {
  const auto order = static_cast<int32_t>(layout.orders.size());
  Group group{first, first + 2, {}, {}, order, order};
  group.components.push_back({static_cast<int32_t>(layout.unit_list.size()), layout.units, 0, n_ % 2 ? 0 : -1});
  for (const int32_t l : {first, first + 1}) layout.places[l].resize(half());
  std::vector<int32_t> position(layout.units, -1);
  int32_t units = 0, pairs = 0;
  const auto go_on_from = [&](int32_t unit, int32_t l) {
    const int32_t pair = number(l, unit);
    layout.places[l][pair >= 0 ? pair : ~pair] = pair >= 0 ? pairs : ~pairs;
    layout.unit_list.push_back(unit);
    position[unit] = units++;
    return partner(l, unit);
  };
  for (int32_t start = layout.units - 1; start >= 0; --start) {
    if (position[start] >= 0) continue;
    for (int32_t unit = start; position[unit] < 0; ++pairs) unit = go_on_from(go_on_from(unit, first), first + 1);
    group.rings.ends.push_back(pairs);
  }
  layout.orders.push_back(std::move(position));
  layout.groups.push_back(std::move(group));
}

void Plan::add_pairs(Layout& layout, const Group& group, Component& component, std::vector<int32_t>& local) const {
  const int32_t lanes = layout.lanes;
  const int32_t* units = layout.unit_list.data() + component.units_begin;
  for (int32_t k = 0; k < component.units; ++k) local[units[k]] = k;
  const int32_t padded = n_ % 2 ? local[layout.units - 1] : -1;
  if (padded >= 0 && padded < component.units && units[padded] == layout.units - 1) component.padding = padded;
  const auto is_first = [&](int32_t l, int32_t unit) { return number(l, unit * lanes) >= 0; };
  const auto other = [&](int32_t l, int32_t unit) { return partner(l, unit * lanes) / lanes; };
  const auto add = [&](int32_t l, int32_t unit) {
    layout.pairs.push_back({local[unit], local[other(l, unit)], number(l, unit * lanes)});
  };
  for (int32_t l = group.first_stage; l < group.last_stage; ++l) {
    if (layout.stride[l]) continue;
    if (!layout.quads[l]) {
      for (int32_t k = 0; k < component.units; ++k)
        if (is_first(l, units[k])) add(l, units[k]);
      continue;
    }
    std::vector<int32_t> corners;  // the unit a of each quad
    for (int32_t k = 0; k < component.units; ++k)
      if (is_first(l, units[k]) && is_first(l + 1, units[k])) corners.push_back(units[k]);
    for (const int32_t a : corners) add(l, a), add(l, other(l + 1, a));
    for (const int32_t a : corners) add(l + 1, a), add(l + 1, other(l, a));
    ++l;
  }
}

}  // namespace pairmix
