// Linear layers for few rows (linear_rows.py, linear_quantized.py): out = x W^T + bias, with W (n, k) as it is stored.
//
// BFloat16 with instructions that add up pairs is multiplied as `transposing.h` says. Otherwise the product of a row of
// x and a row of W is a vector of partial sums over k, which is summed up at the end: always in the same order, so a row
// of the result does not depend on the others. WIDE rows of W at a time stay in a cache while rows of x pass, up to TALL
// at a time. Weights of other types become floats or BFloat16 first, PIECE numbers of a row at a time. Threads share the
// rows of W.

#include <ATen/native/CPUBlas.h>

#include <limits>

#if X86_512
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int WIDE = 8, TALL = N == 16 ? 3 : 1;
constexpr int64_t PIECE = 1024;      // numbers of a row of W that are copied or converted at once
constexpr int64_t APART = PIECE + 32;
constexpr int64_t NEAR = 512 << 10;  // bytes of x that stay in a core's cache

enum Kind { SAME, INT8, INT4, INT3, INT2, CODES, FLOAT8 };

// Bytes of 64 packed numbers: see `codes`.
constexpr int64_t packed_bytes(Kind kind) { return kind == INT4 ? 32 : kind == INT3 ? 24 : 16; }

struct Weight {
  const void* data;      // (n, k) of the type of x, of int8 or of float8; (n, bytes) of packed numbers
  Kind kind;
  int64_t size, stride;  // bytes of an element; elements between rows
  const float* scales;   // (n) of int8, (n, groups) of packed numbers and of float8
  const uint8_t* zeros;  // (n, groups) of packed numbers, or null
  int64_t group, groups, bits;  // bits: of CODES

  template <class T>
  const T* row(int64_t i) const { return static_cast<const T*>(data) + i * stride; }

  bool packed() const { return kind >= INT4; }
  int64_t bytes() const {  // of 64 numbers
    return kind == CODES ? 8 * bits : kind == FLOAT8 ? 64 : packed() ? packed_bytes(kind) : 64 * size;
  }
  int zero(int64_t at) const {
    return zeros ? zeros[at] : kind == CODES ? 1 << (bits - 1) : kind == INT4 ? 8 : kind == INT3 ? 4 : 2;
  }

  const char* at(int64_t i, int64_t k) const {
    return static_cast<const char*>(data) + i * stride * size + k * bytes() / 64;
  }
};

template <class T>
struct Problem {
  const T* x;
  int64_t stride;  // elements between rows of x
  Weight w;
  const T* bias;
  T* out;
  int64_t m, n, k;
  int64_t first = 0;  // row among those of all problems
};

}  // namespace

#include "transposing.h"

namespace {

// ---- sums of products -----------------------------------------------------------------------------------------------

// The totals of four vectors.
inline void total(Floats a, Floats b, Floats c, Floats d, float* to) {
#if X86_512
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
  const __m512 all =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// Which part of k is multiplied: of several, the first begins the sums, and the last adds up each.
struct Part {
  int64_t count;
  bool first, last;
};

// Rows of weights that are needed next, `apart` bytes from each other, with 64 numbers in `bytes`.
struct Ahead {
  const char* data;
  int64_t rows, apart, bytes;

  // Number k of each row, if it begins a line of a cache, or the 64 packed numbers from k on go on to a new one.
  void fetch(int64_t k) const {
    const int64_t at = k * bytes / 64;
    if (at % 64 >= (bytes < 64 ? bytes : 1)) return;
    for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(data + i * apart + at, 0, 2);
  }
};

// A vector of numbers that are multiplied at once, all or the first few of them, and what their products are added to.
template <class T>
struct Lanes;

#if X86_512
template <>
struct Lanes<float> {
  using Vector = __m512;
  using Sum = __m512;
  static constexpr int64_t COUNT = 16;
  static inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
  static inline Vector load(const float* x, int64_t few) { return _mm512_maskz_loadu_ps((1 << few) - 1, x); }
  static inline Sum add(Sum sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

template <>
struct Lanes<BFloat16> {
  using Vector = __m512i;
  using Sum = __m512;
  static constexpr int64_t COUNT = 32;
  static inline Vector load(const BFloat16* x) { return _mm512_loadu_si512(x); }
  static inline Vector load(const BFloat16* x, int64_t few) { return _mm512_maskz_loadu_epi16((1u << few) - 1, x); }
  WITH_BFLOAT16 static inline Sum add(Sum sum, Vector a, Vector b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};
#else
template <>
struct Lanes<float> {
  using Vector = Floats;
  using Sum = Floats;
  static constexpr int64_t COUNT = N;
  static inline Vector load(const float* x) { return Floats::loadu(x); }
  static inline Vector load(const float* x, int64_t few) { return Floats::loadu(x, few); }
  static inline Sum add(Sum sum, Vector a, Vector b) { return at::vec::fmadd(a, b, sum); }
};
#endif

// sums (ROWS, WIDE) of vectors += the products of rows of x and of w. In the end their totals stand in the first WIDE
// numbers of each row.
template <int ROWS, class T>
WITH_BFLOAT16 void multiply(const T* x, int64_t stride, const T* const* w, Part part, float* sums, Ahead ahead) {
  using L = Lanes<T>;
  typename L::Sum sum[ROWS][WIDE];
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i)
      sum[r][i] = part.first ? typename L::Sum(Floats(0.f)) : typename L::Sum(Floats::loadu(sums + (r * WIDE + i) * N));
  int64_t k = 0;
  for (; k + L::COUNT <= part.count; k += L::COUNT) {
    ahead.fetch(k);
    typename L::Vector a[ROWS];
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; ++r) a[r] = L::load(x + r * stride + k);
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) {
      const typename L::Vector b = L::load(w[i] + k);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; ++r) sum[r][i] = L::add(sum[r][i], a[r], b);
    }
  }
  if (k < part.count) {
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) {
      const typename L::Vector b = L::load(w[i] + k, part.count - k);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; ++r) sum[r][i] = L::add(sum[r][i], L::load(x + r * stride + k, part.count - k), b);
    }
  }
  if (part.last) {
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; ++r) {
      total(sum[r][0], sum[r][1], sum[r][2], sum[r][3], sums + r * WIDE * N);
      total(sum[r][4], sum[r][5], sum[r][6], sum[r][7], sums + r * WIDE * N + 4);
    }
    return;
  }
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) Floats(sum[r][i]).store(sums + (r * WIDE + i) * N);
}

// ---- weights of another type ----------------------------------------------------------------------------------------

void narrow(const float* x, int64_t count, int8_t* y) {
  int64_t i = 0;
#if X86_512
  for (; i + 16 <= count; i += 16)
    _mm_storeu_si128((__m128i*)(y + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_loadu_ps(x + i))));
#endif
  for (; i < count; ++i) y[i] = int8_t(x[i]);
}

// int8, without its scale
void widen(const int8_t* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = x[i];
}

// Packed numbers i to i + 31 of a row, of which i is a multiple of 32: of each 64, int4 has the first 32 in the low
// halves of 32 bytes; int2 has number 16 j + b in bits 2 j and 2 j + 1 of byte b; int3 has the low bits as int2, and
// then the high bit of number i in bit i of 8 bytes.
template <Kind KIND>
void codes(const uint8_t* block, int64_t i, uint8_t* q) {
  if (KIND == INT4)
    for (int64_t j = 0; j < 32; ++j) q[j] = (block[j] >> (i % 64 ? 4 : 0)) & 15;
  else
    for (int64_t j = 0; j < 32; ++j) {
      const int64_t at = i % 64 + j;
      q[j] = (block[at % 16] >> (at / 16 * 2)) & 3;
      if (KIND == INT3) q[j] |= ((block[16 + at / 8] >> (at % 8)) & 1) << 2;
    }
}

template <Kind KIND>
void widen_packed(const Weight& w, int64_t row, int64_t begin, int64_t count, float* y) {
  const uint8_t* x = w.row<uint8_t>(row);
  uint8_t q[32];
  for (int64_t i = begin; i < begin + count; i += 32) {
    const int64_t at = row * w.groups + i / w.group;
    const float scale = w.scales[at], zero = w.zero(at);
    codes<KIND>(x + i / 64 * packed_bytes(KIND), i, q);
    for (int64_t j = 0; j < 32; ++j) y[i - begin + j] = scale * (float(q[j]) - zero);
  }
}

#if X86_512
WITH_BFLOAT16 void widen(const int8_t* x, int64_t count, BFloat16* y) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(x + i))));
    const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(x + i + 16))));
    _mm512_storeu_si512(y + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  for (; i < count; ++i) y[i] = float(x[i]);
}

// 64 packed numbers as bytes.
template <Kind KIND>
inline __m512i codes(const uint8_t* block) {
  if (KIND == INT4) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)block));
    const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15));
  }
  const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)block));
  const __m512i shifts = _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0);
  const __m512i low = _mm512_and_si512(_mm512_srlv_epi64(four, shifts), _mm512_set1_epi8(3));
  if (KIND == INT2) return low;
  __mmask64 high;
  std::memcpy(&high, block + 16, sizeof high);
  return _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(4));
}

// By a table of the numbers of a group.
template <Kind KIND>
WITH_BFLOAT16 void widen_packed(const Weight& w, int64_t row, int64_t begin, int64_t count, BFloat16* y) {
  const uint8_t* x = w.row<uint8_t>(row);
  const __m512 steps = _mm512_cvtepi32_ps(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  __m512i table = _mm512_setzero_si512();
  for (int64_t i = begin, known = -1; i < begin + count; i += 64) {
    const __m512i q = codes<KIND>(x + i / 64 * packed_bytes(KIND));
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = row * w.groups + (i + 32 * half) / w.group;
      if (at != known) {
        const __m512 zero = _mm512_set1_ps(w.zero(at));
        const __m512 values = _mm512_mul_ps(_mm512_set1_ps(w.scales[at]), _mm512_sub_ps(steps, zero));
        table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
        known = at;
      }
      const __m512i index = _mm512_cvtepu8_epi16(half ? _mm512_extracti64x4_epi64(q, 1) : _mm512_castsi512_si256(q));
      _mm512_storeu_si512(y + i - begin + 32 * half, _mm512_permutexvar_epi16(index, table));
    }
  }
}
#endif

// Eight codes of a stream of bits, from the lowest bits of the first byte on. left: bytes of the stream from x on.
inline void eight_codes(const uint8_t* x, int64_t bits, int64_t left, uint8_t* q) {
  uint64_t joined = 0;
  if (left >= 8)
    std::memcpy(&joined, x, 8);
  else
    std::memcpy(&joined, x, std::min(bits, left));
  const uint64_t one = (1 << bits) - 1;
#if X86_512
  const __m512i shifts = _mm512_mullo_epi64(_mm512_set1_epi64(bits), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  const __m512i found = _mm512_and_si512(_mm512_srlv_epi64(_mm512_set1_epi64(joined), shifts), _mm512_set1_epi64(one));
  _mm_storel_epi64((__m128i*)q, _mm512_cvtepi64_epi8(found));
#else
  for (int64_t j = 0; j < 8; ++j) q[j] = (joined >> (bits * j)) & one;
#endif
}

// Numbers of float8 (e4m3), without their scales, by the bits of a float, whose exponent is 120 larger.
inline float of_float8(uint8_t x) {
  const uint32_t bits = uint32_t(x & 128) << 24 | uint32_t(x & 127) << 20;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return (x & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : y * 0x1p120f;
}

inline void rounded(const float* x, int64_t count, float* y) { std::copy(x, x + count, y); }
inline void rounded(const float* x, int64_t count, BFloat16* y) {
  int64_t i = 0;
  for (; i + 2 * N <= count; i += 2 * N)
    at::vec::convert_from_float<BFloat16>(Floats::loadu(x + i), Floats::loadu(x + i + N)).store(y + i);
  for (; i < count; ++i) y[i] = x[i];
}

// CODES and FLOAT8, in groups of any size, at most PIECE of them.
template <class C>
void widen_groups(const Weight& w, int64_t row, int64_t begin, int64_t count, C* y) {
  const uint8_t* x = w.row<uint8_t>(row);
  uint8_t q[PIECE + 8];
  float wide[PIECE];
  if (w.kind == CODES && w.bits < 8)
    for (int64_t i = 0; i < count; i += 8) {
      const int64_t at = (begin + i) / 8 * w.bits;
      eight_codes(x + at, w.bits, w.stride - at, q + i);
    }
  else
    std::memcpy(q, x + begin, count);
  for (int64_t i = 0, end; i < count; i = end) {
    const int64_t g = (begin + i) / w.group, at = row * w.groups + g;
    end = std::min(count, (g + 1) * w.group - begin);
    const float scale = w.scales[at], zero = w.zero(at);
    int64_t j = i;
#if X86_512
    for (; w.kind == CODES && j + 16 <= end; j += 16) {
      const __m512 found = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(q + j))));
      _mm512_storeu_ps(wide + j, _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_sub_ps(found, _mm512_set1_ps(zero))));
    }
#endif
    for (; j < end; ++j) wide[j] = scale * (w.kind == FLOAT8 ? of_float8(q[j]) : float(q[j]) - zero);
  }
  rounded(wide, count, y);
}

template <class C>
void widen_packed(const Weight& w, int64_t row, int64_t begin, int64_t count, C* y) {
  if (w.kind >= CODES)
    for (int64_t i = 0; i < count; i += PIECE)
      widen_groups(w, row, begin + i, std::min(PIECE, count - i), y + i);
  else if (w.kind == INT4)
    widen_packed<INT4>(w, row, begin, count, y);
  else if (w.kind == INT3)
    widen_packed<INT3>(w, row, begin, count, y);
  else
    widen_packed<INT2>(w, row, begin, count, y);
}

// Numbers `begin` to `begin + count` of a row of W as C: in `copy` or, if they are of that type and `copy` is null,
// where they are stored.
template <class C, class T>
const C* numbers(const Weight& w, int64_t row, int64_t begin, int64_t count, C* copy) {
  if (w.kind == INT8)
    widen(w.row<int8_t>(row) + begin, count, copy);
  else if (w.packed())
    widen_packed(w, row, begin, count, copy);
  else if constexpr (!std::is_same_v<C, T>)
    widen(w.row<T>(row) + begin, count, copy);
  else if (copy)
    std::copy(w.row<T>(row) + begin, w.row<T>(row) + begin + count, copy);
  else
    return w.row<T>(row) + begin;
  return copy;
}

// ---- the product ----------------------------------------------------------------------------------------------------

// factor: of the row
template <class T>
void finish(const Problem<T>& p, int64_t row, int64_t column, const float* found, float factor = 1.f) {
  T* out = p.out + row * p.n + column;
  for (int64_t i = 0; i < std::min<int64_t>(WIDE, p.n - column); ++i) {
    const float y = factor * (p.w.kind == INT8 ? found[i] * p.w.scales[column + i] : found[i]);
    out[i] = p.bias ? T(y + float(p.bias[column + i])) : T(y);
  }
}

// Call f for the rows of x, TALL at a time, each with a part of the WIDE rows of W that are needed next: those from
// `next` on, from number `at` of each.
template <class T, class F>
void passes(const Problem<T>& p, int64_t count, int64_t next, int64_t at, F f) {
  const int64_t times = (count + TALL - 1) / TALL, each = (WIDE + times - 1) / times;
  for (int64_t r = 0, row = next; r < count; r += TALL, row += each) {
    const int64_t rows = std::min({each, next + WIDE - row, p.n - row});
    f(r, std::min<int64_t>(TALL, count - r), Ahead{p.w.at(row, at), rows, p.w.stride * p.w.size, p.w.bytes()});
  }
}

// Columns `begin` to `end` of rows `first` to `first + count`. x: of the first row. Many rows pass copies of weights:
// rows that are a power of two apart would compete for the same lines of a cache.
template <class C, class T>
void columns(const Problem<T>& p, const C* x, int64_t stride, int64_t first, int64_t count, int64_t begin,
             int64_t end) {
  const bool stored = p.w.kind == SAME && std::is_same_v<C, T>, copied = !stored || count > 4 * TALL;
  const int64_t piece = copied ? PIECE : p.k;
  std::vector<C> copies(copied ? WIDE * APART : 0);
  std::vector<float> sums(count * WIDE * N);
  const C* w[WIDE];
  for (int64_t column = begin; column < end; column += WIDE) {
    for (int64_t k = 0; k < p.k; k += piece) {
      const Part part{std::min(piece, p.k - k), k == 0, k + piece >= p.k};
      for (int64_t i = 0; i < WIDE; ++i)
        w[i] = numbers<C, T>(p.w, std::min(column + i, p.n - 1), k, part.count, copied ? &copies[i * APART] : nullptr);
      passes(p, count, part.last ? column + WIDE : column, part.last ? 0 : k + piece,
             [&](int64_t r, int64_t rows, Ahead ahead) {
               float* to = &sums[r * WIDE * N];
               if (rows == TALL)
                 multiply<TALL>(x + r * stride + k, stride, w, part, to, ahead);
               else if (rows == 2)
                 multiply<TALL == 3 ? 2 : 1>(x + r * stride + k, stride, w, part, to, ahead);
               else
                 multiply<1>(x + r * stride + k, stride, w, part, to, ahead);
             });
    }
    for (int64_t r = 0; r < count; ++r) finish(p, first + r, column, &sums[r * WIDE * N]);
  }
}

// Several products with as many columns, of C.
template <class C, class T>
void linear(const std::vector<Problem<T>>& problems, const C* x, int64_t stride) {
  const int64_t k = problems[0].k, n = problems[0].n, tiles = (n + WIDE - 1) / WIDE;
  const int64_t rows = std::max<int64_t>(48, NEAR / (sizeof(C) * std::max<int64_t>(k, 1)) / TALL * TALL);
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * WIDE));
  at::parallel_for(0, tiles * problems.size(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t last; begin < end; begin = last) {
      const Problem<T>& p = problems[begin / tiles];
      const int64_t before = begin / tiles * tiles;
      last = std::min(end, before + tiles);
      for (int64_t r = 0; r < p.m; r += rows)
        columns<C, T>(p, x + (p.first + r) * stride, stride, r, std::min(rows, p.m - r), (begin - before) * WIDE,
                      std::min((last - before) * WIDE, n));
    }
  });
}

// ---- the product by tiles -------------------------------------------------------------------------------------------

// W x^T by oneDNN's brgemm, which uses AMX where there is any: SQUARE rows of x at a time, filled up with zeros, so
// that all rows are computed alike.
#if X86_512
constexpr int64_t SQUARE = 32;

// Rows of x as brgemm takes its second operand: (k / 2, SQUARE) pairs.
void pack(const BFloat16* x, int64_t stride, int64_t rows, int64_t k, BFloat16* packed) {
  auto to = reinterpret_cast<uint32_t*>(packed);
  for (int64_t r = 0; r < SQUARE; ++r)
    for (int64_t i = 0; i < k / 2; ++i) {
      uint32_t pair = 0;
      if (r < rows) std::memcpy(&pair, x + r * stride + 2 * i, sizeof pair);
      to[i * SQUARE + r] = pair;
    }
}

void linear_by_tiles(const Problem<BFloat16>& p) {
  const int64_t groups = (p.m + SQUARE - 1) / SQUARE, each = SQUARE * p.k;
  std::vector<BFloat16> x(groups * each);
  at::parallel_for(0, groups, 1, [&](int64_t g, int64_t end) {
    for (; g < end; ++g)
      pack(p.x + g * SQUARE * p.stride, p.stride, std::min(SQUARE, p.m - g * SQUARE), p.k, &x[g * each]);
  });
  at::parallel_for(0, (p.n + SQUARE - 1) / SQUARE, 1, [&](int64_t tile, int64_t end) {
    std::vector<BFloat16> copy(p.w.kind == SAME ? 0 : each);
    float sums[SQUARE * SQUARE], found[WIDE];
    for (; tile < end; ++tile) {
      const int64_t column = tile * SQUARE, rows = std::min(SQUARE, p.n - column);
      const BFloat16* w = p.w.row<BFloat16>(column);
      if (p.w.kind != SAME) {
        for (int64_t i = 0; i < rows; ++i) numbers<BFloat16, BFloat16>(p.w, column + i, 0, p.k, &copy[i * p.k]);
        w = copy.data();
      }
      for (int64_t g = 0; g < groups; ++g) {
        at::native::cpublas::brgemm(rows, SQUARE, p.k, p.w.kind == SAME ? p.w.stride : p.k, SQUARE, SQUARE, false, w,
                                    &x[g * each], sums);
        for (int64_t r = 0; r < std::min(SQUARE, p.m - g * SQUARE); ++r)
          for (int64_t i = 0; i < rows; i += WIDE) {
            for (int64_t j = 0; j < std::min<int64_t>(WIDE, rows - i); ++j) found[j] = sums[(i + j) * SQUARE + r];
            finish(p, g * SQUARE + r, column + i, found);
          }
      }
    }
    at::native::cpublas::brgemm_release();
  });
}
#else
void linear_by_tiles(const Problem<BFloat16>&) {}  // never called
#endif

// ---- rows of int8 ---------------------------------------------------------------------------------------------------

// Rows as int8, their scales, and the totals of their groups. With two digits a row becomes two, whose second is what
// is left of FINER times, so that their sum has 16 bits.
constexpr int FINER = 256;

struct Rounded {
  int64_t digits, rows, stride, groups;
  std::vector<int8_t> x;
  std::vector<float> scales, sums;

  Rounded(int64_t m, int64_t digits, int64_t k, int64_t groups)
      : digits(digits), rows(m * digits), stride((k + 63) / 64 * 64), groups(groups), x(rows * stride), scales(rows),
        sums(rows * groups) {}
};

// A row, of which `wide` and `left` have room for a copy.
template <class T>
void round_row(const T* x, int64_t k, Rounded& to, int64_t row, std::vector<float>& wide, std::vector<float>& left) {
  wide.assign((k + N - 1) / N * N, 0.f);
  left.resize(wide.size());
  widen(x, k, wide.data());
  Floats top(0.f);
  for (int64_t i = 0; i < k; i += N) top = at::vec::maximum(top, Floats::loadu(&wide[i]).abs());
  const float most = greatest(top);
  const Floats inverse(most > 0.f ? 127.f / most : 0.f), finer(FINER), highest(127.f);
  for (int64_t i = 0; i < k; i += N) {
    const Floats exact = Floats::loadu(&wide[i]) * inverse, near = exact.round();
    near.store(&wide[i]);
    at::vec::minimum(((exact - near) * finer).round(), highest).store(&left[i]);
  }
  const int64_t each = k / to.groups;
  for (int64_t digit = 0; digit < to.digits; ++digit) {
    const int64_t at = row * to.digits + digit;
    const float* digits = digit ? left.data() : wide.data();
    to.scales[at] = most / (digit ? 127.f * FINER : 127.f);
    for (int64_t g = 0; g < to.groups; ++g)
      to.sums[at * to.groups + g] =
          at::vec::reduce_all<float>([](Floats p, Floats q) { return p + q; }, digits + g * each, each);
    narrow(digits, k, &to.x[at * to.stride]);
  }
}

#if X86_512
WITH_INT8 inline __m128i total(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// to (ROWS, WIDE) = products of rounded rows and WIDE rows of W of int8, offset by 128.
template <int ROWS, class T>
WITH_INT8 void multiply_int8(const Problem<T>& p, const Rounded& x, int64_t row, int64_t column, Ahead ahead,
                             float* to) {
  __m512i sum[ROWS][WIDE];
  const int8_t* w[WIDE];
  for (int i = 0; i < WIDE; ++i) w[i] = p.w.template row<int8_t>(std::min(column + i, p.n - 1));
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) sum[r][i] = _mm512_setzero_si512();
  const __m512i offset = _mm512_set1_epi8(char(128));
  const int8_t* const from = &x.x[row * x.stride];
  const int64_t stride = x.stride, count = p.k;
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    ahead.fetch(k);
    __m512i a[ROWS];
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; ++r) a[r] = _mm512_loadu_si512(from + r * stride + k);
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) {
      const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(w[i] + k), offset);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; ++r) sum[r][i] = _mm512_dpbusd_epi32(sum[r][i], b, a[r]);
    }
  }
  if (k < count) {
    const __mmask64 rest = (1ull << (count - k)) - 1;
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) {
      const __m512i b = _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, w[i] + k), offset);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; ++r)
        sum[r][i] = _mm512_dpbusd_epi32(sum[r][i], b, _mm512_loadu_si512(from + r * stride + k));
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r) {
    const __m128i offsets = _mm_set1_epi32(128 * int(x.sums[row + r]));
    const __m128i low = total(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    const __m128i high = total(sum[r][4], sum[r][5], sum[r][6], sum[r][7]);
    _mm_storeu_ps(to + r * WIDE, _mm_cvtepi32_ps(_mm_sub_epi32(low, offsets)));
    _mm_storeu_ps(to + r * WIDE + 4, _mm_cvtepi32_ps(_mm_sub_epi32(high, offsets)));
  }
}

// The sum over groups of scale zero sum. none: the zero of all groups, without zeros.
WITH_INT8 inline float of_zeros(const float* scales, const uint8_t* zeros, int none, const float* sums,
                                int64_t groups) {
  __m512 all = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g += 16) {
    const __mmask16 here = groups - g >= 16 ? 0xffff : (1 << (groups - g)) - 1;
    const __m512 zero = zeros ? _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, zeros + g)))
                              : _mm512_set1_ps(none);
    all = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, scales + g), zero),
                          _mm512_maskz_loadu_ps(here, sums + g), all);
  }
  return _mm512_reduce_add_ps(all);
}

// The same of packed numbers, each 32 with a scale and a zero. Of rows of two digits: products of FINER times the first
// digits and the second ones together.
template <Kind KIND, int DIGITS, int ROWS, class T>
WITH_INT8 void multiply_packed(const Problem<T>& p, const Rounded& x, int64_t row, int64_t column, Ahead ahead,
                               float* to) {
  static_assert(FINER == 1 << 8);
  __m512 sum[ROWS][WIDE];
  const uint8_t* w[WIDE];
  const float* scales[WIDE];
  const int64_t groups = x.groups;
  for (int i = 0; i < WIDE; ++i) {
    const int64_t own = std::min(column + i, p.n - 1);
    w[i] = p.w.template row<uint8_t>(own);
    scales[i] = p.w.scales + own * groups;
  }
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) sum[r][i] = _mm512_setzero_ps();
  const int8_t* const from = &x.x[row * DIGITS * x.stride];
  const int64_t stride = x.stride, count = p.k, group = p.w.group;
  for (int64_t k = 0; k < count; k += 64) {
    ahead.fetch(k);
    __m512i a[ROWS * DIGITS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS * DIGITS; ++r) a[r] = _mm512_loadu_si512(from + r * stride + k);
    const int64_t at = k / group, next = (k + 32) / group;
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) {
      const __m512i b = codes<KIND>(w[i] + k / 64 * packed_bytes(KIND));
      __m512 scale = _mm512_set1_ps(scales[i][at]);
      if (next != at) scale = _mm512_insertf32x8(scale, _mm256_set1_ps(scales[i][next]), 1);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; ++r) {
        __m512i product = _mm512_dpbusd_epi32(_mm512_setzero_si512(), b, a[r * DIGITS]);
        if (DIGITS == 2) product = _mm512_dpbusd_epi32(_mm512_slli_epi32(product, 8), b, a[r * DIGITS + 1]);
        sum[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, sum[r][i]);
      }
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r) {
    total(sum[r][0], sum[r][1], sum[r][2], sum[r][3], to + r * WIDE);
    total(sum[r][4], sum[r][5], sum[r][6], sum[r][7], to + r * WIDE + 4);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int64_t i = 0; i < std::min<int64_t>(WIDE, p.n - column); ++i) {
      const uint8_t* zeros = p.w.zeros ? p.w.zeros + (column + i) * groups : nullptr;
      const float* sums = &x.sums[(row + r) * DIGITS * groups];
      float offset = of_zeros(scales[i], zeros, p.w.zero(0), sums, groups);
      if (DIGITS == 2) offset = FINER * offset + of_zeros(scales[i], zeros, p.w.zero(0), sums + groups, groups);
      to[r * WIDE + i] -= offset;
    }
}

template <int ROWS, class T>
void multiply_rounded(const Problem<T>& p, const Rounded& x, int64_t row, int64_t column, Ahead ahead, float* to) {
  const auto packed = [&]<Kind KIND>() {
    if (x.digits == 2)
      multiply_packed<KIND, 2, ROWS, T>(p, x, row, column, ahead, to);
    else
      multiply_packed<KIND, 1, ROWS, T>(p, x, row, column, ahead, to);
  };
  if (p.w.kind == INT8)
    multiply_int8<ROWS, T>(p, x, row, column, ahead, to);
  else if (p.w.kind == INT4)
    packed.template operator()<INT4>();
  else if (p.w.kind == INT3)
    packed.template operator()<INT3>();
  else
    packed.template operator()<INT2>();
}

template <class T>
void linear_by_vectors(const Problem<T>& p, const Rounded& x) {
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, p.k * WIDE));
  at::parallel_for(0, (p.n + WIDE - 1) / WIDE, grain, [&](int64_t i, int64_t end) {
    // Digits of packed numbers are added up already.
    const int64_t parts = p.w.packed() ? 1 : x.digits;
    std::vector<float> sums(p.m * parts * WIDE);
    for (; i < end; ++i) {
      passes(p, p.m * parts, (i + 1) * WIDE, 0, [&](int64_t r, int64_t rows, Ahead ahead) {
        float* to = &sums[r * WIDE];
        if (rows == 3)
          multiply_rounded<3>(p, x, r, i * WIDE, ahead, to);
        else if (rows == 2)
          multiply_rounded<2>(p, x, r, i * WIDE, ahead, to);
        else
          multiply_rounded<1>(p, x, r, i * WIDE, ahead, to);
      });
      for (int64_t r = 0; r < p.m; ++r) {
        float found[WIDE] = {};
        for (int64_t part = 0; part < parts; ++part) {
          const float scale = x.scales[(r + 1) * x.digits - parts + part];
          for (int64_t j = 0; j < WIDE; ++j) found[j] += scale * sums[(r * parts + part) * WIDE + j];
        }
        finish(p, r, i * WIDE, found);
      }
    }
  });
}

// ---- rows of int8, by tiles -----------------------------------------------------------------------------------------

// Products of 32 rows of W, less their zeros, and 16 or 32 rounded rows by AMX. A row's bits are those of any number
// of rows, and differ from those without tiles.

#define WITH_TILES \
  __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
constexpr int64_t TILE = 16, BLOCK = 2 * TILE;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Whether Linux lets this process use tiles: it must be asked once.
bool may_use_tiles() {
  static const bool may = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
  return may;
}

// `count` rows of W from `column` on as int8 less their zeros, each in `stride` bytes.
template <Kind KIND>
WITH_INT8 void unpack(const Weight& w, int64_t column, int64_t count, int64_t k, int8_t* to, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* from = w.row<uint8_t>(column + i);
    const int64_t first = (column + i) * w.groups;
    __m512i zero = _mm512_set1_epi8(w.zero(first));
    for (int64_t at = 0; at < k; at += 64) {
      if (w.zeros) zero = _mm512_set1_epi8(w.zero(first + at / w.group));
      if (w.zeros && w.group < 64)
        zero = _mm512_inserti64x4(zero, _mm256_set1_epi8(w.zero(first + (at + 32) / w.group)), 1);
      const __m512i q = codes<KIND>(from + at / 64 * packed_bytes(KIND));
      _mm512_store_si512(to + i * stride + at, _mm512_sub_epi8(q, zero));
    }
  }
}

// sums (BLOCK, 2 TILE) += scales C of a group, for `half` halves of the columns. C: (BLOCK, 2 TILE).
WITH_INT8 inline void add_group(const int32_t* c, const float* scales, int64_t apart, int64_t rows, int halves,
                                float* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    const __m512 scale = _mm512_set1_ps(scales[i * apart]);
    for (int half = 0; half < halves; ++half) {
      const int64_t at = i * 2 * TILE + half * TILE;
      const __m512 found = _mm512_cvtepi32_ps(_mm512_load_si512(c + at));
      _mm512_store_ps(sums + at, _mm512_fmadd_ps(found, scale, _mm512_load_ps(sums + at)));
    }
  }
}

// C (BLOCK, 2 TILE) = products of BLOCK rows of int8 and one or two tiles of x, over steps of `step` numbers.
template <int HALVES>
WITH_TILES inline void multiply_tiles(const int8_t* w, int64_t stride, const int8_t* x, int64_t apart, int64_t count,
                                      int64_t step, const int8_t* next, int32_t* c) {
  _tile_zero(0);
  _tile_zero(2);
  if (HALVES == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < count; k += step) {
    if (next)
      for (int64_t i = 0; i < BLOCK; ++i) __builtin_prefetch(next + i * stride + k, 0, 2);
    _tile_loadd(4, w + k, stride);
    _tile_loadd(5, w + TILE * stride + k, stride);
    _tile_loadd(6, x + k * TILE, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(2, 5, 6);
    if (HALVES == 2) {
      _tile_loadd(7, x + apart + k * TILE, 64);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, c, 128);
  _tile_stored(2, c + TILE * 2 * TILE, 128);
  if (HALVES == 2) {
    _tile_stored(1, c + TILE, 128);
    _tile_stored(3, c + TILE * 2 * TILE + TILE, 128);
  }
}

inline __m512 load(const float* x, __mmask16 here) { return _mm512_maskz_loadu_ps(here, x); }
inline __m512 load(const BFloat16* x, __mmask16 here) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, x)), 16));
}
inline void store(float* to, __mmask16 here, __m512 x) { _mm512_mask_storeu_ps(to, here, x); }
WITH_BFLOAT16 inline void store(BFloat16* to, __mmask16 here, __m512 x) {
  _mm256_mask_storeu_epi16(to, here, (__m256i)_mm512_cvtneps_pbh(x));
}

// Rows of the result from sums (BLOCK, 2 TILE) for the rounded rows from `row` on, of which there are `count`.
template <class T>
WITH_BFLOAT16 void finish_tiles(const Problem<T>& p, const Rounded& x, int64_t row, int64_t count, int64_t column,
                            const float* sums) {
  const __m512i down = _mm512_mullo_epi32(_mm512_set1_epi32(2 * TILE), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7,
                                                                                         6, 5, 4, 3, 2, 1, 0));
  for (int64_t begin = 0; begin < std::min(BLOCK, p.n - column); begin += TILE)
    for (int64_t r = 0; r < count; r += x.digits) {
      __m512 all = _mm512_setzero_ps();
      for (int64_t digit = r; digit < r + x.digits; ++digit)
        all = _mm512_fmadd_ps(_mm512_i32gather_ps(down, sums + begin * 2 * TILE + digit, 4),
                              _mm512_set1_ps(x.scales[row + digit]), all);
      const __mmask16 here = p.n - column - begin < TILE ? (1 << (p.n - column - begin)) - 1 : 0xffff;
      if (p.bias) all = _mm512_add_ps(all, load(p.bias + column + begin, here));
      store(p.out + (row + r) / x.digits * p.n + column + begin, here, all);
    }
}

// A vector that begins at a line of a cache.
template <class C>
struct Aligned {
  std::vector<C> all;
  C* data;

  explicit Aligned(int64_t count) : all(count + 64 / sizeof(C)) {
    data = all.data() + (64 - reinterpret_cast<uintptr_t>(all.data()) % 64) % 64 / sizeof(C);
  }
};

template <class T>
WITH_TILES void blocks_by_tiles(const Problem<T>& p, const Rounded& x, const int8_t* packed, int64_t block,
                                int64_t end) {
  const Weight& w = p.w;
  const int64_t wide = x.stride, tiles = (x.rows + TILE - 1) / TILE, apart = TILE * wide;
  const bool grouped = w.packed();
  const int64_t group = grouped ? w.group : wide, step = std::min<int64_t>(64, group);
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = i < 6 ? TILE : step / 4;
    shapes.bytes[i] = i == 4 || i == 5 ? step : 64;
  }
  _tile_loadconfig(&shapes);
  Aligned<int8_t> copy(BLOCK * wide);
  alignas(64) int32_t c[2][BLOCK * 2 * TILE];  // of a group, and of the one before, which is added meanwhile
  alignas(64) float sums[BLOCK * 2 * TILE];
  for (; block < end; ++block) {
    const int64_t column = block * BLOCK, rows = std::min(BLOCK, p.n - column);
    const int8_t* from = w.row<int8_t>(column);
    const bool copied = grouped || rows < BLOCK || p.k % 64;
    const bool ahead = column + 2 * BLOCK <= p.n;
    int64_t stride = w.stride;
    if (w.kind == INT4)
      unpack<INT4>(w, column, rows, p.k, copy.data, wide);
    else if (w.kind == INT3)
      unpack<INT3>(w, column, rows, p.k, copy.data, wide);
    else if (w.kind == INT2)
      unpack<INT2>(w, column, rows, p.k, copy.data, wide);
    else if (copied)
      for (int64_t i = 0; i < rows; ++i) std::memcpy(copy.data + i * wide, from + i * stride, p.k);
    if (grouped && ahead)
      for (int64_t i = 0; i < BLOCK; ++i)
        for (int64_t at = 0; at < w.stride; at += 64) __builtin_prefetch(w.at(column + BLOCK + i, 0) + at, 0, 2);
    if (copied) from = copy.data, stride = wide;
    for (int64_t t = 0; t < tiles; t += 2) {
      const int halves = t + 1 < tiles ? 2 : 1;
      std::memset(sums, 0, sizeof sums);
      const auto add = [&](int64_t g) {
        add_group(c[g % 2], w.scales + column * w.groups + g, w.groups, rows, halves, sums);
      };
      const int64_t groups = p.w.groups;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = g * group;
        const int8_t* next = !copied && ahead && !t ? from + BLOCK * stride + at : nullptr;
        const int8_t* of_x = packed + t * apart + at * TILE;
        if (halves == 2)
          multiply_tiles<2>(from + at, stride, of_x, apart, group, step, next, c[g % 2]);
        else
          multiply_tiles<1>(from + at, stride, of_x, apart, group, step, next, c[g % 2]);
        if (g) add(g - 1);
      }
      add(groups - 1);
      finish_tiles(p, x, t * TILE, std::min(2 * TILE, x.rows - t * TILE), column, sums);
    }
  }
  _tile_release();
}

template <class T>
void linear_by_int8_tiles(const Problem<T>& p, const Rounded& x) {
  const int64_t tiles = (x.rows + TILE - 1) / TILE, each = TILE * x.stride;
  Aligned<int8_t> packed(tiles * each);  // of each tile (k / 4, TILE, 4)
  for (int64_t row = 0; row < x.rows; ++row)
    for (int64_t k = 0; k < x.stride; k += 4)
      std::memcpy(packed.data + row / TILE * each + k * TILE + row % TILE * 4, &x.x[row * x.stride + k], 4);
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, p.k * BLOCK));
  at::parallel_for(0, (p.n + BLOCK - 1) / BLOCK, grain, [&](int64_t begin, int64_t end) {
    blocks_by_tiles(p, x, packed.data, begin, end);
  });
}

// ---- one or two rows of int8 ----------------------------------------------------------------------------------------

// What tiles compute of packed numbers, in the same order and with the same bits, for FEW rounded rows at most: a tile
// would be almost empty, and numbers need not be copied.

constexpr int64_t FEW = 4;

// The totals of 16 vectors in their order, or of the lower and the upper halves of all of them. at: makes vector i.
struct Totals {
  __m512i all, low, high;
};
template <class F>
WITH_INT8 inline Totals totals(F at, bool halves) {
  __m512i fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = at(4 * i), b = at(4 * i + 1), c = at(4 * i + 2), d = at(4 * i + 3);
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }
  const auto pair = [](__m512i x, __m512i y) WITH_INT8 {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
  };
  const __m512i first = pair(fours[0], fours[1]), second = pair(fours[2], fours[3]);
  const __m512i low = _mm512_shuffle_i32x4(first, second, 0x88), high = _mm512_shuffle_i32x4(first, second, 0xdd);
  return halves ? Totals{low, low, high} : Totals{_mm512_add_epi32(low, high), low, high};
}

// sums (ROWS) += products of group g of 16 columns from `column` on. c: products of codes.
template <int ROWS>
WITH_INT8 inline void add_column_group(const Weight& w, const Rounded& x, int64_t column, __m512i across, __mmask16 here,
                                       int64_t g, const __m512i* c, __m512* sums) {
  const int64_t at = column * w.groups + g;
  const __m512 scale = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), here, across, w.scales + at, 4);
  __m512i zero = _mm512_set1_epi32(w.zero(0));
  if (w.zeros) {
    alignas(64) int32_t each[TILE] = {};
    for (int64_t i = 0; i < TILE; ++i)
      if (here >> i & 1) each[i] = w.zeros[at + i * w.groups];
    zero = _mm512_load_si512(each);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    const __m512i of_zeros = _mm512_mullo_epi32(zero, _mm512_set1_epi32(int(x.sums[r * x.groups + g])));
    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(c[r], of_zeros)), scale, sums[r]);
  }
}

// Columns `column` to `column + 15` for all rounded rows.
template <Kind KIND, int ROWS, class T>
WITH_BFLOAT16 WITH_INT8 void few_rows(const Problem<T>& p, const Rounded& x, int64_t column) {
  const Weight& w = p.w;
  const int64_t count = std::min(TILE, p.n - column), bytes = packed_bytes(KIND);
  const __mmask16 here = count < TILE ? (1 << count) - 1 : 0xffff;
  const __m512i across = _mm512_mullo_epi32(_mm512_set1_epi32(w.groups), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7,
                                                                                        6, 5, 4, 3, 2, 1, 0));
  const uint8_t* rows[TILE];
  for (int64_t i = 0; i < TILE; ++i) rows[i] = w.row<uint8_t>(column + std::min(i, count - 1));
  const int64_t ahead = p.n - column >= 2 * TILE ? TILE * w.stride : 0;
  __m512 sums[ROWS];
  __m512i c[ROWS];
  for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps(), c[r] = _mm512_setzero_si512();
  for (int64_t k = 0; k < p.k; k += 64) {
    const int64_t from = k / 64 * bytes;
    __m512i q[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; ++i) {
      q[i] = codes<KIND>(rows[i] + from);
      if (from % 64 < bytes) __builtin_prefetch(rows[i] + ahead + from, 0, 2);
    }
    Totals found[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const __m512i a = _mm512_loadu_si512(&x.x[r * x.stride + k]);
      found[r] = totals([&](int i) WITH_INT8 { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[i], a); },
                        w.group == 32);
    }
    if (w.group == 32) {
      for (int r = 0; r < ROWS; ++r) c[r] = found[r].low;
      add_column_group<ROWS>(w, x, column, across, here, k / 32, c, sums);
      for (int r = 0; r < ROWS; ++r) c[r] = found[r].high;
      add_column_group<ROWS>(w, x, column, across, here, k / 32 + 1, c, sums);
      continue;
    }
    for (int r = 0; r < ROWS; ++r) c[r] = _mm512_add_epi32(c[r], found[r].all);
    if ((k + 64) % w.group == 0) {
      add_column_group<ROWS>(w, x, column, across, here, k / w.group, c, sums);
      for (int r = 0; r < ROWS; ++r) c[r] = _mm512_setzero_si512();
    }
  }
  for (int64_t r = 0; r < ROWS; r += x.digits) {
    __m512 all = _mm512_setzero_ps();
    for (int64_t digit = r; digit < r + x.digits; ++digit)
      all = _mm512_fmadd_ps(sums[digit], _mm512_set1_ps(x.scales[digit]), all);
    if (p.bias) all = _mm512_add_ps(all, load(p.bias + column, here));
    store(p.out + r / x.digits * p.n + column, here, all);
  }
}

template <Kind KIND, class T>
void few_rows(const Problem<T>& p, const Rounded& x, int64_t column) {
  if (x.rows == 1)
    few_rows<KIND, 1>(p, x, column);
  else if (x.rows == 2)
    few_rows<KIND, 2>(p, x, column);
  else if (x.rows == 3)
    few_rows<KIND, 3>(p, x, column);
  else
    few_rows<KIND, 4>(p, x, column);
}

template <class T>
void linear_by_columns(const Problem<T>& p, const Rounded& x) {
  const auto f = p.w.kind == INT4 ? few_rows<INT4, T> : p.w.kind == INT3 ? few_rows<INT3, T> : few_rows<INT2, T>;
  const int64_t grain = std::max<int64_t>(1, (1 << 17) / std::max<int64_t>(1, p.k * TILE));
  at::parallel_for(0, (p.n + TILE - 1) / TILE, grain, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) f(p, x, i * TILE);
  });
}

template <class T>
void linear_rounded(const Problem<T>& p, int64_t digits, bool tiles) {
  Rounded x(p.m, digits, p.k, p.w.packed() ? p.w.groups : 1);
  at::parallel_for(0, p.m, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, p.k)), [&](int64_t i, int64_t end) {
    std::vector<float> wide, left;
    for (; i < end; ++i) round_row(p.x + i * p.stride, p.k, x, i, wide, left);
  });
  if (tiles && may_use_tiles() && p.w.packed() && x.rows <= FEW)
    linear_by_columns(p, x);
  else if (tiles && may_use_tiles())
    linear_by_int8_tiles(p, x);
  else
    linear_by_vectors(p, x);
}
#else
template <class T>
void linear_rounded(const Problem<T>&, int64_t, bool) {}  // never called
#endif

// Products of parts of the same rows.
template <class T>
void compute(const std::vector<Problem<T>>& problems, int64_t digits, bool tiles) {
  const Problem<T>&first = problems.front(), &last = problems.back();
  if (digits || (tiles && X86_512 && std::is_same_v<T, BFloat16> && first.k % 2 == 0)) {
    for (const Problem<T>& p : problems)
      if (digits)
        linear_rounded(p, digits, tiles);
      else if constexpr (std::is_same_v<T, BFloat16>)
        linear_by_tiles(p);
    return;
  }
#if X86_512
  if constexpr (std::is_same_v<T, BFloat16>)
    if (first.w.kind == SAME && first.k % 2 == 0 && multiplies_bfloat16()) return transposing::multiply(problems);
#endif
  if constexpr (std::is_same_v<T, float> || X86_512)
    if (std::is_same_v<T, float> || multiplies_bfloat16()) return linear<T, T>(problems, first.x, first.stride);
  const int64_t rows = last.first + last.m, k = first.k;
  std::vector<float> x(rows * k);
  for (int64_t i = 0; i < rows; ++i) widen(first.x + i * first.stride, k, &x[i * k]);
  linear<float, T>(problems, x.data(), k);
}


Optional contiguous(const Optional& x, at::ScalarType type) { return x ? Optional(x->to(type).contiguous()) : x; }

template <class T>
const T* data_of(const Optional& x) {
  return x ? static_cast<const T*>(x->const_data_ptr()) : nullptr;
}

template <class T>
void run(const at::Tensor& x, const at::Tensor& weight, const Optional& scales, const Optional& zeros,
         const Optional& bias, const at::Tensor& out, int64_t kind, int64_t group, int64_t digits, bool tiles) {
  const Weight w{weight.const_data_ptr(), Kind(kind % 8), weight.element_size(), weight.stride(0),
                 data_of<float>(scales), data_of<uint8_t>(zeros), group, group ? x.size(1) / group : 1, kind / 8};
  const Problem<T> p{static_cast<const T*>(x.const_data_ptr()), x.stride(0), w, data_of<T>(bias),
                     static_cast<T*>(out.data_ptr()), x.size(0), weight.size(0), x.size(1)};
  compute<T>({p}, digits, tiles);
}

// x and the result are of float or BFloat16, and so is the weight if it is not quantized. kind: a Kind, and 8 times the
// bits of CODES. digits: of int8 that
// rows of x are rounded to, if `rounds`: 1, 2, or 0 for as they are. tiles: BFloat16 and int8 are multiplied by tiles.
at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& weight, const Optional& scales, const Optional& zeros,
                       const Optional& bias, int64_t kind, int64_t group, int64_t digits, bool tiles) {
  const at::Tensor rows = in_rows(x), w = kind >= INT4 ? weight.contiguous() : in_rows(weight);
  at::Tensor out = at::empty({x.size(0), w.size(0)}, x.options());
  if (!out.numel()) return out;
  const auto f = x.scalar_type() == at::kBFloat16 ? run<BFloat16> : run<float>;
  f(rows, w, contiguous(scales, at::kFloat), contiguous(zeros, at::kByte), contiguous(bias, x.scalar_type()), out,
    kind, group, digits, tiles);
  return out;
}

// Groups of rows of x (m, k), each with a weight of (groups, n, k), or as `linear_rows` has them with a first dim of
// groups, and a bias of (groups, n) or none. of_row: the group of each row, not descending.
struct Groups {
  at::Tensor weight;
  Optional scales, zeros, bias;
  int64_t kind, group;  // group: numbers that share a scale

  Weight of(int64_t g, int64_t k) const {
    const auto part = [&](auto* x, const Optional& of) { return x ? x + g * of->stride(0) : nullptr; };
    const auto data = static_cast<const char*>(weight.const_data_ptr()) + g * weight.stride(0) * weight.element_size();
    return {data, Kind(kind % 8), weight.element_size(), weight.stride(1), part(data_of<float>(scales), scales),
            part(data_of<uint8_t>(zeros), zeros), group, group ? k / group : 1, kind / 8};
  }
};

template <class T>
void run_groups(const at::Tensor& x, const Groups& of, const at::Tensor& group, const at::Tensor& out, int64_t digits,
                bool tiles) {
  const int64_t m = x.size(0), n = of.weight.size(1), k = x.size(1);
  const auto of_row = group.const_data_ptr<int64_t>();
  std::vector<Problem<T>> problems;
  for (int64_t i = 0, end; i < m; i = end) {
    for (end = i; end < m && of_row[end] == of_row[i];) ++end;
    const int64_t g = of_row[i];
    TORCH_CHECK_INDEX(g >= 0 && g < of.weight.size(0), "group ", g, " of ", of.weight.size(0));
    problems.push_back({static_cast<const T*>(x.const_data_ptr()) + i * x.stride(0), x.stride(0), of.of(g, k),
                        of.bias ? data_of<T>(of.bias) + g * n : nullptr, static_cast<T*>(out.data_ptr()) + i * n,
                        end - i, n, k, i});
  }
  compute(problems, digits, tiles);
}

at::Tensor linear_groups(const at::Tensor& x, const at::Tensor& weight, const Optional& scales, const Optional& zeros,
                         const Optional& bias, const at::Tensor& of_row, int64_t kind, int64_t group, int64_t digits,
                         bool tiles) {
  const at::Tensor rows = in_rows(x), w = weight.stride(2) == 1 && kind < INT4 ? weight : weight.contiguous();
  at::Tensor out = at::empty({x.size(0), w.size(1)}, x.options());
  if (!out.numel()) return out;
  const Groups groups{w, contiguous(scales, at::kFloat), contiguous(zeros, at::kByte), bias, kind, group};
  const auto f = x.scalar_type() == at::kBFloat16 ? run_groups<BFloat16> : run_groups<float>;
  f(rows, groups, of_row, out, digits, tiles);
  return out;
}

// Whether rows of x can be rounded to int8.
bool rounds() { return multiplies_int8(); }

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(
      "linear_rows(Tensor x, Tensor weight, Tensor? scales, Tensor? zeros, Tensor? bias, int kind, int group, "
      "int digits, bool tiles) -> Tensor",
      linear_rows);
  library.def(
      "linear_groups(Tensor x, Tensor weight, Tensor? scales, Tensor? zeros, Tensor? bias, Tensor of_row, int kind, "
      "int group, int digits, bool tiles) -> Tensor",
      linear_groups);
  library.def("rounds() -> bool", rounds);
}

}  // namespace
