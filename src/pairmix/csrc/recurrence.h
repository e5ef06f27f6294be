// Recurrent networks: all steps of a sequence in one call.
//
// Rows are independent of each other, so every thread takes some sequences through all their steps, without waiting for the
// others. The maps of the state are prepared once. Backward walks the steps in the opposite direction and leaves the
// gradients of what was added up before the nonlinearities; those of the maps' parameters follow from them for all steps at
// once, outside.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "activations.h"
#include "kernel.h"
#include "run.h"
#include "scratch.h"
#include "simd.h"
#include "team.h"

namespace pairmix {
namespace {

// Neighbouring numbers at `at`: a whole vector of them, or what is left of a row.
template <class T>
struct WholePart {
  int64_t at;

  Vector<T> load(const T* row) const { return pairmix::load(row + at); }
  void store(T* row, Vector<T> v) const { pairmix::store(row + at, v); }
};
template <class T>
struct RestPart {
  int64_t at, count;

  Vector<T> load(const T* row) const {
    T numbers[Simd<T>::width] = {};
    std::copy_n(row + at, count, numbers);
    return pairmix::load(numbers);
  }
  void store(T* row, Vector<T> v) const {
    T numbers[Simd<T>::width];
    pairmix::store(numbers, v);
    std::copy_n(numbers, count, row + at);
  }
};

template <class T, class F>
inline void in_parts(int64_t size, F f) {
  constexpr int64_t width = Simd<T>::width;
  int64_t at = 0;
  for (; at + width <= size; at += width) f(WholePart<T>{at});
  if (at < size) f(RestPart<T>{at, size - at});
}

template <class T, int kLanes>
class RecurrentRun {
 public:
  RecurrentRun(const Recurrence& recurrence, bool backward)
      : it_(recurrence),
        n_(recurrence.plan->n()),
        gates_(gates_of(recurrence.cell)),
        saved_(saved_of(recurrence.cell)),
        batch_(recurrence.batch_sizes.empty() ? 0 : recurrence.batch_sizes[0]) {
    Call call{};
    call.plan = it_.plan, call.dtype = it_.dtype, call.rotation = it_.rotation;
    call.rows = batch_, call.steps = std::max<int64_t>(it_.batch_sizes.size(), 2);  // threads never share a row
    call.in_features = call.out_features = static_cast<int32_t>(n_);
    call.threads = it_.threads;
    call.x = call.y = call.grad = call.grad_x = {it_.h0, n_, 1};  // the real ones are told step by step
    if (!backward) call.grad_x.data = nullptr;
    for (int64_t g = 0; g < gates_; ++g) {
      call.parameters = it_.maps[g];
      calls_[g] = call;
      maps_[g] = std::make_unique<Run<T, T, kLanes>>(calls_[g], backward);
      if (maps_[g]->is_exact()) continue;
      calls_[g].plan = &it_.plan->with_scales_apart();
      maps_[g] = std::make_unique<Run<T, T, kLanes>>(calls_[g], backward);
    }
    lay_out_in(arena_, [&](Parts& parts) { scratch_ = parts.take<T>(batch_ * n_); });
    for (const int64_t size : it_.batch_sizes) start_.push_back(start_.empty() ? 0 : start_.back() + last_), last_ = size;
  }

  void forward() {
    in_shares(maps_[0]->threads(), [this](const Share& share) {
      const Sequences mine = sequences_of(share);
      for (size_t t = 0; t < start_.size(); ++t) step_forward(rows_of(t, mine));
    });
  }

  void backward() {
    in_shares(maps_[0]->threads(), [this](const Share& share) {
      const Sequences mine = sequences_of(share);
      T* of_states[] = {static_cast<T*>(it_.grad_h0), static_cast<T*>(it_.grad_c0)};
      for (T* grad : of_states)
        if (grad) std::fill(grad + mine.begin * n_, grad + mine.end * n_, T(0));
      for (size_t t = start_.size(); t-- > 0;) step_backward(rows_of(t, mine));
    });
  }

 private:
  struct Sequences {
    int32_t thread;
    int64_t begin, end;
  };

  // The rows of one step that a thread has: pointers to the first one.
  struct StepRows {
    int32_t thread;
    int64_t count;
    T *h_before, *c_before, *gates, *h, *c, *saved;
    T *grad_h, *grad_c, *grad_gates, *grad_mixed;
    T *carried_h, *carried_c;  // backward: the gradients of the states, on their way to the first step
    T* scratch;                // [count, n]: r * h of a GRU, or its gradient
  };

  Sequences sequences_of(const Share& share) const {
    constexpr int64_t together = Simd<T>::width / kLanes;  // sequences that share a vector stay together
    const int64_t blocks = (batch_ + together - 1) / together;
    return {static_cast<int32_t>(share.member), share.begin(blocks) * together,
            std::min(batch_, share.end(blocks) * together)};
  }

  StepRows rows_of(size_t t, const Sequences& mine) const {
    const int64_t row = start_[t] + mine.begin, before = t ? start_[t - 1] + mine.begin : mine.begin;
    const auto at = [](void* data, int64_t place) { return data ? static_cast<T*>(data) + place : nullptr; };
    return {mine.thread,
            std::max<int64_t>(0, std::min(mine.end, it_.batch_sizes[t]) - mine.begin),
            at(t ? it_.h : it_.h0, before * n_),
            at(t ? it_.c : it_.c0, before * n_),
            at(it_.gates, row * gates_ * n_),
            at(it_.h, row * n_),
            at(it_.c, row * n_),
            at(it_.saved, row * saved_ * n_),
            at(it_.grad_h, row * n_),
            at(it_.grad_c, row * n_),
            at(it_.grad_gates, row * gates_ * n_),
            at(it_.grad_mixed, row * gates_ * n_),
            at(it_.grad_h0, mine.begin * n_),
            at(it_.grad_c0, mine.begin * n_),
            scratch_ + mine.begin * n_};
  }

  // The maps first ... last - 1 of x, to columns of n numbers each.
  void mix(const StepRows& rows, int first, int last, T* x, T* y, int64_t row_stride) {
    for (int g = first; g < last; ++g)
      maps_[g]->forward(rows.thread, {x, n_, 1}, {y + (g - first) * n_, row_stride, 1}, rows.count);
  }
  // The gradients of x from those of the outputs, added up.
  void mix_back(const StepRows& rows, int first, int last, T* grad, T* grad_x, bool adds) {
    for (int g = first; g < last; ++g)
      maps_[g]->backward(rows.thread, {grad + g * n_, gates_ * n_, 1}, {grad_x, n_, 1, adds || g > first}, rows.count);
  }

  // Calls f(row, part) for all rows of the step.
  template <class F>
  void each(const StepRows& rows, F f) const {
    for (int64_t row = 0; row < rows.count; ++row) in_parts<T>(n_, [&](auto part) { f(row, part); });
  }
  // Gate g of a row.
  T* gate(T* of, int64_t row, int g) const { return of + (row * gates_ + g) * n_; }
  T* saved(const StepRows& rows, int64_t row, int g) const { return rows.saved + (row * saved_ + g) * n_; }

  void step_forward(const StepRows& rows) {
    switch (it_.cell) {
      case Cell::tanh: return simple_forward(rows, [](Vector<T> a) { return tanh<T>(a); });
      case Cell::relu: return simple_forward(rows, [](Vector<T> a) { return a < T(0) ? Vector<T>{} : a; });
      case Cell::linear: return simple_forward(rows, [](Vector<T> a) { return a; });
      case Cell::gru: return gru_forward(rows);
      case Cell::gru_reset_after: return gru_reset_after_forward(rows);
      case Cell::lstm: return lstm_forward(rows);
    }
  }

  void step_backward(const StepRows& rows) {
    switch (it_.cell) {
      case Cell::tanh: return simple_backward(rows, [](Vector<T> h) { return 1 - h * h; });
      case Cell::relu: return simple_backward(rows, [](Vector<T> h) { return h > T(0) ? 1 + Vector<T>{} : Vector<T>{}; });
      case Cell::linear: return simple_backward(rows, [](Vector<T>) { return 1 + Vector<T>{}; });
      case Cell::gru: return gru_backward(rows);
      case Cell::gru_reset_after: return gru_reset_after_backward(rows);
      case Cell::lstm: return lstm_backward(rows);
    }
  }

  // The gradient of h after this step: what comes from outside and what comes from the next step.
  template <class P>
  Vector<T> grad_of_h(const StepRows& rows, int64_t row, const P& part) const {
    const Vector<T> carried = part.load(rows.carried_h + row * n_);
    return rows.grad_h ? carried + part.load(rows.grad_h + row * n_) : carried;
  }

  template <class F>
  void simple_forward(const StepRows& rows, F activation) {
    mix(rows, 0, 1, rows.h_before, rows.h, n_);
    each(rows, [&](int64_t row, auto part) {
      T* h = rows.h + row * n_;
      part.store(h, activation(part.load(rows.gates + row * n_) + part.load(h)));
    });
  }
  template <class F>
  void simple_backward(const StepRows& rows, F derivative) {
    each(rows, [&](int64_t row, auto part) {
      part.store(rows.grad_gates + row * n_, grad_of_h(rows, row, part) * derivative(part.load(rows.h + row * n_)));
    });
    mix_back(rows, 0, 1, rows.grad_gates, rows.carried_h, false);
  }

  void gru_forward(const StepRows& rows) {
    mix(rows, 0, 2, rows.h_before, rows.saved, saved_ * n_);
    each(rows, [&](int64_t row, auto part) {
      for (int g = 0; g < 2; ++g)
        part.store(saved(rows, row, g),
                   sigmoid<T>(part.load(gate(rows.gates, row, g)) + part.load(saved(rows, row, g))));
      part.store(rows.scratch + row * n_, part.load(saved(rows, row, 0)) * part.load(rows.h_before + row * n_));
    });
    mix(rows, 2, 3, rows.scratch, rows.saved + 2 * n_, saved_ * n_);
    each(rows, [&](int64_t row, auto part) {
      const auto z = part.load(saved(rows, row, 1)), before = part.load(rows.h_before + row * n_);
      const auto candidate = tanh<T>(part.load(gate(rows.gates, row, 2)) + part.load(saved(rows, row, 2)));
      part.store(saved(rows, row, 2), candidate);
      part.store(rows.h + row * n_, (1 - z) * before + z * candidate);
    });
  }
  void gru_backward(const StepRows& rows) {
    each(rows, [&](int64_t row, auto part) {
      const auto z = part.load(saved(rows, row, 1)), candidate = part.load(saved(rows, row, 2));
      const auto grad = grad_of_h(rows, row, part);
      part.store(gate(rows.grad_gates, row, 1), grad * (candidate - part.load(rows.h_before + row * n_)) * z * (1 - z));
      part.store(gate(rows.grad_gates, row, 2), grad * z * (1 - candidate * candidate));
      part.store(rows.carried_h + row * n_, grad * (1 - z));
    });
    mix_back(rows, 2, 3, rows.grad_gates, rows.scratch, false);  // the gradient of r * h
    each(rows, [&](int64_t row, auto part) {
      const auto r = part.load(saved(rows, row, 0)), grad = part.load(rows.scratch + row * n_);
      part.store(gate(rows.grad_gates, row, 0), grad * part.load(rows.h_before + row * n_) * r * (1 - r));
      part.store(rows.carried_h + row * n_, part.load(rows.carried_h + row * n_) + grad * r);
    });
    mix_back(rows, 0, 2, rows.grad_gates, rows.carried_h, true);
  }

  void gru_reset_after_forward(const StepRows& rows) {
    mix(rows, 0, 2, rows.h_before, rows.saved, saved_ * n_);
    mix(rows, 2, 3, rows.h_before, rows.saved + 3 * n_, saved_ * n_);
    each(rows, [&](int64_t row, auto part) {
      for (int g = 0; g < 2; ++g)
        part.store(saved(rows, row, g),
                   sigmoid<T>(part.load(gate(rows.gates, row, g)) + part.load(saved(rows, row, g))));
      const auto r = part.load(saved(rows, row, 0)), z = part.load(saved(rows, row, 1));
      const auto candidate = tanh<T>(part.load(gate(rows.gates, row, 2)) + r * part.load(saved(rows, row, 3)));
      part.store(saved(rows, row, 2), candidate);
      part.store(rows.h + row * n_, (1 - z) * candidate + z * part.load(rows.h_before + row * n_));
    });
  }
  void gru_reset_after_backward(const StepRows& rows) {
    each(rows, [&](int64_t row, auto part) {
      const auto r = part.load(saved(rows, row, 0)), z = part.load(saved(rows, row, 1));
      const auto candidate = part.load(saved(rows, row, 2)), mixed = part.load(saved(rows, row, 3));
      const auto grad = grad_of_h(rows, row, part);
      const auto of_z = grad * (part.load(rows.h_before + row * n_) - candidate) * z * (1 - z);
      const auto of_candidate = grad * (1 - z) * (1 - candidate * candidate);
      const auto of_r = of_candidate * mixed * r * (1 - r);
      for (T* to : {rows.grad_gates, rows.grad_mixed}) part.store(gate(to, row, 0), of_r), part.store(gate(to, row, 1), of_z);
      part.store(gate(rows.grad_gates, row, 2), of_candidate);
      part.store(gate(rows.grad_mixed, row, 2), of_candidate * r);
      part.store(rows.carried_h + row * n_, grad * z);
    });
    mix_back(rows, 0, 3, rows.grad_mixed, rows.carried_h, true);
  }

  void lstm_forward(const StepRows& rows) {
    mix(rows, 0, 4, rows.h_before, rows.saved, saved_ * n_);
    each(rows, [&](int64_t row, auto part) {
      const auto sum = [&](int g) { return part.load(gate(rows.gates, row, g)) + part.load(saved(rows, row, g)); };
      const auto i = sigmoid<T>(sum(0)), f = sigmoid<T>(sum(1)), g = tanh<T>(sum(2)), o = sigmoid<T>(sum(3));
      const auto c = f * part.load(rows.c_before + row * n_) + i * g;
      part.store(saved(rows, row, 0), i), part.store(saved(rows, row, 1), f);
      part.store(saved(rows, row, 2), g), part.store(saved(rows, row, 3), o);
      part.store(rows.c + row * n_, c);
      part.store(rows.h + row * n_, o * tanh<T>(c));
    });
  }
  void lstm_backward(const StepRows& rows) {
    each(rows, [&](int64_t row, auto part) {
      const auto i = part.load(saved(rows, row, 0)), f = part.load(saved(rows, row, 1));
      const auto g = part.load(saved(rows, row, 2)), o = part.load(saved(rows, row, 3));
      const auto squashed = tanh<T>(part.load(rows.c + row * n_)), grad = grad_of_h(rows, row, part);
      auto of_c = part.load(rows.carried_c + row * n_) + grad * o * (1 - squashed * squashed);
      if (rows.grad_c) of_c += part.load(rows.grad_c + row * n_);
      part.store(gate(rows.grad_gates, row, 0), of_c * g * i * (1 - i));
      part.store(gate(rows.grad_gates, row, 1), of_c * part.load(rows.c_before + row * n_) * f * (1 - f));
      part.store(gate(rows.grad_gates, row, 2), of_c * i * (1 - g * g));
      part.store(gate(rows.grad_gates, row, 3), grad * squashed * o * (1 - o));
      part.store(rows.carried_c + row * n_, of_c * f);
    });
    mix_back(rows, 0, 4, rows.grad_gates, rows.carried_h, false);
  }

  Arena arena_;
  const Recurrence& it_;
  const int64_t n_, gates_, saved_, batch_;
  Call calls_[4];
  std::unique_ptr<Run<T, T, kLanes>> maps_[4];
  T* scratch_;
  std::vector<int64_t> start_;  // of every step, its first row
  int64_t last_ = 0;
};

}  // namespace
}  // namespace pairmix
