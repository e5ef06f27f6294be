// Calls the kernels from many threads at once, for ThreadSanitizer to watch. The calls share a plan that none of them has
// used before, and the pool of results; every call must give what a call alone gave.
//
//     threads [threads that each call splits its rows over]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kernel.h"
#include "memory.h"

using namespace pairmix;

namespace {

constexpr int kCallers = 4, kRounds = 3;

std::vector<int32_t> butterfly(int32_t n, int32_t stages) {  // n: a power of two
  std::vector<int32_t> order;
  for (int32_t l = 0; l < stages; ++l) {
    const int32_t stride = 1 << l % (31 - __builtin_clz(n));
    for (const int32_t bit : {0, stride})
      for (int32_t i = 0; i < n; ++i)
        if ((i & stride) == bit) order.push_back(i);
  }
  return order;
}

std::vector<int32_t> random_matchings(int32_t n, int32_t stages) {
  std::mt19937 generator(0);
  std::vector<int32_t> order, stage(n);
  std::iota(stage.begin(), stage.end(), 0);
  for (int32_t l = 0; l < stages; ++l) {
    std::shuffle(stage.begin(), stage.end(), generator);
    order.insert(order.end(), stage.begin(), stage.end());
  }
  return order;
}

std::vector<float> random_numbers(int64_t count) {
  std::mt19937 generator(static_cast<uint32_t>(count));
  std::normal_distribution<float> normal(0.0f, 0.7f);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

struct Layer {
  int32_t n, stages;
  int64_t rows;
  bool rotation;
  std::vector<int32_t> order;
  std::vector<float> x = random_numbers(rows * n), grad = random_numbers(rows * n + 1);
  std::vector<float> blocks = random_numbers(int64_t{stages} * (rotation ? 1 : 4) * (n / 2));
  std::vector<float> d_in = random_numbers(n), d_out = random_numbers(n + 1), bias = random_numbers(n + 2);
  std::vector<float> scale = random_numbers(stages);
};

Pool pool;

// The output and all gradients, one after the other.
std::vector<float> step(const Layer& layer, const Plan& plan, int32_t threads) {
  const auto in = [](const std::vector<float>& numbers) { return const_cast<float*>(numbers.data()); };
  const int64_t cells = layer.rows * layer.n, blocks = static_cast<int64_t>(layer.blocks.size());
  const int64_t count = 2 * cells + blocks + 3 * layer.n + layer.stages, bytes = count * int64_t{sizeof(float)};
  float* const y = static_cast<float*>(pool.take(bytes));
  std::memset(y, 0, bytes);
  float *const grad_x = y + cells, *const grad_blocks = grad_x + cells, *const grad_rest = grad_blocks + blocks;

  Call call{};
  call.plan = &plan, call.dtype = Dtype::float32, call.rotation = layer.rotation, call.rows = layer.rows;
  call.in_features = call.out_features = layer.n, call.threads = threads;
  call.x = {in(layer.x), layer.n, 1}, call.y = {y, layer.n, 1};
  call.grad = {in(layer.grad), layer.n, 1}, call.grad_x = {grad_x, layer.n, 1};
  void* const residual_scale = layer.n % 2 ? in(layer.scale) : nullptr;
  call.parameters = {in(layer.blocks), in(layer.d_in), in(layer.d_out), in(layer.bias), residual_scale};
  kernels_baseline.forward(call);
  call.gradients = {grad_blocks, grad_rest, grad_rest + layer.n, grad_rest + 2 * layer.n,
                    residual_scale ? grad_rest + 3 * layer.n : nullptr};
  kernels_baseline.backward(call);

  const std::vector<float> results(y, y + count);
  pool.give_back(y, bytes);
  return results;
}

// The states of a GRU whose three maps are the layer, over sequences of unequal length, and the gradients through time.
std::vector<float> sequence(const Layer& layer, const Plan& plan, int32_t threads) {
  const auto in = [](const std::vector<float>& numbers) { return const_cast<float*>(numbers.data()); };
  const int64_t batch = layer.rows, rows = 2 * batch + (batch + 1) / 2, cells = rows * layer.n;
  const std::vector<float> gates = random_numbers(3 * cells), grad_h = random_numbers(cells);
  std::vector<float> saved(3 * cells), results(cells + 3 * cells + batch * layer.n);

  Recurrence it{};
  it.plan = &plan, it.dtype = Dtype::float32, it.rotation = layer.rotation, it.cell = Cell::gru, it.threads = threads;
  it.batch_sizes = {batch, batch, (batch + 1) / 2};
  for (Parameters& map : it.maps)
    map = {in(layer.blocks), in(layer.d_in), in(layer.d_out), nullptr, layer.n % 2 ? in(layer.scale) : nullptr};
  it.h0 = in(layer.x), it.gates = in(gates), it.grad_h = in(grad_h);
  it.h = results.data(), it.saved = saved.data();
  it.grad_gates = results.data() + cells, it.grad_h0 = results.data() + 4 * cells;
  kernels_baseline.recurrence_forward(it);
  kernels_baseline.recurrence_backward(it);
  return results;
}

bool is_same_from_many_threads(const Layer& layer, int32_t threads) {
  const Plan alone(layer.order.data(), layer.stages, layer.n), shared(layer.order.data(), layer.stages, layer.n);
  const std::vector<float> expected = step(layer, alone, threads), of_sequence = sequence(layer, alone, threads);
  std::vector<char> same(kCallers, true);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < kRounds; ++round)
        if (step(layer, shared, threads) != expected || sequence(layer, shared, threads) != of_sequence)
          same[caller] = false;
    });
  for (std::thread& caller : callers) caller.join();
  return std::accumulate(same.begin(), same.end(), 0) == kCallers;
}

}  // namespace

int main(int argc, char** argv) {
  const int32_t threads = argc > 1 ? std::atoi(argv[1]) : 1;
  int different = 0, layers = 0;
  for (const bool rotation : {false, true})
    for (const int64_t rows : {1, 7, 200}) {
      // A few rows are so wide that threads share them.
      const int32_t wide = rows < 16 ? 16384 : 64, odd = rows == 1 ? 1999 : 61, stages = 11;
      for (const Layer& layer : {Layer{wide, stages, rows, rotation, butterfly(wide, stages)},
                                 Layer{odd, stages, rows, rotation, random_matchings(odd, stages)}}) {
        ++layers;
        if (is_same_from_many_threads(layer, threads)) continue;
        ++different;
        std::printf("%s, n=%d, rows=%d: not what a call alone gives\n", rotation ? "rotation" : "general", layer.n,
                    static_cast<int>(rows));
      }
    }
  std::printf("%d layers, %d callers, %d threads a call: %d different\n", layers, kCallers, threads, different);
  return different != 0;
}
