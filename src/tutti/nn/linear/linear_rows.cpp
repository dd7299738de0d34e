// Linear layers for few rows (linear_rows.py, linear_int8.py, linear_int4.py): out = x W^T + bias, with W (n, k) as it is
// stored.
//
// BFloat16 with instructions that add up pairs is multiplied as `transposing.h` says, rows that are rounded to int8 as
// `rounded.h` and, by tiles, `tiles.h` say. Otherwise the product of a row of x and a row of W is a vector of partial sums
// over k, which is summed up at the end: always in the same order, so a row of the result does not depend on the others.
// WIDE rows of W at a time stay in a cache while rows of x pass, up to TALL at a time. Weights of other types become
// floats or BFloat16 first, PIECE numbers of a row at a time. Threads share the rows of W.

#include <ATen/native/CPUBlas.h>

#include "weights.h"
#include "transposing.h"
#include "rounded.h"
#include "tiles.h"

namespace {

constexpr int WIDE = 8, TALL = N == 16 ? 3 : 1;
constexpr int64_t APART = PIECE + 32;
constexpr int64_t NEAR = 512 << 10;    // bytes of x that stay in a core's cache

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
  for_parts(tiles * problems.size(), grain, [&](int64_t begin, int64_t end) {
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
  for_parts(groups, 1, [&](int64_t g, int64_t end) {
    for (; g < end; ++g)
      pack(p.x + g * SQUARE * p.stride, p.stride, std::min(SQUARE, p.m - g * SQUARE), p.k, &x[g * each]);
  });
  for_parts((p.n + SQUARE - 1) / SQUARE, 1, [&](int64_t tile, int64_t end) {
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

// Products of rows that are rounded to int8.
template <class T>
void linear_rounded([[maybe_unused]] const Problem<T>& p, [[maybe_unused]] int64_t digits, [[maybe_unused]] bool tiles) {
#if X86_512  // otherwise it is never called
  if (tiles && may_use_tiles())
    linear_by_rounded_tiles(p, digits);
  else
    quads::multiply(p, digits);
#endif
}

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

// Set how many threads of their own the loops of this thread have; 0: those of OpenMP. Returns what it was.
int64_t own_threads(int64_t threads) {
  auto& pool = tutti_threads::Pool::shared();
  const int64_t before = pool.own();
  pool.set_own(threads);
  return before;
}

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
  library.def("own_threads(int threads) -> int", own_threads);
}

}  // namespace
