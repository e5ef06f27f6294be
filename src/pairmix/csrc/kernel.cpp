// The operator on tiles of rows. Compiled once for every instruction set, with PAIRMIX_TARGET naming it.
#include "kernel.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "pack.h"
#include "peak.h"
#include "stages.h"
#include "tiles.h"

namespace pairmix {
namespace {

// What a tile may take of the L2 cache, and a component of the L1 cache: forward works in place, backward also keeps the
// inputs of the component's stages. Half or twice as much changes little.
constexpr int64_t kTileBytes = 256 << 10;
constexpr int64_t kForwardComponentBytes = 16 << 10;
constexpr int64_t kBackwardComponentBytes = 32 << 10;
constexpr int32_t kDeepest = 16;  // vectors below each other; more would not make better use of the coefficients

// Memory that a thread keeps from call to call.
class Arena {
 public:
  ~Arena() { std::free(memory_); }

  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = 0;
      bytes = (bytes + 4095) / 4096 * 4096;
      memory_ = static_cast<char*>(std::aligned_alloc(4096, bytes));
      if (!memory_) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  int64_t size_ = 0;
};

Arena& arena() {
  thread_local Arena of_this_thread;
  return of_this_thread;
}

// Hands out parts of a block of memory; without one it only counts.
class Parts {
 public:
  explicit Parts(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* part = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + 64;  // and a line, so that reads may overrun
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

template <class T>
struct Workspace {
  int32_t depth;  // of the tile at hand: the last one may be less deep
  std::vector<Tile<T>> kept;  // the input of every group
  Tile<T> gradient;
  // Pointers to the units of a component: to its gradient, its input and, from there on, the inputs of later stages.
  std::vector<Vector<T>*> units;
  T *buffer, *coeff_gradients, *bias_gradient;
};

// A call, with everything about it that does not depend on the rows.
template <class S, class T, int kLanes>
class Run {
 public:
  Run(const Call& call, bool backward)
      : call_(call),
        plan_(*call.plan),
        depth_(choose_depth(call)),
        layout_(plan_.layout(Simd<T>::width, budget(backward) / (depth_ * kVectorBytes), backward)),
        packer_(call, layout_),
        backward_(backward) {
    rows_per_tile_ = int64_t{depth_} * (Simd<T>::width / kLanes);
    tiles_ = (call.rows + rows_per_tile_ - 1) / rows_per_tile_;
    threads_ = static_cast<int32_t>(std::clamp<int64_t>(tiles_, 1, call.threads));
    const Parameters& g = call.gradients;
    wants_parameters_ = backward && (g.blocks || g.d_in || g.d_out || g.residual_scale);
    wants_rest_ = !backward || wants_parameters_ || call.grad_x.data;

    Parts count(nullptr);
    lay_out(count);
    Parts parts(arena().at_least(count.used()));
    lay_out(parts);
    place_units(layout_.units, depth_, offset_);
    make_steps();
    if (wants_rest_) packer_.template pack<kLanes>(coeffs_, call.threads);
  }

  void forward() {
#pragma omp parallel num_threads(threads_)
    {
      Workspace<T>& work = workspaces_[omp_get_thread_num()];
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tiles_; ++t) {
        const int64_t start = t * rows_per_tile_, count = std::min(rows_per_tile_, call_.rows - start);
        const Tile<T>& z = work.kept[0];
        work.depth = depth_of(count);
        read_tile<S, T, kLanes>(call_.x, start, count, call_.in_features, plan_.n(), layout_.units, z, work.buffer, nullptr);
        for (size_t k = 0; k < layout_.groups.size(); ++k)
          for (const Component& component : layout_.groups[k].components) group_forward(k, component, z, z, work);
        write_tile<S, T, kLanes>(z, plan_.n(), layout_.units, static_cast<const T*>(call_.parameters.bias), call_.y, start,
                                 count, call_.out_features, work.buffer);
      }
    }
  }

  void backward() {
    T* bias_gradient = static_cast<T*>(call_.gradients.bias);
#pragma omp parallel num_threads(threads_)
    {
      Workspace<T>& work = workspaces_[omp_get_thread_num()];
      if (wants_parameters_) std::fill(work.coeff_gradients, work.coeff_gradients + layout_.coeffs, T(0));
      if (bias_gradient) std::fill(work.bias_gradient, work.bias_gradient + call_.out_features, T(0));
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tiles_; ++t)
        tile_backward(t * rows_per_tile_, std::min(rows_per_tile_, call_.rows - t * rows_per_tile_), work,
                      bias_gradient ? work.bias_gradient : nullptr);
    }
    // Summed in the order of the threads, so that the result is the same on every run.
    if (bias_gradient)
      for (int32_t o = 0; o < call_.out_features; ++o) {
        bias_gradient[o] = 0;
        for (const Workspace<T>& work : workspaces_) bias_gradient[o] += work.bias_gradient[o];
      }
    if (wants_parameters_) {
      std::vector<T*> coeff_gradients;
      for (const Workspace<T>& work : workspaces_) coeff_gradients.push_back(work.coeff_gradients);
      packer_.template unpack<kLanes>(coeff_gradients, call_.gradients, call_.threads);
    }
  }

 private:
  static int32_t budget(bool backward) {
    return static_cast<int32_t>(backward ? kBackwardComponentBytes : kForwardComponentBytes);
  }

  static int32_t choose_depth(const Call& call) {
    constexpr int64_t together = Simd<T>::width / kLanes;
    const int64_t units = (call.plan->even() + kLanes - 1) / kLanes;
    const int64_t fits = kTileBytes / (units * kVectorBytes);
    const int64_t per_thread = (call.rows + call.threads * together - 1) / (call.threads * together);
    int32_t depth = 1;  // powers of two only: every depth has a layout of its own
    while (depth < kDeepest && 2 * depth <= std::max<int64_t>(fits, 4) && depth < per_thread) depth *= 2;
    return depth;
  }

  static int32_t depth_of(int64_t rows) {
    constexpr int64_t together = Simd<T>::width / kLanes;
    return static_cast<int32_t>((rows + together - 1) / together);
  }

  void lay_out(Parts& parts) {
    const int64_t tile = tile_vectors(layout_.units, depth_);
    const int64_t padded = int64_t{layout_.units} * kLanes;
    coeffs_ = parts.take<T>(layout_.coeffs);
    offset_ = parts.take<int32_t>(layout_.units);
    workspaces_.assign(threads_, {});
    for (Workspace<T>& work : workspaces_) {
      const size_t kept = wants_parameters_ ? layout_.groups.size() : backward_ ? 0 : 1;
      for (size_t k = 0; k < kept; ++k) work.kept.push_back({parts.take<Vector<T>>(tile), offset_});
      work.buffer = parts.take<T>((Simd<T>::width / kLanes + 1) * padded);
      work.units.resize((size_t{2} + layout_.longest) * layout_.largest);
      if (!backward_) continue;
      work.gradient = {parts.take<Vector<T>>(tile), offset_};
      work.bias_gradient = parts.take<T>(call_.out_features);
      if (!wants_parameters_) continue;
      work.coeff_gradients = parts.take<T>(layout_.coeffs);
      Vector<T>* levels = parts.take<Vector<T>>(int64_t{layout_.longest} * layout_.largest * depth_);
      for (int64_t k = 0; k < int64_t{layout_.longest} * layout_.largest; ++k)
        work.units[2 * layout_.largest + k] = levels + k * depth_;
    }
  }

  void locate(const Component& component, const Tile<T>& tile, Vector<T>** units) const {
    for (int32_t k = 0; k < component.units; ++k) units[k] = tile.unit(layout_.unit_list[component.units_begin + k]);
  }

  // One stage of a group, or several that are computed as one: what does not depend on the component.
  struct Step {
    Kind kind;
    int32_t stride;
    int32_t earlier;              // stages before it in its group
    int32_t earlier_whole_units;  // of which pair whole units
  };

  void make_steps() {
    for (const Group& group : layout_.groups) {
      std::vector<Step>& steps = steps_.emplace_back();
      int32_t whole_units = 0;
      for (int32_t l = group.first_stage; l < group.last_stage; ++l) {
        const int32_t* stride = layout_.stride.data() + l;
        const bool fused = kLanes >= 8 && l + 3 <= group.last_stage && stride[0] == 1 && stride[1] == 2 && stride[2] == 4;
        steps.push_back({fused ? Kind::inside_1_2_4 : packer_.kind(l), *stride, l - group.first_stage, whole_units});
        whole_units += !*stride;
        if (fused) l += 2;
      }
    }
  }

  Stage<T> stage(const Component& component, const Step& step, const Workspace<T>& work, T* gradients) const {
    const int64_t at = component.coeffs_begin + int64_t{2} * kLanes * component.units * step.earlier;
    const int32_t pairs = component.pairs_begin + step.earlier_whole_units * (component.units / 2);
    return {step.kind,    step.stride, layout_.pairs.data() + pairs,           component.units,
            coeffs_ + at, gradients ? gradients + at : nullptr, work.depth};
  }

  // The stages of a group on one component, from one tile to another or in place.
  void group_forward(size_t number, const Component& component, const Tile<T>& from, const Tile<T>& to,
                     Workspace<T>& work) const {
    Vector<T>**from_units = work.units.data(), **to_units = from_units + layout_.largest;
    locate(component, from, from_units);
    locate(component, to, to_units);
    for (const Step& step : steps_[number]) {
      stage_forward<T, kLanes>(stage(component, step, work, nullptr), from_units, to_units);
      from_units = to_units;
    }
  }

  void tile_backward(int64_t start, int64_t count, Workspace<T>& work, T* bias_gradient) const {
    const auto& groups = layout_.groups;
    work.depth = depth_of(count);
    if (wants_parameters_) {
      read_tile<S, T, kLanes>(call_.x, start, count, call_.in_features, plan_.n(), layout_.units, work.kept[0], work.buffer,
                              nullptr);
      for (size_t k = 0; k + 1 < groups.size(); ++k)
        for (const Component& component : groups[k].components)
          group_forward(k, component, work.kept[k], work.kept[k + 1], work);
    }
    read_tile<S, T, kLanes>(call_.grad, start, count, call_.out_features, plan_.n(), layout_.units, work.gradient,
                            work.buffer, bias_gradient);
    if (!wants_rest_) return;
    for (size_t k = groups.size(); k-- > 0;)
      for (const Component& component : groups[k].components) group_backward(k, component, work);
    if (call_.grad_x.data)
      write_tile<S, T, kLanes>(work.gradient, plan_.n(), layout_.units, nullptr, call_.grad_x, start, count,
                               call_.in_features, work.buffer);
  }

  // Computes the inputs of the group's stages again, in the L1 cache, and walks back.
  void group_backward(size_t number, const Component& component, Workspace<T>& work) const {
    const std::vector<Step>& steps = steps_[number];
    Vector<T>**gradient = work.units.data(), **inputs = gradient + layout_.largest;
    locate(component, work.gradient, gradient);
    if (!wants_parameters_) {
      for (size_t k = steps.size(); k-- > 0;)
        stage_backward<T, kLanes, false>(stage(component, steps[k], work, nullptr), nullptr, gradient);
      return;
    }
    locate(component, work.kept[number], inputs);
    for (size_t k = 0; k + 1 < steps.size(); ++k, inputs += layout_.largest)
      stage_forward<T, kLanes>(stage(component, steps[k], work, nullptr), inputs, inputs + layout_.largest);
    for (size_t k = steps.size(); k-- > 0; inputs -= layout_.largest)
      stage_backward<T, kLanes, true>(stage(component, steps[k], work, work.coeff_gradients), inputs, gradient);
  }

  const Call& call_;
  const Plan& plan_;
  const int32_t depth_;
  const Layout& layout_;
  const Packer<T> packer_;
  const bool backward_;
  bool wants_parameters_, wants_rest_;
  int64_t rows_per_tile_, tiles_;
  int32_t threads_;
  T* coeffs_;
  int32_t* offset_;
  std::vector<Workspace<T>> workspaces_;
  std::vector<std::vector<Step>> steps_;  // of every group
};

template <class S, class T, int kLanes = Simd<T>::width>
void run_with_lanes(const Call& call, bool backward, int32_t lanes) {
  if (lanes == kLanes) {
    Run<S, T, kLanes> run(call, backward);
    backward ? run.backward() : run.forward();
  } else if constexpr (kLanes > 1) {
    run_with_lanes<S, T, kLanes / 2>(call, backward, lanes);
  }
}

template <class S, class T>
void run(const Call& call, bool backward) {
  run_with_lanes<S, T>(call, backward, call.plan->lanes(Simd<T>::width));
}

void dispatch(const Call& call, bool backward) {
  switch (call.dtype) {
    case Dtype::float32: return run<float, float>(call, backward);
    case Dtype::float64: return run<double, double>(call, backward);
    case Dtype::bfloat16: return run<BFloat16, float>(call, backward);
    case Dtype::float16: return run<Float16, float>(call, backward);
  }
}

void forward(const Call& call) { dispatch(call, false); }
void backward(const Call& call) { dispatch(call, true); }

}  // namespace

#define PAIRMIX_STRING(name) #name
#define PAIRMIX_KERNELS(target) \
  const Kernels kernels_##target = {PAIRMIX_STRING(target), forward, backward, multiply_adds_per_second};
#define PAIRMIX_EXPANDED(target) PAIRMIX_KERNELS(target)
PAIRMIX_EXPANDED(PAIRMIX_TARGET)

}  // namespace pairmix
