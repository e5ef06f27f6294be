// How large tiles are, and the parts of them that stages are computed on: chosen for the caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "caches.h"
#include "coeffs.h"
#include "kernel.h"
#include "row_stages.h"
#include "simd.h"

namespace pairmix {
namespace {

// What a tile may take of the L2 cache, and a component of the L1 cache: forward works in place, backward also keeps the
// inputs of the component's stages, or of all stages if there is not much. `pairmix bench kernels --caches` measures tiles
// for smaller and larger caches.
inline int64_t tile_bytes(int lanes) { return caches().l2_bytes / (lanes == 1 ? 2 : 4); }
inline int64_t kept_bytes() { return caches().l2_bytes / 2; }
inline int64_t component_bytes(bool backward) { return caches().l1_bytes / 2 * (backward ? 3 : 1); }

constexpr int32_t kShallowest = 8, kDeepest = 16;  // vectors below each other
// Of one coordinate each, which is what other pairings than butterflies have: every group goes from one tile to another, which
// together may take all of the L2 cache. Two to four lines are enough for each coefficient.
constexpr int32_t kShallowestOfOne = 128 / kVectorBytes, kDeepestOfOne = 256 / kVectorBytes;

// Of so many coefficients that no cache keeps them from one tile to the next, better use is made by deeper tiles, and by
// fewer groups: components then take the L2 cache.
constexpr int64_t kManyBytes = 6 << 20;
constexpr int32_t kDepthOfMany = 32;

// Threads take rows of their own, unless there are more coefficients than this: then each takes its part of the width, of
// all rows. Coefficients and the sums of their gradients so stay in the L3 cache, and a single row has work for all threads.
constexpr int64_t kSharedBytes = 2 << 20;
constexpr int64_t kSharedBytesOfFewRows = 512 << 10;

// To call another thread takes one or two microseconds. It has to have so many multiply-adds to do, which take it as long.
constexpr int64_t kWorthAThread = 80000;

template <class T, int kLanes>
struct Tiling {
  // How many threads have enough to do, of those that the call may use.
  static int32_t threads(const Call& call, bool backward) {
    const int64_t of_row = int64_t{call.plan->given_stages()} * 2 * call.plan->even() * (backward ? 3 : 1);
    return static_cast<int32_t>(std::clamp<int64_t>(call.rows * call.steps * of_row / kWorthAThread, 1, call.threads));
  }

  // Whether all threads work on the same tile.
  static bool threads_share_tiles(const Call& call) {
    const int64_t most = call.rows < kRowsWorthPacking ? kSharedBytesOfFewRows : kSharedBytes;
    return kLanes > 1 && call.threads > 1 && call.steps == 1 && coeff_bytes(call) > most;
  }

  // How many vectors of a unit are below each other.
  static int32_t depth(const Call& call, bool threads_share_tiles) {
    constexpr int64_t together = Simd<T>::width / kLanes;
    const int64_t among = threads_share_tiles ? together : call.threads * together;
    const int64_t per_thread = (call.rows + among - 1) / among;
    const int64_t units = (call.plan->even() + kLanes - 1) / kLanes;
    constexpr int32_t shallowest = kLanes == 1 ? kShallowestOfOne : kShallowest;
    constexpr int32_t usually_deepest = kLanes == 1 ? kDeepestOfOne : kDeepest;
    const int64_t usual = std::clamp<int64_t>(tile_bytes(kLanes) / (units * kVectorBytes), shallowest, usually_deepest);
    const int64_t deepest = coeff_bytes(call) > kManyBytes ? kDepthOfMany : usual;
    int32_t depth = 1;  // powers of two only: every depth has a layout of its own
    while (2 * depth <= deepest && depth < per_thread) depth *= 2;
    return depth;
  }

  // Backward, if there is not much, the inputs of all stages are kept at once: in the L2 cache, but without computing
  // anything twice.
  static Budget budget(const Call& call, bool backward, int32_t depth, bool fuses_rows, bool is_in_chain) {
    const int64_t unit_bytes = depth * kVectorBytes;
    const int64_t component = coeff_bytes(call) > kManyBytes ? kept_bytes() : component_bytes(backward);
    const int32_t first_stage = fuses_rows ? kRunStages<kLanes> : 0;
    return {component / unit_bytes, backward ? kept_bytes() / unit_bytes : 0, backward, kWalksBackInQuads, first_stage,
            !is_in_chain && call.rows * call.steps >= kRowsWorthPacking};
  }

 private:
  static int64_t coeff_bytes(const Call& call) {
    return int64_t{call.plan->stages()} * 2 * call.plan->even() * int64_t{sizeof(T)};
  }
};

}  // namespace
}  // namespace pairmix
