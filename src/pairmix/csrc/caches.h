// The caches of a core, for which tiles are made.
#pragma once

#include <cstdint>

namespace pairmix {

struct Caches {
  int64_t l1_bytes, l2_bytes;
};

// This machine's, unless others are in use.
Caches caches();

// Make tiles as for a machine with these caches, which is how their shares are measured.
void use_caches(const Caches& caches);

}  // namespace pairmix
