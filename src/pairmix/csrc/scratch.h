// Memory for the time of a call.
#pragma once

#include <cstdint>

#include "memory.h"

namespace pairmix {
namespace {

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

// Memory for what `lay_out(parts)` takes: the first time it is only counted, the second time handed out.
template <class LayOut>
void lay_out_in(Arena& arena, LayOut lay_out) {
  Parts count(nullptr);
  lay_out(count);
  Parts parts(arena.at_least(count.used()));
  lay_out(parts);
}

}  // namespace
}  // namespace pairmix
