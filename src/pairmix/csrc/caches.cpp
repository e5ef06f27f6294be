#include "caches.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

namespace pairmix {
namespace {

// Where the system does not know, as on many virtual machines, and where it names a cache that several cores share, a size
// that most machines have or exceed.
Caches of_this_machine() {
  long l1 = 0, l2 = 0;
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  l1 = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return {l1 > 0 ? std::clamp<int64_t>(l1, 16 << 10, 64 << 10) : 32 << 10,
          l2 > 0 ? std::clamp<int64_t>(l2, 256 << 10, 2 << 20) : 512 << 10};
}

std::atomic<int64_t> l1_bytes = of_this_machine().l1_bytes, l2_bytes = of_this_machine().l2_bytes;

}  // namespace

Caches caches() { return {l1_bytes.load(std::memory_order_relaxed), l2_bytes.load(std::memory_order_relaxed)}; }

void use_caches(const Caches& caches) {
  constexpr int64_t smallest = 4 << 10;  // holds a few vectors of every stage
  if (std::min(caches.l1_bytes, caches.l2_bytes) < smallest)
    throw std::invalid_argument("caches have at least " + std::to_string(smallest) + " bytes, got " +
                                std::to_string(caches.l1_bytes) + " and " + std::to_string(caches.l2_bytes));
  l1_bytes = caches.l1_bytes, l2_bytes = caches.l2_bytes;
}

}  // namespace pairmix
