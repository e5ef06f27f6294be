// Feed-forward blocks for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include <array>
#include <optional>
#include <vector>

#include "bindings.h"
#include "memory.h"
#include "operands.h"
#include "targets.h"

namespace pairmix {
namespace {

// The tensors of a block. Those of the narrow map are checked with x in the place of the hidden layer, which does not exist.
struct Block {
  Block(const Plan& wide, const Plan& narrow, nb::handle x, nb::handle grad, nb::tuple ups, nb::tuple downs,
        std::array<bool, 2> rotations, int64_t out_features, std::optional<int64_t> maps)
      : up(wide, x, nb::none(), ups, rotations[0], wide.n(), maps), down(narrow, x, grad, downs, rotations[1], out_features, {}) {
    fits = up.fits && down.fits && wide.n() == narrow.n() && up.maps <= 2 && up.of_parameters == down.of_parameters &&
           !up.call.halves_everywhere;
    down.call.in_features = narrow.n();
  }

  // Whether the kernels have run.
  bool run(bool (*kernel)(const FeedForward&), int activation, int threads) {
    up.call.threads = down.call.threads = usable_threads(threads);
    FeedForward block{};
    block.ups = static_cast<int32_t>(up.maps), block.down = down.call, block.activation = static_cast<Activation>(activation);
    for (int64_t map = 0; map < up.maps; ++map) block.up[map] = up.of_map(map);
    const nb::gil_scoped_release release;
    return kernel(block);
  }

  Operands up, down;
  bool fits;
};

// None if the tensors are not what the kernels take, or their schedules are of different kinds; with `only_ordinary` also if they
// are not for the kernels to read, or of several dtypes.
nb::object feed_forward(const Plan& wide, const Plan& narrow, nb::handle x, nb::tuple ups, nb::tuple downs,
                        std::array<bool, 2> rotations, int64_t out_features, std::optional<int64_t> maps, int activation,
                        int threads, bool only_ordinary) {
  if (only_ordinary && !(is_ordinary(x) && are_ordinary(ups) && are_ordinary(downs))) return nb::none();
  Block block(wide, narrow, x, nb::none(), ups, downs, rotations, out_features, maps);
  if (!block.fits || (only_ordinary && block.up.call.dtype != block.up.of_parameters)) return nb::none();
  std::vector<int64_t> shape(block.up.x.shape(), block.up.x.shape() + block.up.x.dimensions());
  shape.back() = out_features;
  NewTensor y = new_tensor(std::move(shape), block.up.call.dtype);
  block.down.call.y = {y.data, out_features, 1};
  if (!block.run(chosen_target().feed_forward, activation, threads)) return nb::none();
  return std::move(y.object);
}

// The gradients that are needed, of x, of the parameters of the wide maps and of those of the narrow one; or None.
nb::object feed_forward_backward(const Plan& wide, const Plan& narrow, nb::handle grad, nb::handle x, nb::tuple ups,
                                 nb::tuple downs, std::array<bool, 2> rotations, std::optional<int64_t> maps, int activation,
                                 const std::array<bool, 11>& needs, int threads) {
  const TensorView of_grad(grad);
  if (of_grad.dimensions() < 1) return nb::none();
  const int64_t out_features = of_grad.size(of_grad.dimensions() - 1);
  Block block(wide, narrow, x, grad, ups, downs, rotations, out_features, maps);
  if (!block.fits) return nb::none();
  Results results;
  const TensorView& view = block.up.x;
  Call &up = block.up.call, &down = block.down.call;
  up.grad_x = {results.add(needs[0], {view.shape(), view.shape() + view.dimensions()}, up.dtype), up.in_features, 1};
  down.grad_x = down.grad;
  int next = 1;
  for (Operands* map : {&block.up, &block.down}) {
    Parameters& gradients = map->call.gradients;
    const int64_t n = map->call.plan->n();
    gradients.blocks = results.add(needs[next], map->shape_of_blocks(), map->of_parameters);
    gradients.d_in = results.add(needs[next + 1], map->shape_of(n), map->of_parameters);
    gradients.d_out = results.add(needs[next + 2], map->shape_of(n), map->of_parameters);
    gradients.bias = results.add(needs[next + 3], map->shape_of(map->call.out_features), map->of_parameters);
    gradients.residual_scale = results.add(needs[next + 4], map->shape_of(map->call.plan->given_stages()), map->of_parameters);
    next += 5;
  }
  if (!block.run(chosen_target().feed_forward_backward, activation, threads)) return nb::none();
  return results.objects;
}

}  // namespace

void bind_feed_forward(nb::module_& m) {
  const auto or_none = nb::arg().none();
  m.def("feed_forward", feed_forward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), or_none,
        nb::arg(), nb::arg(), nb::arg());
  m.def("feed_forward_backward", feed_forward_backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), or_none, nb::arg(), nb::arg(), nb::arg());
}

}  // namespace pairmix
