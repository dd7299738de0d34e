// Eight doubles at a time: GCC's vector extensions on any processor, with gathers and masks of AVX-512 where it has them.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#include <omp.h>
#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define WIDE 1
#endif

namespace {

constexpr int LANES = 8;
using V = double __attribute__((vector_size(64), aligned(64)));
using Mask = int64_t __attribute__((vector_size(64), aligned(64)));

inline V splat(double x) { return V{x, x, x, x, x, x, x, x}; }

inline V fma(V a, V b, V c) {  // a b + c
#ifdef WIDE
  return _mm512_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

inline V gather(const double* from, const int32_t* index) {
#ifdef WIDE
  return _mm512_i32gather_pd(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(index)), from, 8);
#else
  V x;
  for (int k = 0; k < LANES; ++k) x[k] = from[index[k]];
  return x;
#endif
}

inline void scatter_subtract(double* to, const int32_t* index, V amount) {  // indices differ
#ifdef WIDE
  const __m256i where = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index));
  _mm512_i32scatter_pd(to, where, _mm512_sub_pd(_mm512_i32gather_pd(where, to, 8), amount), 8);
#else
  for (int k = 0; k < LANES; ++k) to[index[k]] -= amount[k];
#endif
}

inline V where(Mask mask, V x) {  // x, or 0
#ifdef WIDE
  return _mm512_and_pd(x, (__m512d)mask);
#else
  return (V)((Mask)x & mask);
#endif
}

inline bool any(Mask m) {
#ifdef WIDE
  return _mm512_movepi64_mask((__m512i)m) != 0;
#else
  int64_t x = 0;
  for (int k = 0; k < LANES; ++k) x |= m[k];
  return x != 0;
#endif
}

inline double sum(V x) {
#ifdef WIDE
  return _mm512_reduce_add_pd(x);
#else
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#endif
}

inline V root(V x) {
#ifdef WIDE
  return _mm512_sqrt_pd(x);
#else
  for (int k = 0; k < LANES; ++k) x[k] = std::sqrt(x[k]);
  return x;
#endif
}

// Numbers that start at multiples of 64 bytes.
template <class T>
struct Aligned {
  std::vector<char> bytes;
  T* data = nullptr;
  void resize(size_t n) {
    if (bytes.size() < n * sizeof(T) + 64) bytes.resize(n * sizeof(T) + n * sizeof(T) / 8 + 64);
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) & ~uintptr_t(63));
  }
  T& operator[](size_t i) { return data[i]; }
  const T& operator[](size_t i) const { return data[i]; }
};

}  // namespace
