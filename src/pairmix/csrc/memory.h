// Memory that is kept from call to call, and what calls that run at the same time share.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace pairmix {

// Guards everything that calls share: kept memory, and the layouts of plans. There is one for all of it, because a fork has to
// take it: a lock that another thread held at that moment would stay locked in the child for ever.
extern std::mutex shared_state;

// The threads that a call may use, of those that it is asked to use. OpenMP's threads do not survive a fork, and it would wait
// for them, so that the child of a fork has one.
int32_t usable_threads(int32_t wanted);

// Let the C library give back to the system what was freed.
void return_freed_memory();

// Memory for results. Large blocks are kept when a tensor dies: a fresh block of a few megabytes costs a page fault for every
// 4 KiB, which takes as long as the kernel itself, and allocators return such blocks to the system again and again.
class Pool {
 public:
  void* take(int64_t bytes);
  void give_back(void* memory, int64_t bytes);
  void clear();

 private:
  struct Free {
    void* memory;
    int64_t bytes;
  };
  static constexpr int64_t kLarge = 128 << 10;
  static constexpr int64_t kMostKept = int64_t{256} << 20;
  std::vector<Free> free_;
  int64_t kept_ = 0;
};

// That of the results of all calls.
Pool& results_pool();

// Working memory for the time of a call. The blocks of calls that have ended are kept for the next ones.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena();

  // Throws away what was in it.
  char* at_least(int64_t bytes);

  static void free_idle();

 private:
  struct Block {
    char* memory = nullptr;
    int64_t bytes = 0;
  };
  static std::vector<Block>& idle();
  Block block_;
};

}  // namespace pairmix
