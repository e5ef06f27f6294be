// What a thread of a call works with.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace pairmix {
namespace {

template <class T>
struct Workspace {
  int32_t number;
  Share share;                // of the tile at hand
  Rows x, y, grad, grad_x;  // its rows, those that there are
  int64_t count;              // how many
  int32_t depth;
  std::vector<Tile<T>> kept;  // the input of every group; forward that of the first, and one more for rings
  Tile<T> gradient, other_gradient;  // rings go from one to the other
  // Pointers to the units of a component: in the tiles at hand, and in the inputs of its steps, the first of them where it is not
  // that of a tile.
  Vector<T> **from, **to, **levels;
  std::vector<Vector<T>*> pointers;
  Vector<T>* room;  // for what rings are computed with
  T *buffer, *coeff_gradients, *bias_gradient;

  // If they work on the same tile.
  void wait_for_others() const {
    if (share.team > 1) {
#pragma omp barrier
    }
  }
};

}  // namespace
}  // namespace pairmix
