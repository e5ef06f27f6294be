// How a schedule is walked: which coordinates share a vector, which stages run together on which part of the width.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

namespace pairmix {

// A set of units that the stages of a group never leave. It is small enough to be worked on in a cache.
struct Component {
  int32_t units_begin;  // its units are Layout::unit_list[units_begin ...]
  int32_t units;        // how many
  int32_t pairs_begin;  // its pairs are Layout::pairs[pairs_begin ...], stage after stage
  int32_t padding;      // which of its units ends with the coordinate that an odd width does not have; -1 if none does
};

// Two stages of pairs without a pattern connect the whole width. But every unit is in one pair of each of them, so the pairs
// make rings: one of the first stage, one of the second, and so on until the start is met again. Pair k of the first stage has
// the units 2k and 2k + 1 of the way along the rings, pair k of the second 2k + 1 and the one that follows, which at the end of a
// ring is its start. The coordinate that an odd width does not have is the start of the first ring.
struct Rings {
  std::vector<int32_t> ends;    // of the rings, counted in pairs
  std::vector<int32_t> next;    // where the units along the way are in the tile of the next group
  std::vector<int32_t> before;  // and in the gradient that the group before gets
};

struct Group {
  int32_t first_stage, last_stage;  // half open
  std::vector<Component> components;
  Rings rings;  // if there are any, these are the units of its only component
  // The numbers, in Layout::orders, of the order of units in the tile that it reads, and in the gradient that it goes back with.
  int32_t order, gradient_order;

  bool walks_rings() const { return !rings.ends.empty(); }
};

// Where the units of a tile are in the usual order, counted in units. Those at distances of a power of two would share a few
// sets of the L1 cache, so after every eighth, 64th, ... unit one place is left free.
inline int32_t place(int32_t unit) { return unit + (unit >> 3) + (unit >> 6) + (unit >> 9) + (unit >> 12); }

// Two units that meet lane by lane: local indices into the component's units, and the number that the pair of their first
// lanes has in the schedule. Those of the other lanes follow.
struct Pair {
  int32_t first, second, number;
};

// The stride of a stage that scales every coordinate by itself.
constexpr int32_t kScales = -1;

// A unit is `lanes` neighbouring coordinates. A vector holds one unit of width / lanes rows. Within a stage either all
// pairs are inside units (stride[l] > 0: lane k meets lane k ^ stride) or whole units meet (stride[l] == 0). Either way the
// numbers of the pairs run along, so that coefficients can be read as vectors from where the parameters are.
struct Layout {
  int32_t lanes;
  int32_t units;    // lanes * units coordinates, of which those from n on are always zero
  int32_t largest;  // units of the largest component
  int32_t longest;  // stages of the longest group
  std::vector<int32_t> stride;
  // Whether this stage and the next one, of the same group, fall into quads: in each component, the pairs 2q and 2q + 1 of
  // this stage are (a, b) and (c, d), and those of the next one are (a, c) and (b, d).
  std::vector<bool> quads;
  // Where the coefficients of a stage's pairs are, by their number in the schedule; ~place if the members have changed roles.
  // Empty if they are where the numbers say.
  std::vector<std::vector<int32_t>> places;
  // Where the units are in tiles: first the usual order, then those along rings, which are so read from one end to the other.
  std::vector<std::vector<int32_t>> orders;
  std::vector<Group> groups;
  std::vector<int32_t> unit_list;
  std::vector<Pair> pairs;
};

// How large the parts may be that stages are computed on. Counted in units, with all the copies of them that there are.
struct Budget {
  int64_t component;   // what a component may take; a single stage may take more
  int64_t everything;  // if all stages on the whole width take no more than this, they are one group
  bool keeps_stages;   // whether the input of every stage and a gradient are kept, or one copy is worked on
  bool keeps_quads;    // if so, only the input of the first of two stages that fall into quads
  int32_t first_stage;  // of the first group; those before it are computed while rows are read
  bool allows_rings;    // coefficients and units may be in another order

  bool operator==(const Budget& other) const {
    return component == other.component && everything == other.everything && keeps_stages == other.keeps_stages &&
           keeps_quads == other.keeps_quads && first_stage == other.first_stage && allows_rings == other.allows_rings;
  }
};

// The stages that are computed: those of a schedule, with the diagonals multiplied into the first and the last one, or with
// two stages more that only scale, before and behind them.
class Plan {
 public:
  // `order`: [stages, n], as in Schedule. Throws std::invalid_argument if a stage is no permutation. Without any stage of the
  // schedule the diagonals are apart.
  Plan(const int32_t* order, int32_t stages, int32_t n, bool scales_apart = false);

  int32_t n() const { return n_; }
  // Those of the schedule; the first of them is the stage `first_given()`.
  int32_t given_stages() const { return given_stages_; }
  int32_t first_given() const { return scales_apart_ ? 1 : 0; }
  int32_t stages() const { return stages_; }
  bool scales(int32_t stage) const { return scales_apart_ && (stage == 0 || stage == stages_ - 1); }
  bool scales_apart() const { return scales_apart_; }
  int32_t pairs() const { return n_ / 2; }
  // n, rounded up to even: the coordinate left over by an odd n is paired with one that is always zero, as the last pair.
  int32_t even() const { return n_ + n_ % 2; }
  int32_t half() const { return even() / 2; }

  // The first members of the stage's pairs, by number; the second ones follow.
  const int32_t* members(int32_t stage) const { return members_.data() + int64_t{stage} * even(); }

  // How many neighbouring coordinates share a vector of `width` numbers.
  int32_t lanes(int32_t width) const { return vectors(width).lanes; }

  // Their strides, as in Layout.
  const std::vector<int32_t>& stride(int32_t width) const { return vectors(width).stride; }

  // The layout for vectors of `width` numbers.
  const Layout& layout(int32_t width, const Budget& budget) const;

  // The same schedule with the diagonals apart. It has the same lanes.
  const Plan& with_scales_apart() const;

 private:
  struct Vectors {
    int32_t width, lanes;
    std::vector<int32_t> stride;
  };
  struct Made {
    int32_t width;
    Budget budget;
    Layout layout;
  };

  void add_stage(int32_t stage, const int32_t* order);
  int32_t partner(int32_t stage, int32_t i) const { return partner_[int64_t{stage} * even() + i]; }
  // The number of the pair whose first member is at i, or ~number if i is the second.
  int32_t number(int32_t stage, int32_t i) const { return number_[int64_t{stage} * even() + i]; }
  const Vectors& vectors(int32_t width) const;
  bool fits(int32_t lanes, std::vector<int32_t>& stride) const;
  bool in_quads(int32_t stage, int32_t lanes) const;
  Layout make_layout(const Vectors& vectors, const Budget& budget) const;
  void add_rings(Layout& layout, int32_t first) const;
  static void choose_orders(Layout& layout);
  void add_pairs(Layout& layout, const Group& group, Component& component, std::vector<int32_t>& local) const;

  int32_t n_, given_stages_;
  bool scales_apart_;
  int32_t stages_;
  std::vector<int32_t> members_, partner_, number_;
  // Made when they are needed, under the lock of the shared state. Lists, because their elements are pointed to.
  mutable std::list<Vectors> vectors_;
  mutable std::list<Made> made_;
  mutable std::unique_ptr<Plan> apart_;
};

}  // namespace pairmix
