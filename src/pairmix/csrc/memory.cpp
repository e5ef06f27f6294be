#include "memory.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace pairmix {
namespace {

constexpr int64_t kPage = 4096, kLine = 64;

std::atomic<bool> is_forked{false};

const int fork_handlers = pthread_atfork([] { shared_state.lock(); }, [] { shared_state.unlock(); },
                                         [] {
                                           shared_state.unlock();
                                           is_forked = true;
                                         });

void* allocate(int64_t bytes, int64_t alignment) {
  const int64_t rounded = (bytes / alignment + 1) * alignment;
  void* memory = rounded > 0 ? std::aligned_alloc(alignment, rounded) : nullptr;
  if (!memory) throw std::runtime_error("out of memory: cannot allocate " + std::to_string(bytes) + " bytes");
  return memory;
}

}  // namespace

std::mutex shared_state;

void return_freed_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

int32_t usable_threads(int32_t wanted) { return is_forked ? 1 : std::max(wanted, 1); }

void* Pool::take(int64_t bytes) {
  if (bytes < kLarge) return allocate(bytes, kLine);
  {
    const std::lock_guard<std::mutex> lock(shared_state);
    for (size_t k = free_.size(); k-- > 0;)
      if (free_[k].bytes == bytes) {
        void* memory = free_[k].memory;
        free_.erase(free_.begin() + static_cast<int64_t>(k));
        kept_ -= bytes;
        return memory;
      }
  }
  return allocate(bytes, kPage);
}

void Pool::give_back(void* memory, int64_t bytes) {
  if (bytes < kLarge) return std::free(memory);
  const std::lock_guard<std::mutex> lock(shared_state);
  free_.push_back({memory, bytes});
  kept_ += bytes;
  while (kept_ > kMostKept) {  // the oldest go first
    std::free(free_.front().memory);
    kept_ -= free_.front().bytes;
    free_.erase(free_.begin());
  }
}

void Pool::clear() {
  const std::lock_guard<std::mutex> lock(shared_state);
  for (const Free& block : free_) std::free(block.memory);
  free_.clear();
  kept_ = 0;
}

Pool& results_pool() {
  static auto* pool = new Pool;  // never destroyed: tensors give their memory back until the very end
  return *pool;
}

std::vector<Arena::Block>& Arena::idle() {
  static auto* blocks = new std::vector<Block>;  // never destroyed: calls may outlive static objects
  return *blocks;
}

Arena::~Arena() {
  if (!block_.memory) return;
  const std::lock_guard<std::mutex> lock(shared_state);
  idle().push_back(block_);
}

char* Arena::at_least(int64_t bytes) {
  if (!block_.memory) {
    const std::lock_guard<std::mutex> lock(shared_state);
    if (!idle().empty()) {
      block_ = idle().back();
      idle().pop_back();
    }
  }
  if (bytes > block_.bytes) {
    std::free(block_.memory);
    block_ = {};
    block_ = {static_cast<char*>(allocate(bytes, kPage)), bytes};
  }
  return block_.memory;
}

void Arena::free_idle() {
  const std::lock_guard<std::mutex> lock(shared_state);
  for (const Block& block : idle()) std::free(block.memory);
  idle().clear();
}

}  // namespace pairmix
