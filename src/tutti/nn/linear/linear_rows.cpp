// Linear layers for few rows (linear_rows.py, linear_int8.py, linear_int4.py): out = x W^T + bias, with W (n, k) as it
// is stored.
//
// The product of a row of x and a row of W is a vector of partial sums over k, which is summed up at the end: always in
// the same order, so a row of the result does not depend on the others. WIDE rows of W at a time stay in a cache while
// rows of x pass. Weights of other types become floats or BFloat16 first, PIECE numbers of a row at a time, and so does
// BFloat16 for many rows of x where the processor cannot multiply it. Threads share the rows of W. Where the processor
// has tiles (AMX), BFloat16 is multiplied as `bfloat16_tiles.h` says. Rows that are rounded to int8 are multiplied as
// `rounded.h` and, by tiles, `tiles.h` say.

#include "weights.h"
#include "rounded.h"
#include "tiles.h"
#include "bfloat16_tiles.h"

namespace {

constexpr int64_t WIDE = 8;          // rows of W that are multiplied together
constexpr bool MANY = N == 16;       // registers, for several rows of x

// Rows of x that are multiplied together. Of more than 3 rows, halves of WIDE rows of W are multiplied one after the
// other: registers hold 24 sums. Where each vector of W must be split, more rows share the work.
template <class X, class W>
constexpr int64_t TALL = !MANY ? 1 : std::is_same_v<X, W> ? 3 : 6;

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

// Weights that are needed next: `bytes` of each of `rows` rows, `apart` bytes from each other. They are fetched in the
// order of memory, into the nearest cache. Rows side by side would be as many streams, which are read more slowly.
struct Next {
  const char* row;
  int64_t rows, bytes, apart, at = 0;

  // Fetch LINES lines of a cache. After the last row, the last ones are fetched again.
  template <int LINES>
  inline __attribute__((always_inline)) void fetch() {
#pragma GCC unroll 8
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(row + at + 64 * i, 0, 3);
    if (!LINES || (at += 64 * LINES) < bytes) return;
    if (--rows > 0)
      row += apart, at = 0;
    else
      at -= 64 * LINES;
  }
};

// COUNT numbers of a row of x and of a row of W that are multiplied at once, all or the first few of them, in PARTS,
// and what their products are added to. X, W: how the rows are stored.
template <class X, class W>
struct Lanes;

#if X86_512
template <>
struct Lanes<float, float> {
  using Vector = __m512;
  using Sum = __m512;
  static constexpr int64_t COUNT = 16, PARTS = 1;
  static inline Vector load(const float* x, int64_t) { return _mm512_loadu_ps(x); }
  static inline Vector load(const float* x, int64_t, int64_t few) { return _mm512_maskz_loadu_ps((1 << few) - 1, x); }
  static inline Sum add(Sum sum, Vector x, Vector w) { return _mm512_fmadd_ps(x, w, sum); }
};

template <>
struct Lanes<BFloat16, BFloat16> {
  using Vector = __m512i;
  using Sum = __m512;
  static constexpr int64_t COUNT = 32, PARTS = 1;
  static inline Vector load(const BFloat16* x, int64_t) { return _mm512_loadu_si512(x); }
  static inline Vector load(const BFloat16* x, int64_t, int64_t few) {
    return _mm512_maskz_loadu_epi16((1u << few) - 1, x);
  }
  WITH_BFLOAT16 static inline Sum add(Sum sum, Vector x, Vector w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
  }
};

// Of processors without instructions for BFloat16, which become floats without shuffles: first those at even places of
// each 32, and then the others. Rows of x are `split`. GCC would store what it loads for both parts, and copy the sums
// of the intrinsic.
template <>
struct Lanes<float, BFloat16> {
  using Vector = __m512;
  using Sum = __m512;
  static constexpr int64_t COUNT = 32, PARTS = 2;
  static inline Vector load(const float* x, int64_t part, int64_t = 0) { return _mm512_loadu_ps(x + 16 * part); }
  static inline Vector load(const BFloat16* w, int64_t part) {
    __m512 x;
    const auto& from = *reinterpret_cast<const __m512i_u*>(w);
    if (part)
      asm("vpandd %1, %2, %0" : "=v"(x) : "m"(from), "v"(_mm512_set1_epi32(0xffff0000)));
    else
      asm("vpslld $16, %1, %0" : "=v"(x) : "m"(from));
    return x;
  }
  static inline Vector load(const BFloat16* w, int64_t part, int64_t few) {
    return half(_mm512_maskz_loadu_epi16((1u << few) - 1, w), part);
  }
  static inline Sum add(Sum sum, Vector x, Vector w) {
    asm("vfmadd231ps %1, %2, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
  static inline Vector half(__m512i w, int64_t part) {
    return _mm512_castsi512_ps(part ? _mm512_and_si512(w, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(w, 16));
  }
};

// In a register: GCC would load a vector again for each product with it.
template <class V>
inline void keep(V& x) {
  asm("" : "+v"(x));
}
#else
template <>
struct Lanes<float, float> {
  using Vector = Floats;
  using Sum = Floats;
  static constexpr int64_t COUNT = N, PARTS = 1;
  static inline Vector load(const float* x, int64_t) { return Floats::loadu(x); }
  static inline Vector load(const float* x, int64_t, int64_t few) { return Floats::loadu(x, few); }
  static inline Sum add(Sum sum, Vector x, Vector w) { return at::vec::fmadd(x, w, sum); }
};

inline void keep(Floats&) {}
#endif

// Where the sums of products are. Partial sums are vectors.
struct Sums {
  float *partial, *totals;  // (rows, WIDE, N), (rows, width)
  int64_t width;
};

// How many products follow one another, and the numbers from one to the next in each operand.
struct Steps {
  int64_t count, x, w, partial, totals;
};

// Multiply ROWS rows of x by WIDE rows of W, and so on with other rows. LINES: of what is next that are fetched with
// every vector of a row.
template <int ROWS, int LINES, class X, class W>
WITH_BFLOAT16 __attribute__((noinline)) void multiply(const X* x, int64_t stride, const W* w, int64_t apart,
                                                      Steps steps, Part part, Sums to, Next& fetched) {
  using L = Lanes<X, W>;
  constexpr int64_t COLUMNS = ROWS > 3 ? 4 : WIDE;
  Next next = fetched;  // in registers
  for (; steps.count; --steps.count) {
#pragma GCC unroll 1
    for (int64_t column = 0; column < WIDE; column += COLUMNS) {
      const W* rows = w + column * apart;
      float *partial = to.partial + column * N, *totals = to.totals + column;
      typename L::Sum sum[ROWS][COLUMNS];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < COLUMNS; ++i)
          sum[r][i] = typename L::Sum(part.first ? Floats(0.f) : Floats::loadu(partial + (r * WIDE + i) * N));
      const W* beyond = rows + 4 * apart;
      const auto add = [&](int64_t k, auto load) WITH_BFLOAT16 __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int half = 0; half < L::PARTS; ++half) {
          typename L::Vector a[ROWS];
#pragma GCC unroll 6
          for (int r = 0; r < ROWS; ++r) keep(a[r] = load(x + r * stride + k, half));
#pragma GCC unroll 8
          for (int i = 0; i < COLUMNS; ++i) {
            typename L::Vector b = load((i < 4 ? rows : beyond) + i % 4 * apart + k, half);
            keep(b);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) sum[r][i] = L::add(sum[r][i], a[r], b);
          }
        }
      };
      int64_t k = 0;
      const auto whole = [](auto from, int half) WITH_BFLOAT16 __attribute__((always_inline)) {
        return L::load(from, half);
      };
      for (; k + L::COUNT <= part.count; k += L::COUNT) {
        next.template fetch<LINES>();
        add(k, whole);
      }
      const int64_t left = part.count - k;
      const auto few = [&](auto from, int half) WITH_BFLOAT16 __attribute__((always_inline)) {
        return L::load(from, half, left);
      };
      if (left) add(k, few);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < COLUMNS; ++i)
          if (!part.last)
            Floats(sum[r][i]).store(partial + (r * WIDE + i) * N);
          else if (i % 4 == 0)
            total(sum[r][i], sum[r][i + 1], sum[r][i + 2], sum[r][i + 3], totals + r * to.width + i);
    }
    x += steps.x, w += steps.w, to.partial += steps.partial, to.totals += steps.totals;
  }
  fetched = next;
}

template <class X, class W>
using Multiply = void (*)(const X*, int64_t, const W*, int64_t, Steps, Part, Sums, Next&);

template <int ROWS, class X, class W>
Multiply<X, W> multiply_fetching(int64_t lines) {
  if (lines >= 8) return multiply<ROWS, 8, X, W>;
  if (lines >= 4) return multiply<ROWS, 4, X, W>;
  if (lines >= 2) return multiply<ROWS, 2, X, W>;
  return lines ? multiply<ROWS, 1, X, W> : multiply<ROWS, 0, X, W>;
}

// rows: up to TALL
template <class X, class W>
Multiply<X, W> multiply_of(int64_t rows, int64_t lines) {
  if constexpr (TALL<X, W> > 3) {
    if (rows == 6) return multiply_fetching<6, X, W>(lines);
    if (rows == 5) return multiply_fetching<5, X, W>(lines);
    if (rows == 4) return multiply_fetching<4, X, W>(lines);
  }
  if constexpr (TALL<X, W> > 1) {
    if (rows == 3) return multiply_fetching<3, X, W>(lines);
    if (rows == 2) return multiply_fetching<2, X, W>(lines);
  }
  return multiply_fetching<1, X, W>(lines);
}

// ---- the product ----------------------------------------------------------------------------------------------------

// `count` numbers of a row of the result, from `column` on. sums: of products, one a column
template <class T>
void finish(const Problem<T>& p, int64_t row, int64_t column, int64_t count, const float* sums) {
  T* out = p.out + row * p.n + column;
#if X86_512
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 here = count - i < 16 ? (1 << (count - i)) - 1 : 0xffff;
    store(out + i, here, finished(p, column + i, here, _mm512_maskz_loadu_ps(here, sums + i)));
  }
#else
  for (int64_t i = 0; i < count; ++i) {
    const float y = p.w.kind == INT8 ? sums[i] * p.w.scales[column + i] : sums[i];
    out[i] = p.bias ? T(y + float(p.bias[column + i])) : T(y);
  }
#endif
}

// Where a piece of a panel begins in W.
struct Place {
  int64_t row, k;
};

template <class T>
Next from(const Problem<T>& p, Place place, int64_t rows, int64_t piece) {
  const int64_t bytes = std::min(piece, p.k - place.k) * p.w.bytes() / 64;
  return {p.w.at(place.row, place.k), std::min(rows, p.n - place.row), bytes, p.w.stride * p.w.size};
}

// Multiply `count` rows of x by a piece of a panel. Weights of other types are copied, and so are the last rows of W if
// there are fewer than WIDE.
template <class X, class W, class T>
void add_piece(const Problem<T>& p, const X* x, int64_t stride, int64_t count, Place place, int64_t piece, Next next,
               std::vector<W>& copies, Sums sums) {
  constexpr int64_t TALL = ::TALL<X, W>;
  const int64_t here = std::min(piece, p.k - place.k);
  const bool is_split = X86_512 && p.w.kind == SAME && !std::is_same_v<W, T>;
  const Part part{is_split ? whole(here) : here, place.k == 0, place.k + piece >= p.k};
  const bool copied = p.w.kind != SAME || !std::is_same_v<W, T> || place.row + WIDE > p.n;
  const int64_t apart = copied ? piece + 32 : p.w.stride, times = (count + TALL - 1) / TALL;
  const int64_t lines = next.rows < 1 ? 0 : times == 1 ? 8 : times < 4 ? 4 : times < 8 ? 2 : 1;
  if (copied) copies.resize(WIDE * apart);
  for (int64_t i = 0; copied && i < WIDE; ++i)
    numbers<W, T>(p.w, std::min(place.row + i, p.n - 1), place.k, here, &copies[i * apart]);
  const W* w = copied ? copies.data() : p.w.template row<W>(place.row) + place.k;
  for (int64_t r = 0; r < count;) {
    const int64_t rows = std::min(TALL, count - r), groups = (count - r) / rows;
    const Steps steps{groups, rows * stride, 0, rows * WIDE * N, rows * sums.width};
    multiply_of<X, W>(rows, lines)(x + r * stride + place.k, stride, w, apart, steps, part,
                                {sums.partial + r * WIDE * N, sums.totals + r * sums.width, sums.width}, next);
    r += groups * rows;
  }
}

// Columns `begin` to `end` of rows `first` to `first + count`. x: of the first row. A few rows pass the panels of W one
// after another; more of them pass pieces of several panels, so that they stay in a cache.
template <class X, class W, class T>
void columns(const Problem<T>& p, const X* x, int64_t stride, int64_t first, int64_t count, int64_t begin,
             int64_t end) {
  constexpr int64_t TALL = ::TALL<X, W>;
  const bool stored = p.w.kind == SAME && std::is_same_v<W, T>, once = stored && count <= TALL, many = count > 8 * TALL;
  const int64_t width = WIDE * (once ? 64 : 4), together = many ? width : WIDE;
  const int64_t piece = stored && many ? 4 * PIECE / int64_t(sizeof(X)) : PIECE;
  std::vector<W> copies;
  std::vector<float> partial(p.k > piece ? count * together * N : 0), totals(count * width);
  for (int64_t column = begin; column < end; column += width) {
    const int64_t last = std::min(end, column + width), panels = once ? (std::min(last, p.n) - column) / WIDE : 0;
    if (panels) {
      Next next = from(p, {column + WIDE, 0}, panels * WIDE, p.k);
      multiply_of<X, W>(count, next.rows > 0 ? 8 : 0)(
          x, stride, p.w.template row<W>(column), p.w.stride, {panels, 0, WIDE * p.w.stride, 0, WIDE},
          {p.k, true, true}, {nullptr, totals.data(), width}, next);
    }
    for (int64_t group = column + panels * WIDE, after; group < last; group = after) {
      after = std::min(last, group + together);
      for (int64_t k = 0; k < p.k; k += piece)
        for (int64_t i = group; i < after; i += WIDE) {
          const Place next = i + WIDE < after  ? Place{i + WIDE, k}
                             : k + piece < p.k ? Place{group, k + piece}
                                               : Place{after, 0};
          add_piece<X, W, T>(p, x, stride, count, {i, k}, piece, from(p, next, WIDE, piece), copies,
                          {partial.data() + (i - group) * count * N, &totals[i - column], width});
        }
    }
    for (int64_t r = 0; r < count; ++r) finish(p, first + r, column, last - column, &totals[r * width]);
  }
}

// Several products with as many columns, of rows of x that are X and rows of W that are, or become, W.
template <class X, class W, class T>
void linear(const std::vector<Problem<T>>& problems, const X* x, int64_t stride) {
  const int64_t k = problems[0].k, n = problems[0].n, tiles = (n + WIDE - 1) / WIDE;
  const int64_t rows = std::max<int64_t>(96, NEAR / (sizeof(X) * std::max<int64_t>(k, 1)) / 6 * 6);  // 6: of any TALL
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * WIDE));
  for_parts(tiles * problems.size(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t last; begin < end; begin = last) {
      const Problem<T>& p = problems[begin / tiles];
      const int64_t before = begin / tiles * tiles;
      last = std::min(end, before + tiles);
      for (int64_t r = 0; r < p.m; r += rows) {
        const int64_t count = std::min(rows, p.m - r);  // many rows of x are worth rows of W of their type
        (count > 8 * TALL<X, W> ? columns<X, X, T> : columns<X, W, T>)(
            p, x + (p.first + r) * stride, stride, r, count, (begin - before) * WIDE,
            std::min((last - before) * WIDE, n));
      }
    }
  });
}

// Products of rows that are rounded to int8.
template <class T>
void linear_rounded([[maybe_unused]] const Problem<T>& p, [[maybe_unused]] int64_t digits,
                    [[maybe_unused]] bool tiles) {
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
  const Problem<T>& first = problems.front();
  const Problem<T>& last = problems.back();
  if (digits) {
    for (const Problem<T>& p : problems) linear_rounded(p, digits, tiles);
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    linear<T, T>(problems, first.x, first.stride);
  } else {
    const int64_t rows = last.first + last.m, k = first.k, stride = k / 32 * 32 + 64;
    std::unique_ptr<float[]> x;
    const auto floats = [&](auto widened) {
      x.reset(new float[rows * stride]);
      for (int64_t i = 0; i < rows; ++i) widened(first.x + i * first.stride, k, &x[i * stride]);
      return x.get();
    };
#if X86_512
    if (tiles && may_use_tiles()) return by_tiles::multiply(problems);
    if (multiplies_bfloat16()) return linear<T, T>(problems, first.x, first.stride);
    if (first.w.kind == SAME) return linear<float, T>(problems, floats(split), stride);
#endif
    linear<float, float>(problems, floats([](const T* from, int64_t n, float* y) { widen(from, n, y); }), stride);
  }
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
// bits of CODES. digits: of int8 that rows of x are rounded to, if `rounds`: 1, 2, or 0 for as they are. tiles:
// BFloat16 and int8 are multiplied by tiles.
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
