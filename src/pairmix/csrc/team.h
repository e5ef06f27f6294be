// The threads of a call: who does which share of the work.
#pragma once

#include <omp.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace pairmix {
namespace {

// The part of some work that a member of a team does.
struct Share {
  int64_t member = 0, team = 1;

  int64_t begin(int64_t count) const { return count * member / team; }
  int64_t end(int64_t count) const { return count * (member + 1) / team; }
};

// How a thread rounds, and whether it takes subnormal numbers for zero: `torch.set_flush_denormal` sets it for the thread that
// calls it, and those that help with a call take it over for that time.
class NumberMode {
 public:
#if defined(__SSE__)
  class TakenOver {
   public:
    explicit TakenOver(const NumberMode& mode) { _mm_setcsr(mode.state_); }
    ~TakenOver() { _mm_setcsr(before_); }

   private:
    const unsigned before_ = _mm_getcsr();
  };

 private:
  const unsigned state_ = _mm_getcsr();
#else
  struct TakenOver {
    explicit TakenOver(const NumberMode&) {}
  };
#endif
};

// Whether the other threads come when they are called. On a busy machine one may wait for its core as long as many calls
// take, and all wait for it: then the caller is faster alone, and calls them again after a while. The longer, the more often
// they were late.
class Attendance {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  static Time now() { return std::chrono::steady_clock::now(); }

  bool is_poor() const { return now().time_since_epoch().count() < alone_until_.load(std::memory_order_relaxed); }

  // After a call for which the caller worked, and then waited for the others.
  void note(Duration worked, Duration waited) {
    const int64_t before = pause_.load(std::memory_order_relaxed);
    const bool late = waited > worked + std::chrono::microseconds(500);
    const int64_t pause = late ? std::min(2 * before, kLongest) : std::max(before - before / 32, kShortest);
    pause_.store(pause, std::memory_order_relaxed);
    if (late) alone_until_.store((now().time_since_epoch()).count() + pause, std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kShortest = Duration(std::chrono::milliseconds(10)).count();
  static constexpr int64_t kLongest = Duration(std::chrono::milliseconds(500)).count();
  std::atomic<int64_t> pause_{kShortest}, alone_until_{0};
};

inline Attendance& attendance() {
  static Attendance of_this_process;
  return of_this_process;
}

// Calls f(share, thread) for every share of some work. Each thread begins with its own ones, and then takes what nobody has
// begun. What a share consists of is always the same, whoever does it.
template <class F>
void in_shares(int32_t threads, int32_t shares, F f) {
  if (threads == 1 || attendance().is_poor()) {
    for (int32_t member = 0; member < shares; ++member) f(Share{member, shares}, 0);
    return;
  }
  std::vector<std::atomic<bool>> begun(shares);
  const auto start = Attendance::now();
  auto end_of_work = start;
  const NumberMode mode;
#pragma omp parallel num_threads(threads)
  {
    const NumberMode::TakenOver here(mode);
    const int32_t me = omp_get_thread_num(), first = shares * me / omp_get_num_threads();
    for (int32_t k = 0; k < shares; ++k) {
      const int32_t member = (first + k) % shares;
      if (!begun[member].exchange(true)) f(Share{member, shares}, me);
    }
    if (me == 0) end_of_work = Attendance::now();
  }
  attendance().note(end_of_work - start, Attendance::now() - end_of_work);
}

// One share for each thread, if all of them come.
template <class F>
void in_shares(int32_t threads, F f) {
  in_shares(threads, threads, [&](const Share& mine, int32_t) { f(mine); });
}

}  // namespace
}  // namespace pairmix
