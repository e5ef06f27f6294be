#include "plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pairmix {

Plan::Plan(const int32_t* order, int32_t stages, int32_t n)
    : n_(n), given_stages_(stages), stages_(std::max(stages, 1)) {
  const int32_t half = n / 2;
  pair_at_.assign(int64_t{stages_} * even(), kNoPair);
  partner_.resize(int64_t{stages_} * even());
  for (int32_t l = 0; l < stages_; ++l) {
    int32_t* pair_at = pair_at_.data() + int64_t{l} * even();
    int32_t* partner = partner_.data() + int64_t{l} * even();
    if (l >= stages) {  // the stage that changes nothing
      for (int32_t i = 0; i < even(); ++i) partner[i] = i ^ 1;
      continue;
    }
    const int32_t* stage = order + int64_t{l} * n;
    std::vector<bool> seen(n, false);
    for (int32_t k = 0; k < n; ++k) {
      const int32_t i = stage[k];
      if (i < 0 || i >= n || seen[i])
        throw std::invalid_argument("stage " + std::to_string(l) + " of the order is no permutation: coordinate " +
                                    std::to_string(i) + " is outside of it or there twice");
      seen[i] = true;
    }
    for (int32_t p = 0; p < half; ++p) {
      const int32_t i = stage[p], j = stage[half + p];
      pair_at[i] = p, pair_at[j] = ~p;
      partner[i] = j, partner[j] = i;
    }
    if (n % 2) {
      const int32_t residual = stage[n - 1];
      partner[residual] = n, partner[n] = residual;
    }
  }
}

const Layout& Plan::layout(int32_t width, int32_t budget, bool keeps_stages) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Made& made : made_)
    if (made.width == width && made.budget == budget && made.keeps_stages == keeps_stages) return *made.layout;
  made_.push_back({width, budget, keeps_stages, make_layout(width, budget, keeps_stages)});
  return *made_.back().layout;
}

int32_t Plan::lanes(int32_t width) const { return layout(width, 1, false).lanes; }

// Whether units of so many lanes meet as a whole, or are closed in themselves, at every stage.
bool Plan::fits(int32_t lanes, std::vector<int32_t>& stride) const {
  if (even() % lanes) return false;
  stride.assign(stages_, 0);
  for (int32_t l = 0; l < stages_; ++l) {
    const int32_t distance = partner(l, 0);
    if (distance < lanes) stride[l] = distance;
    if (stride[l] & (stride[l] - 1)) return false;
    for (int32_t i = 0; i < even(); ++i) {
      const int32_t j = partner(l, i);
      if (stride[l] ? (i ^ j) != stride[l] : (j % lanes != i % lanes || j - i != partner(l, i - i % lanes) - (i - i % lanes)))
        return false;
    }
  }
  return true;
}

std::unique_ptr<Layout> Plan::make_layout(int32_t width, int32_t budget, bool keeps_stages) const {
  auto layout = std::make_unique<Layout>();
  layout->lanes = width;
  while (!fits(layout->lanes, layout->stride)) layout->lanes /= 2;
  const int32_t lanes = layout->lanes;
  layout->units = even() / lanes;
  layout->largest = layout->longest = 0;
  layout->coeffs = 0;

  // Components are found by union-find; a group takes stages as long as its components stay small.
  std::vector<int32_t> root(layout->units), size(layout->units);
  const auto find = [&root](int32_t unit) {
    while (root[unit] != unit) unit = root[unit] = root[root[unit]];
    return unit;
  };
  const auto largest_after = [&](int32_t l) {
    int32_t largest = 1;
    for (int32_t unit = 0; unit < layout->units; ++unit) {
      const int32_t a = find(unit), b = find(partner(l, unit * lanes) / lanes);
      if (a != b) root[b] = a, size[a] += size[b];
    }
    for (int32_t unit = 0; unit < layout->units; ++unit) largest = std::max(largest, size[find(unit)]);
    return largest;
  };
  for (int32_t first = 0, last; first < stages_; first = last) {
    std::iota(root.begin(), root.end(), 0);
    std::fill(size.begin(), size.end(), 1);
    std::vector<int32_t> root_before = root;
    for (last = first; last < stages_; ++last) {
      const int32_t largest = largest_after(last);
      const int32_t kept = keeps_stages ? last - first + 2 : 1;
      if (last > first && largest * kept > budget) break;
      root_before = root;
    }
    root = root_before;

    Group group{first, last, {}};
    std::vector<std::vector<int32_t>> members(layout->units);
    for (int32_t unit = 0; unit < layout->units; ++unit) members[find(unit)].push_back(unit);
    std::vector<int32_t> local(layout->units);
    for (const auto& units : members) {
      if (units.empty()) continue;
      const auto count = static_cast<int32_t>(units.size());
      group.components.push_back({static_cast<int32_t>(layout->unit_list.size()), count,
                                  static_cast<int32_t>(layout->pairs.size()), layout->coeffs});
      layout->unit_list.insert(layout->unit_list.end(), units.begin(), units.end());
      for (int32_t k = 0; k < count; ++k) local[units[k]] = k;
      for (int32_t l = first; l < last; ++l) {
        layout->coeffs += int64_t{2} * lanes * count;
        if (layout->stride[l]) continue;
        for (const int32_t unit : units) {
          const int32_t other = partner(l, unit * lanes) / lanes;
          if (unit < other) layout->pairs.push_back({local[unit], local[other]});
        }
      }
      layout->largest = std::max(layout->largest, count);
    }
    layout->longest = std::max(layout->longest, last - first);
    layout->groups.push_back(std::move(group));
  }
  return layout;
}

}  // namespace pairmix
