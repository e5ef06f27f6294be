// Vectors of the build's width, on the compiler's vector extensions.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// The bits of float32 numbers.
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

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

#if defined(__AVX2__) && !defined(__AVX512BW__)
// The first words of a vector are chosen.
inline __m256i first_words(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first `bytes` of a vector V, at least one, and zeros.
template <class V>
inline V load_part(const void* from, int bytes) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - bytes), from);
  if constexpr (sizeof(V) == 32) return (V)_mm256_maskz_loadu_epi8(~uint32_t{0} >> (32 - bytes), from);
#elif defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_maskload_epi32(static_cast<const int*>(from), first_words(bytes / 4));
#endif
  V v{};
  std::memcpy(&v, from, bytes);
  return v;
}

template <class V>
inline void store_part(void* to, V v, int bytes) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64) return _mm512_mask_storeu_epi8(to, ~uint64_t{0} >> (64 - bytes), (__m512i)v);
  if constexpr (sizeof(V) == 32) return _mm256_mask_storeu_epi8(to, ~uint32_t{0} >> (32 - bytes), (__m256i)v);
#elif defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return _mm256_maskstore_epi32(static_cast<int*>(to), first_words(bytes / 4), (__m256i)v);
#endif
  std::memcpy(to, &v, bytes);
}

// A product that is rounded before it is added to anything. Of a x + b y the compiler makes a product and a multiply-add, and would
// choose here the one and there the other product: a row's results would depend on how many rows are computed with it.
template <class V>
[[gnu::always_inline]] inline V rounded(V product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
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

// Lane k gets what was in lane k ^ kDistance.
template <int kDistance, class T>
inline Vector<T> exchange(Vector<T> v) {
  return shuffled(v, std::make_index_sequence<Simd<T>::width>{}, Exchanged<kDistance>{});
}

// A part of a vector, a half or a quarter of it, repeated.
template <int kBytes>
inline Words spread_bytes(const void* from) {
#if PAIRMIX_VECTOR_BYTES == 64 && defined(__AVX512F__)
  if constexpr (kBytes == 32) return (Words)_mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
  if constexpr (kBytes == 16) return (Words)_mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif PAIRMIX_VECTOR_BYTES == 32 && defined(__AVX2__)
  return (Words)_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  Words words;
  for (int start = 0; start < kVectorBytes; start += kBytes) std::memcpy(reinterpret_cast<char*>(&words) + start, from, kBytes);
  return words;
#endif
}

// kLanes numbers, repeated over the whole vector. What the compiler finds for less than a vector goes through memory, and waits for
// it.
template <int kLanes, class T>
inline Vector<T> spread(const T* from) {
  constexpr int bytes = kLanes * sizeof(T);
  if constexpr (kLanes == Simd<T>::width) {
    return load(from);
  } else if constexpr (kLanes == 1) {
    return *from - Vector<T>{};
  } else if constexpr (bytes == 8) {
    int64_t bits;
    std::memcpy(&bits, from, bytes);
    typedef int64_t Pairs __attribute__((vector_size(kVectorBytes)));
    return (Vector<T>)(bits - Pairs{});
  } else {
    return (Vector<T>)spread_bytes<bytes>(from);
  }
}

// The numbers of two vectors in chunks of kChunk; the first chunk and the second are added, the third and the fourth, ...
template <int kChunk>
struct AddedChunks {
  static constexpr int even(int lane) { return lane / kChunk * 2 * kChunk + lane % kChunk; }

  template <class V, size_t... I>
  static V apply(V a, V b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, even(I)...) + __builtin_shufflevector(a, b, (even(I) + kChunk)...);
  }
};

// Add to kNumbers numbers what is in parts of kPart numbers, each folded to kLanes.
template <int kLanes, int kPart, int kNumbers, class T, int kCount>
inline void add_parts(T* to, const Vector<T> (&v)[kCount]) {
  constexpr int width = Simd<T>::width;
  if constexpr (kPart > kLanes) {
    Vector<T> folded[(kCount + 1) / 2];
    for (int k = 0; k < kCount; k += 2)
      folded[k / 2] = AddedChunks<kPart / 2>::apply(v[k], v[k + (k + 1 < kCount)], std::make_index_sequence<width>{});
    add_parts<kLanes, kPart / 2, kNumbers, T>(to, folded);
  } else if constexpr (kNumbers >= width) {
    for (int k = 0; k < kNumbers / width; ++k) store(to + k * width, load(to + k * width) + v[k]);
  } else {
    using N = Lanes<T, kNumbers>;
    T numbers[width];
    store(numbers, v[0]);
    N::store(to, N::load(to) + N::load(numbers));
  }
}

// Add each of the vectors to kLanes numbers, its repetitions summed up.
template <int kLanes, class T, int kCount>
inline void add_folded(T* to, const Vector<T> (&v)[kCount]) {
  add_parts<kLanes, Simd<T>::width, kCount * kLanes, T>(to, v);
}

}  // namespace
}  // namespace pairmix
