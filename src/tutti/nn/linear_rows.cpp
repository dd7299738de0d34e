// Linear layers for few rows (linear_rows.py, linear_quantized.py): out = x W^T + bias, with W (n, k) as it is stored.
//
// The product of a row of x and a row of W is a vector of partial sums over k, which is summed up at the end: always in
// the same order, so a row of the result does not depend on the others. WIDE rows of W at a time stay in a cache while
// rows of x pass, up to TALL at a time. Weights of other types become floats or BFloat16 first, PIECE numbers of a row
// at a time. Threads share the rows of W.

#include <ATen/native/CPUBlas.h>

namespace {


constexpr int WIDE = 8, TALL = N == 16 ? 3 : 1;
constexpr int64_t PIECE = 1024;      // numbers of a row of W that are copied or converted at once
constexpr int64_t APART = PIECE + 32;
constexpr int64_t NEAR = 512 << 10;  // bytes of x that stay in a core's cache

enum Kind { SAME, INT8, INT4 };

struct Weight {
  const void* data;      // (n, k) of the type of x or of int8; (n, k / 2) of pairs of int4
  Kind kind;
  int64_t size, stride;  // bytes of an element; elements between rows
  const float* scales;   // (n) of int8, (n, k / group) of int4
  const uint8_t* zeros;  // (n, k / group) of int4, or null: 8
  int64_t group;

  template <class T>
  const T* row(int64_t i) const { return static_cast<const T*>(data) + i * stride; }

  int64_t pair() const { return kind == INT4 ? 1 : 2 * size; }  // bytes of two numbers

  const char* at(int64_t i, int64_t k) const {
    return static_cast<const char*>(data) + i * stride * size + k * pair() / 2;
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

// Rows of weights that are needed next, `apart` bytes from each other, with two numbers in `pair` bytes.
struct Ahead {
  const char* data;
  int64_t rows, apart, pair;

  // Number k of each row, if it begins a line of a cache.
  void fetch(int64_t k) const {
    if (k * pair % 128) return;
    for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(data + i * apart + k * pair / 2, 0, 2);
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

float zero_of(const Weight& w, int64_t at) { return w.zeros ? w.zeros[at] : 8.f; }

// int4: 64 numbers in 32 bytes, whose low halves are the first 32 numbers
void widen_int4(const Weight& w, int64_t row, int64_t begin, int64_t count, float* y) {
  const uint8_t* x = w.row<uint8_t>(row) + begin / 2;
  const int64_t groups = w.stride * 2 / w.group;
  for (int64_t i = 0; i < count; i += 32) {
    const int64_t at = row * groups + (begin + i) / w.group;
    const float scale = w.scales[at], zero = zero_of(w, at);
    const uint8_t* block = x + i / 64 * 32;
    const int shift = i % 64 ? 4 : 0;
    for (int64_t j = 0; j < 32; ++j) y[i + j] = scale * (float((block[j] >> shift) & 15) - zero);
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

// By a table of the 16 numbers of a group.
WITH_BFLOAT16 void widen_int4(const Weight& w, int64_t row, int64_t begin, int64_t count, BFloat16* y) {
  const uint8_t* x = w.row<uint8_t>(row) + begin / 2;
  const int64_t groups = w.stride * 2 / w.group;
  const __m512 steps = _mm512_cvtepi32_ps(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  __m512i table = _mm512_setzero_si512();
  for (int64_t i = 0, known = -1; i < count; i += 64) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(x + i / 2));
    const __m512i pairs = _mm512_cvtepu8_epi16(bytes);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = row * groups + (begin + i + 32 * half) / w.group;
      if (at != known) {
        const __m512 zero = _mm512_set1_ps(zero_of(w, at));
        const __m512 values = _mm512_mul_ps(_mm512_set1_ps(w.scales[at]), _mm512_sub_ps(steps, zero));
        table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
        known = at;
      }
      const __m512i index = _mm512_and_si512(half ? _mm512_srli_epi16(pairs, 4) : pairs, _mm512_set1_epi16(15));
      _mm512_storeu_si512(y + i + 32 * half, _mm512_permutexvar_epi16(index, table));
    }
  }
}
#endif

// Numbers `begin` to `begin + count` of a row of W as C: in `copy` or, if they are of that type and `copy` is null,
// where they are stored.
template <class C, class T>
const C* numbers(const Weight& w, int64_t row, int64_t begin, int64_t count, C* copy) {
  if (w.kind == INT8)
    widen(w.row<int8_t>(row) + begin, count, copy);
  else if (w.kind == INT4)
    widen_int4(w, row, begin, count, copy);
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
    f(r, std::min<int64_t>(TALL, count - r), Ahead{p.w.at(row, at), rows, p.w.stride * p.w.size, p.w.pair()});
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

// Rows as int8 with a scale each, and the totals of their groups.
struct Rounded {
  int64_t stride, groups;
  std::vector<int8_t> x;
  std::vector<float> scales, sums;

  Rounded(int64_t rows, int64_t k, int64_t groups)
      : stride((k + 63) / 64 * 64), groups(groups), x(rows * stride), scales(rows), sums(rows * groups) {}
};

// A row, of which `wide` has room for a copy.
template <class T>
void round_row(const T* x, int64_t k, Rounded& to, int64_t row, std::vector<float>& wide) {
  wide.assign((k + N - 1) / N * N, 0.f);
  widen(x, k, wide.data());
  Floats top(0.f);
  for (int64_t i = 0; i < k; i += N) top = at::vec::maximum(top, Floats::loadu(&wide[i]).abs());
  const float most = greatest(top);
  to.scales[row] = most / 127.f;
  const Floats inverse(most > 0.f ? 127.f / most : 0.f);
  for (int64_t i = 0; i < k; i += N) (Floats::loadu(&wide[i]) * inverse).round().store(&wide[i]);
  const int64_t each = k / to.groups;
  for (int64_t g = 0; g < to.groups; ++g)
    to.sums[row * to.groups + g] =
        at::vec::reduce_all<float>([](Floats p, Floats q) { return p + q; }, &wide[g * each], each);
  narrow(wide.data(), k, &to.x[row * to.stride]);
}

#if X86_512
WITH_INT8 inline __m128i total(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Products of ROWS rows of x and WIDE rows of W of int8, offset by 128.
template <int ROWS, class T>
WITH_INT8 void multiply_int8(const Problem<T>& p, const Rounded& x, int64_t row, int64_t column, Ahead ahead) {
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
  alignas(16) float found[ROWS][WIDE];  // of all rows before `finish`: a call would take sums out of their registers
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r) {
    const __m128i offsets = _mm_set1_epi32(128 * int(x.sums[row + r]));
    const __m128i low = total(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    const __m128i high = total(sum[r][4], sum[r][5], sum[r][6], sum[r][7]);
    _mm_store_ps(found[r], _mm_cvtepi32_ps(_mm_sub_epi32(low, offsets)));
    _mm_store_ps(found[r] + 4, _mm_cvtepi32_ps(_mm_sub_epi32(high, offsets)));
  }
  for (int r = 0; r < ROWS; ++r) finish(p, row + r, column, found[r], x.scales[row + r]);
}

// The sum over groups of scale zero sum
WITH_INT8 inline float of_zeros(const float* scales, const uint8_t* zeros, const float* sums, int64_t groups) {
  __m512 all = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g += 16) {
    const __mmask16 here = groups - g >= 16 ? 0xffff : (1 << (groups - g)) - 1;
    const __m512 zero = zeros ? _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, zeros + g)))
                              : _mm512_set1_ps(8.f);
    all = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, scales + g), zero),
                          _mm512_maskz_loadu_ps(here, sums + g), all);
  }
  return _mm512_reduce_add_ps(all);
}

// The same of int4, each 32 numbers with a scale and a zero.
template <int ROWS, class T>
WITH_INT8 void multiply_int4(const Problem<T>& p, const Rounded& x, int64_t row, int64_t column, Ahead ahead) {
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
  const __m256i low = _mm256_set1_epi8(15);
  const int8_t* const from = &x.x[row * x.stride];
  const int64_t stride = x.stride, count = p.k, group = p.w.group;
  for (int64_t k = 0; k < count; k += 64) {
    ahead.fetch(k);
    __m512i a[ROWS];
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; ++r) a[r] = _mm512_loadu_si512(from + r * stride + k);
    const int64_t at = k / group, next = (k + 32) / group;
#pragma GCC unroll 8
    for (int i = 0; i < WIDE; ++i) {
      const __m256i pairs = _mm256_loadu_si256((const __m256i*)(w[i] + k / 2));
      const __m512i b = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(pairs, low)),
                                           _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low), 1);
      __m512 scale = _mm512_set1_ps(scales[i][at]);
      if (next != at) scale = _mm512_insertf32x8(scale, _mm256_set1_ps(scales[i][next]), 1);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; ++r)
        sum[r][i] = _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), b, a[r])), scale, sum[r][i]);
    }
  }
  float found[ROWS][WIDE];
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; ++r) {
    total(sum[r][0], sum[r][1], sum[r][2], sum[r][3], found[r]);
    total(sum[r][4], sum[r][5], sum[r][6], sum[r][7], found[r] + 4);
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int64_t i = 0; i < std::min<int64_t>(WIDE, p.n - column); ++i) {
      const uint8_t* zeros = p.w.zeros ? p.w.zeros + (column + i) * groups : nullptr;
      found[r][i] -= of_zeros(scales[i], zeros, &x.sums[(row + r) * groups], groups);
    }
    finish(p, row + r, column, found[r], x.scales[row + r]);
  }
}

template <int ROWS, class T>
void multiply_rounded(const Problem<T>& p, const Rounded& x, int64_t row, int64_t column, Ahead ahead) {
  if (p.w.kind == INT8)
    multiply_int8<ROWS, T>(p, x, row, column, ahead);
  else
    multiply_int4<ROWS, T>(p, x, row, column, ahead);
}

template <class T>
void linear_rounded(const Problem<T>& p) {
  Rounded x(p.m, p.k, p.w.kind == INT4 ? p.k / p.w.group : 1);
  at::parallel_for(0, p.m, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, p.k)), [&](int64_t i, int64_t end) {
    std::vector<float> wide;
    for (; i < end; ++i) round_row(p.x + i * p.stride, p.k, x, i, wide);
  });
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, p.k * WIDE));
  at::parallel_for(0, (p.n + WIDE - 1) / WIDE, grain, [&](int64_t i, int64_t end) {
    for (; i < end; ++i)
      passes(p, p.m, (i + 1) * WIDE, 0, [&](int64_t r, int64_t rows, Ahead ahead) {
        if (rows == 3)
          multiply_rounded<3>(p, x, r, i * WIDE, ahead);
        else if (rows == 2)
          multiply_rounded<2>(p, x, r, i * WIDE, ahead);
        else
          multiply_rounded<1>(p, x, r, i * WIDE, ahead);
      });
  });
}
#else
template <class T>
void linear_rounded(const Problem<T>&) {}  // never called
#endif

// Products of parts of the same rows.
template <class T>
void compute(const std::vector<Problem<T>>& problems, bool rounded, bool tiles) {
  const Problem<T>&first = problems.front(), &last = problems.back();
  if (rounded || (tiles && X86_512 && std::is_same_v<T, BFloat16> && first.k % 2 == 0)) {
    for (const Problem<T>& p : problems)
      if (rounded)
        linear_rounded(p);
      else if constexpr (std::is_same_v<T, BFloat16>)
        linear_by_tiles(p);
    return;
  }
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
         const Optional& bias, const at::Tensor& out, Kind kind, int64_t group, bool rounded, bool tiles) {
  const Weight w{weight.const_data_ptr(), kind, weight.element_size(), weight.stride(0), data_of<float>(scales),
                 data_of<uint8_t>(zeros), group};
  const Problem<T> p{static_cast<const T*>(x.const_data_ptr()), x.stride(0), w, data_of<T>(bias),
                     static_cast<T*>(out.data_ptr()), x.size(0), weight.size(0), x.size(1)};
  compute<T>({p}, rounded, tiles);
}

// x and the result are of float or BFloat16, and so is the weight if it is not of int8 or int4 (kind). rounded: rows of x are rounded to int8, if `rounds`. tiles: BFloat16 is multiplied by
// tiles.
at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& weight, const Optional& scales, const Optional& zeros,
                       const Optional& bias, int64_t kind, int64_t group, bool rounded, bool tiles) {
  const at::Tensor rows = in_rows(x), w = kind == INT4 ? weight.contiguous() : in_rows(weight);
  at::Tensor out = at::empty({x.size(0), w.size(0)}, x.options());
  if (!out.numel()) return out;
  const auto f = x.scalar_type() == at::kBFloat16 ? run<BFloat16> : run<float>;
  f(rows, w, contiguous(scales, at::kFloat), contiguous(zeros, at::kByte), contiguous(bias, x.scalar_type()), out,
    Kind(kind), group, rounded, tiles);
  return out;
}

// Groups of rows of x (m, k), each with a weight of (groups, n, k) and a bias of (groups, n) or none. group: of each
// row, not descending.
template <class T>
void run_groups(const at::Tensor& x, const at::Tensor& weight, const Optional& bias, const at::Tensor& group,
                const at::Tensor& out, bool tiles) {
  const int64_t m = x.size(0), n = weight.size(1), k = x.size(1);
  const auto of_row = group.const_data_ptr<int64_t>();
  std::vector<Problem<T>> problems;
  for (int64_t i = 0, end; i < m; i = end) {
    for (end = i; end < m && of_row[end] == of_row[i];) ++end;
    const int64_t g = of_row[i];
    TORCH_CHECK_INDEX(g >= 0 && g < weight.size(0), "group ", g, " of ", weight.size(0));
    const Weight w{static_cast<const T*>(weight.const_data_ptr()) + g * weight.stride(0), SAME, weight.element_size(),
                   weight.stride(1), nullptr, nullptr, 0};
    problems.push_back({static_cast<const T*>(x.const_data_ptr()) + i * x.stride(0), x.stride(0), w,
                        bias ? data_of<T>(bias) + g * n : nullptr, static_cast<T*>(out.data_ptr()) + i * n, end - i,
                        n, k, i});
  }
  compute(problems, false, tiles);
}

at::Tensor linear_groups(const at::Tensor& x, const at::Tensor& weight, const Optional& bias, const at::Tensor& group,
                         bool tiles) {
  const at::Tensor rows = in_rows(x), w = weight.stride(2) == 1 ? weight : weight.contiguous();
  at::Tensor out = at::empty({x.size(0), w.size(1)}, x.options());
  if (!out.numel()) return out;
  const auto f = x.scalar_type() == at::kBFloat16 ? run_groups<BFloat16> : run_groups<float>;
  f(rows, w, bias, group, out, tiles);
  return out;
}

// Whether rows of x can be rounded to int8.
bool rounds() { return multiplies_int8(); }

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(
      "linear_rows(Tensor x, Tensor weight, Tensor? scales, Tensor? zeros, Tensor? bias, int kind, int group, "
      "bool rounded, bool tiles) -> Tensor",
      linear_rows);
  library.def(
      "linear_groups(Tensor x, Tensor weight, Tensor? bias, Tensor group, bool tiles) -> Tensor", linear_groups);
  library.def("rounds() -> bool", rounds);
}

}  // namespace
