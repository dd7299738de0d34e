// Products of queries and keys of BFloat16, of which pairs are multiplied at once, and sums of values of BFloat16.
// NATIVE: by instructions for BFloat16; without them, numbers at even and at odd places become floats.
//
// Pair d of a row belongs to lane d mod 8, which adds its pairs one after another. Lanes l and l + 4 are added, and then
// these four sums one after another: the order is the same whether keys are transposed (`product_of_pairs`, for many
// queries) or lie as they are stored (`products_of_row`, for few).

#pragma once

namespace {

constexpr int LANES = 8;

#if X86_512

constexpr int BESIDE = 2;  // vectors of keys that share a number of a query

// The first and the second numbers of pairs as floats.
inline __m512 evens(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 odds(__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))); }
inline __m256 evens(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 odds(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000))); }

template <bool NATIVE>
WITH_BFLOAT16 inline __attribute__((always_inline)) __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
  if constexpr (NATIVE) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  return _mm512_fmadd_ps(odds(a), odds(b), _mm512_fmadd_ps(evens(a), evens(b), sum));
}
template <bool NATIVE>
WITH_BFLOAT16 inline __attribute__((always_inline)) __m256 add_pairs(__m256 sum, __m256i a, __m256i b) {
  if constexpr (NATIVE) return _mm256_dpbf16_ps(sum, (__m256bh)a, (__m256bh)b);
  return _mm256_fmadd_ps(odds(a), odds(b), _mm256_fmadd_ps(evens(a), evens(b), sum));
}

// out (Q, keys) = a (Q, depth) b (depth, keys), of pairs; keys: a multiple of 32, which both b and out have in a row.
template <int Q, bool NATIVE>
WITH_BFLOAT16 void product_of_pairs(const float* a, int64_t of_a, const float* b, int64_t depth, int64_t keys,
                                    float* out) {
  const auto add = [&](__m512(&x)[Q][BESIDE], const __m512(&y)[Q][BESIDE]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < BESIDE; ++v) x[q][v] = _mm512_add_ps(x[q][v], y[q][v]);
  };
  for (int64_t k = 0; k < keys; k += BESIDE * N) {
    const auto lane = [&](int64_t first, __m512(&sums)[Q][BESIDE]) WITH_BFLOAT16 {
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
        for (int v = 0; v < BESIDE; ++v) sums[q][v] = _mm512_setzero_ps();
      for (int64_t d = first; d < depth; d += LANES) {
        __m512i right[BESIDE];
#pragma GCC unroll 4
        for (int v = 0; v < BESIDE; ++v) right[v] = _mm512_loadu_si512(b + d * keys + k + v * N);
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
          const __m512i left = _mm512_castps_si512(_mm512_set1_ps(a[q * of_a + d]));
#pragma GCC unroll 4
          for (int v = 0; v < BESIDE; ++v) sums[q][v] = add_pairs<NATIVE>(sums[q][v], left, right[v]);
        }
      }
    };
    __m512 sums[Q][BESIDE] = {};
#pragma GCC unroll 1
    for (int64_t l = 0; l < LANES / 2; ++l) {
      __m512 some[Q][BESIDE], others[Q][BESIDE];
      lane(l, some), lane(l + LANES / 2, others);
      add(some, others), add(sums, some);
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < BESIDE; ++v) _mm512_storeu_ps(out + q * keys + k + v * N, sums[q][v]);
  }
}

// The sums of the lanes of 16 vectors.
inline __attribute__((always_inline)) __m512 sums_of_lanes(const __m256* x) {
  __m512 y[4];
  const auto beside = [&](int i) __attribute__((always_inline)) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(x[i]), x[i + 4], 1);
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = beside(i), b = beside(i + 8);
    y[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const auto pairs = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return std::pair(_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(a, b)));
  };
  const auto [a, b] = pairs(y[0], y[1]);
  const auto [c, d] = pairs(y[2], y[3]);
  __m512 sums = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  sums = _mm512_add_ps(sums, _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
  sums = _mm512_add_ps(sums, _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)));
  return _mm512_add_ps(sums, _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)));
}

// out (16) = the products of a query, `depth` pairs, and 16 keys that begin at keys[i] + offset. depth: a multiple of 8.
template <bool NATIVE>
WITH_BFLOAT16 inline void products_of_row(const float* query, int64_t depth, const BFloat16* const* keys,
                                          int64_t offset, float* out) {
  __m256 sums[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) sums[i] = _mm256_setzero_ps();
  for (int64_t d = 0; d < depth; d += LANES) {
    const __m256i left = _mm256_loadu_si256((const __m256i*)(query + d));
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      sums[i] = add_pairs<NATIVE>(sums[i], left, _mm256_loadu_si256((const __m256i*)(keys[i] + offset + 2 * d)));
  }
  _mm512_storeu_ps(out, sums_of_lanes(sums));
}

// out (Q, width) += weights (Q, count) values (count, width). Value i begins at values[i] + offset. In each 32 numbers of
// a row of `out` those of even columns come first. width: a multiple of 32.
template <int Q>
void add_values(const float* weights, int64_t of_weights, int64_t count, const BFloat16* const* values, int64_t offset,
                int64_t width, float* out, int64_t of_out) {
  const auto add = [&](int64_t column, auto parts) __attribute__((always_inline)) {
    constexpr int PARTS = parts;
    __m512 sums[Q][2 * PARTS];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * PARTS; ++i) sums[q][i] = _mm512_loadu_ps(out + q * of_out + column + i * N);
    for (int64_t k = 0; k < count; ++k)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; ++i) {
        const __m512i x = _mm512_loadu_si512(values[k] + offset + column + 2 * i * N);
        const __m512 even = evens(x), odd = odds(x);
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
          const __m512 weight = _mm512_set1_ps(weights[q * of_weights + k]);
          sums[q][2 * i] = _mm512_fmadd_ps(weight, even, sums[q][2 * i]);
          sums[q][2 * i + 1] = _mm512_fmadd_ps(weight, odd, sums[q][2 * i + 1]);
        }
      }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * PARTS; ++i) _mm512_storeu_ps(out + q * of_out + column + i * N, sums[q][i]);
  };
  int64_t c = 0;
  if constexpr (Q == 1)
    for (; c + 8 * N <= width; c += 8 * N) add(c, std::integral_constant<int, 4>());
  for (; c + 4 * N <= width; c += 4 * N) add(c, std::integral_constant<int, 2>());
  for (; c < width; c += 2 * N) add(c, std::integral_constant<int, 1>());
}

// Put columns in their order.
inline void interleave(float* x, int64_t width) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t c = 0; c < width; c += 2 * N) {
    const __m512 even = _mm512_loadu_ps(x + c), odd = _mm512_loadu_ps(x + c + N);
    _mm512_storeu_ps(x + c, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(x + c + N, _mm512_permutex2var_ps(even, high, odd));
  }
}
#else  // never called
template <int Q, bool NATIVE>
void product_of_pairs(const float*, int64_t, const float*, int64_t, int64_t, float*) {}
template <bool NATIVE>
inline void products_of_row(const float*, int64_t, const BFloat16* const*, int64_t, float*) {}
template <int Q>
void add_values(const float*, int64_t, int64_t, const BFloat16* const*, int64_t, int64_t, float*, int64_t) {}
inline void interleave(float*, int64_t) {}
#endif

}  // namespace
