// Vectors of the build's width, on the compiler's vector extensions.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace pairmix {
namespace {

constexpr int kVectorBytes = PAIRMIX_VECTOR_BYTES;

template <class T>
struct Simd {
  static constexpr int width = kVectorBytes / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vector = typename Simd<T>::Vector;

template <class T>
inline Vector<T> load(const T* from) {
  Vector<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
inline void store(T* to, Vector<T> v) {
  std::memcpy(to, &v, sizeof v);
}

// kLanes neighbouring numbers, which are less than a vector of the build's width if fewer coordinates share one.
template <class T, int kLanes>
struct Lanes {
  typedef T Numbers __attribute__((vector_size(kLanes * sizeof(T))));

  static Numbers load(const T* from) {
    Numbers numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
  }
  static void store(T* to, Numbers numbers) { std::memcpy(to, &numbers, sizeof numbers); }
};

template <class V, size_t... I, class F>
inline V shuffled(V v, std::index_sequence<I...>, F) {
  return __builtin_shufflevector(v, v, F::from(I)...);
}

template <int kDistance>
struct Exchanged {
  static constexpr int from(int lane) { return lane ^ kDistance; }
};

template <int kLanes>
struct Repeated {
  static constexpr int from(int lane) { return lane % kLanes; }
};

// Lane k gets what was in lane k ^ kDistance.
template <int kDistance, class T>
inline Vector<T> exchange(Vector<T> v) {
  return shuffled(v, std::make_index_sequence<Simd<T>::width>{}, Exchanged<kDistance>{});
}

// kLanes numbers, repeated over the whole vector.
template <int kLanes, class T>
inline Vector<T> spread(const T* from) {
  if constexpr (kLanes == Simd<T>::width) {
    return load(from);
  } else if constexpr (kLanes == 1) {
    return *from - Vector<T>{};
  } else {
    Vector<T> v{};
    std::memcpy(&v, from, kLanes * sizeof(T));
    return shuffled(v, std::make_index_sequence<Simd<T>::width>{}, Repeated<kLanes>{});
  }
}

// Add the vector to kLanes numbers, its repetitions summed up.
template <int kLanes, int kWidth, class T>
inline void add_folded(T* to, Vector<T> v) {
  if constexpr (kWidth > kLanes) {
    v += exchange<kWidth / 2, T>(v);
    add_folded<kLanes, kWidth / 2, T>(to, v);
  } else if constexpr (kLanes == Simd<T>::width) {
    store(to, load(to) + v);
  } else {
    for (int k = 0; k < kLanes; ++k) to[k] += v[k];
  }
}

template <int kLanes, class T>
inline void add_folded(T* to, Vector<T> v) {
  add_folded<kLanes, Simd<T>::width, T>(to, v);
}

}  // namespace
}  // namespace pairmix
