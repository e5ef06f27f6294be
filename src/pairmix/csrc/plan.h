// How a schedule is walked: which coordinates share a vector, which stages run together on which part of the width.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pairmix {

// A set of units that the stages of a group never leave. It is small enough to be worked on in the L1 cache.
struct Component {
  int32_t units_begin;   // its units are Layout::units[units_begin ...]
  int32_t units;         // how many
  int32_t pairs_begin;   // its pairs are Layout::pairs[pairs_begin ...], stage after stage, as local indices
  int64_t coeffs_begin;  // where its coefficients start in the packed ones, counted in lanes
};

struct Group {
  int32_t first_stage, last_stage;  // half open
  std::vector<Component> components;
};

struct Pair {
  int32_t first, second;  // local indices into the component's units
};

// A unit is `lanes` neighbouring coordinates. A vector holds one unit of width / lanes rows. Within a stage either all
// pairs are inside units (stride[l] > 0: lane k meets lane k ^ stride) or whole units meet, lane by lane (stride[l] == 0).
struct Layout {
  int32_t lanes;
  int32_t units;             // lanes * units coordinates, of which those from n on are always zero
  int32_t largest;           // units of the largest component
  int32_t longest;           // stages of the longest group
  int64_t coeffs;            // packed coefficients, counted in numbers
  std::vector<int32_t> stride;
  std::vector<Group> groups;
  std::vector<int32_t> unit_list;
  std::vector<Pair> pairs;
};

class Plan {
 public:
  // `order`: [stages, n], as in Schedule. Throws std::invalid_argument if a stage is no permutation.
  Plan(const int32_t* order, int32_t stages, int32_t n);

  int32_t n() const { return n_; }
  int32_t given_stages() const { return given_stages_; }
  // At least one: without any stage there is one that changes nothing, to which the diagonals can be attached.
  int32_t stages() const { return stages_; }
  int32_t pairs() const { return n_ / 2; }
  // n, rounded up to even: the coordinate left over by an odd n is paired with one that is always zero.
  int32_t even() const { return n_ + n_ % 2; }

  // What is at a coordinate at a stage: pair p as its first (p) or its second member (~p), or no pair at all.
  static constexpr int32_t kNoPair = INT32_MAX;
  const int32_t* pair_at(int32_t stage) const { return pair_at_.data() + int64_t{stage} * even(); }

  // How many neighbouring coordinates share a vector of `width` numbers.
  int32_t lanes(int32_t width) const;

  // The layout for vectors of `width` numbers, with components of at most `budget` units times stages kept.
  const Layout& layout(int32_t width, int32_t budget, bool keeps_stages) const;

 private:
  struct Made {
    int32_t width, budget;
    bool keeps_stages;
    std::unique_ptr<Layout> layout;
  };

  int32_t partner(int32_t stage, int32_t coordinate) const {
    return partner_[int64_t{stage} * even() + coordinate];
  }
  bool fits(int32_t lanes, std::vector<int32_t>& stride) const;
  std::unique_ptr<Layout> make_layout(int32_t width, int32_t budget, bool keeps_stages) const;

  int32_t n_, given_stages_, stages_;
  std::vector<int32_t> pair_at_, partner_;
  mutable std::mutex mutex_;
  mutable std::vector<Made> made_;
};

}  // namespace pairmix
