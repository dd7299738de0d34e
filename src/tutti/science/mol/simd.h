// Eight doubles at a time: GCC's vector extensions on any processor, with gathers and masks of AVX-512 where it has them.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#include <omp.h>
#include <sched.h>
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && !defined(PLAIN)
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

// Rows of four numbers (x, y, z, w) of eight atoms, by component. With AVX-512 the atoms stand in the order 0 1 4 5 2 3 6 7
// of lanes, which is that of all functions here.
struct Four {
  V x, y, z, w;
};

inline Four load_rows(const double* from, const int32_t* j) {
  Four r;
#ifdef WIDE
  const auto pair = [&](int a, int b) { return _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_load_pd(from + 4 * int64_t(j[a]))), _mm256_load_pd(from + 4 * int64_t(j[b])), 1); };
  const __m512d a = pair(0, 4), b = pair(1, 5), c = pair(2, 6), d = pair(3, 7);
  const __m512d xz = _mm512_unpacklo_pd(a, b), yw = _mm512_unpackhi_pd(a, b), xz2 = _mm512_unpacklo_pd(c, d), yw2 = _mm512_unpackhi_pd(c, d);
  r.x = _mm512_shuffle_f64x2(xz, xz2, 0x88), r.z = _mm512_shuffle_f64x2(xz, xz2, 0xdd);
  r.y = _mm512_shuffle_f64x2(yw, yw2, 0x88), r.w = _mm512_shuffle_f64x2(yw, yw2, 0xdd);
#else
  for (int k = 0; k < LANES; ++k) {
    const double* row = from + 4 * int64_t(j[k]);
    r.x[k] = row[0], r.y[k] = row[1], r.z[k] = row[2], r.w[k] = row[3];
  }
#endif
  return r;
}

inline void subtract_from_rows(double* to, const int32_t* j, V x, V y, V z) {  // rows may be the same
#ifdef WIDE
  const __m512d zero = _mm512_setzero_pd();
  const __m512d xy = _mm512_unpacklo_pd(x, y), xy2 = _mm512_unpackhi_pd(x, y), z0 = _mm512_unpacklo_pd(z, zero), z1 = _mm512_unpackhi_pd(z, zero);
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const auto put = [&](int a, int b, __m512d rows) {
    double *first = to + 4 * int64_t(j[a]), *second = to + 4 * int64_t(j[b]);
    _mm256_store_pd(first, _mm256_sub_pd(_mm256_load_pd(first), _mm512_castpd512_pd256(rows)));
    _mm256_store_pd(second, _mm256_sub_pd(_mm256_load_pd(second), _mm512_extractf64x4_pd(rows, 1)));
  };
  put(0, 4, _mm512_permutex2var_pd(xy, low, z0));
  put(1, 5, _mm512_permutex2var_pd(xy2, low, z1));
  put(2, 6, _mm512_permutex2var_pd(xy, high, z0));
  put(3, 7, _mm512_permutex2var_pd(xy2, high, z1));
#else
  for (int k = 0; k < LANES; ++k) {
    double* row = to + 4 * int64_t(j[k]);
    row[0] -= x[k], row[1] -= y[k], row[2] -= z[k];
  }
#endif
}

inline void look_up(const int32_t* table, const int32_t* j, int32_t* out) {
#ifdef WIDE
  const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
  const __m256i index = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(j)), order);
  _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm256_i32gather_epi32(table, index, 4));
#else
  for (int k = 0; k < LANES; ++k) out[k] = table[j[k]];
#endif
}

inline V where(Mask mask, V x) {  // x, or 0
#ifdef WIDE
  return _mm512_and_pd(x, (__m512d)mask);
#else
  return (V)((Mask)x & mask);
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
