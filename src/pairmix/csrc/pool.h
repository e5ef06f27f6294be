// Memory for results. Large blocks are kept when a tensor dies: a fresh block of a few megabytes costs a page fault for every
// 4 KiB, which takes as long as the kernel itself, and allocators return such blocks to the system again and again.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace pairmix {

class Pool {
 public:
  void* take(int64_t bytes) {
    if (bytes >= kLarge) {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t k = free_.size(); k-- > 0;)
        if (free_[k].bytes == bytes) {
          void* memory = free_[k].memory;
          free_.erase(free_.begin() + static_cast<int64_t>(k));
          kept_ -= bytes;
          return memory;
        }
    }
    void* memory = bytes < kLarge ? std::aligned_alloc(64, static_cast<size_t>(bytes / 64 + 1) * 64)
                                  : std::aligned_alloc(4096, static_cast<size_t>((bytes + 4095) / 4096 * 4096));
    if (!memory) throw std::bad_alloc();
    return memory;
  }

  void give_back(void* memory, int64_t bytes) {
    if (bytes < kLarge) return std::free(memory);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back({memory, bytes});
    kept_ += bytes;
    while (kept_ > kMostKept) {  // the oldest go first
      std::free(free_.front().memory);
      kept_ -= free_.front().bytes;
      free_.erase(free_.begin());
    }
  }

 private:
  struct Free {
    void* memory;
    int64_t bytes;
  };
  static constexpr int64_t kLarge = 128 << 10;
  static constexpr int64_t kMostKept = int64_t{256} << 20;
  std::mutex mutex_;
  std::vector<Free> free_;
  int64_t kept_ = 0;
};

}  // namespace pairmix
