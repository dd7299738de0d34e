// Products of BFloat16 with weights as they are stored, (n, k), by instructions that add up pairs (AVX-512 BF16).
//
// 16 rows of W by 32 numbers are loaded and transposed in registers: a vector then has one pair of numbers of each of
// 16 rows, and is multiplied by that pair of a row of x. The sums of 16 results stay in one vector, and are added up
// in the order of k: a result has the same bits whatever the number of rows, columns, or threads. A few rows use the
// vectors at once, and read W only once; more of them store the vectors of DEPTH numbers of WIDTH columns, so that
// BLOCK rows at a time pass.

#if X86_512
namespace {
namespace transposing {

constexpr int64_t LANES = 16, DEPTH = 256, FEW_ROWS = 16, BLOCK = 8;
constexpr int64_t VECTORS = 2, WIDTH = VECTORS * LANES;
constexpr int64_t MOST = 512;  // rows whose sums a thread has at once
constexpr int64_t AHEAD = 1024;  // numbers of a row that are fetched before they are needed

using Product = Problem<BFloat16>;

WITH_BFLOAT16 inline __m512 add_pairs(__m512 sum, const BFloat16* pair, __m512i pairs) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)pairs);
}

// Numbers k to k + 31 of 16 rows, as 16 vectors of a pair of each row.
inline void transpose(const BFloat16* const* rows, int64_t k, __m512i* pairs) {
  transpose_16([&](int i) { return rows[i] + k; }, pairs);
}

// The same of the last `count` < 32 numbers of rows.
inline void transpose_last(const BFloat16* const* rows, int64_t k, int64_t count, __m512i* pairs) {
  BFloat16 copies[LANES][32];
  const BFloat16* copied[LANES];
  for (int i = 0; i < LANES; ++i) {
    _mm512_storeu_si512(copies[i], _mm512_maskz_loadu_epi16((1u << count) - 1, rows[i] + k));
    copied[i] = copies[i];
  }
  transpose(copied, 0, pairs);
}

// Round 16 sums of a row from `column` on.
WITH_BFLOAT16 inline void store_row(const Product& p, int64_t row, int64_t column, __m512 sums) {
  const __mmask16 here = p.n - column < LANES ? (1 << (p.n - column)) - 1 : 0xffff;
  if (p.bias) {
    const __m512i bias = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, p.bias + column));
    sums = _mm512_add_ps(sums, _mm512_castsi512_ps(_mm512_slli_epi32(bias, 16)));
  }
  _mm256_mask_storeu_epi16(p.out + row * p.n + column, here, (__m256i)_mm512_cvtneps_pbh(sums));
}

// 16 columns from `column` on, of ROWS rows of x, of which the first p.m are stored.
template <int ROWS>
WITH_BFLOAT16 void columns_of_few(const Product& p, int64_t column) {
  const BFloat16* rows[LANES];
  p.w.rows_from(column, p.n, rows);
  // numbers from those that are multiplied to those that are fetched: of the same rows, then of the next ones
  const int64_t same = std::min(AHEAD, (p.k + 31) / 32 * 32);
  const int64_t next = column + 2 * LANES <= p.n ? LANES * p.w.stride + same - p.k : 0;
  __m512 sums[ROWS];
  __m512i pairs[LANES];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps();
  const auto add = [&](int64_t k, int i) WITH_BFLOAT16 {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sums[r] = add_pairs(sums[r], p.x + r * p.stride + k + 2 * i, pairs[i]);
  };
  int64_t k = 0;
  for (; k + 32 <= p.k; k += 32) {
    const int64_t ahead = k + (k + same < p.k ? same : next);
    transpose(rows, k, pairs);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      __builtin_prefetch(rows[i] + ahead, 0, 2);
      add(k, i);
    }
  }
  if (k < p.k) {
    transpose_last(rows, k, p.k - k, pairs);
    for (int i = 0; 2 * i < p.k - k; ++i) add(k, i);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
    if (r < p.m) store_row(p, r, column, sums[r]);
}

// The DEPTH numbers of WIDTH rows of W that are transposed next, and how many lines of a cache of them are fetched. A
// position is found by arithmetic: a list that is walked through makes the loop around it 5 % slower.
struct Next {
  static constexpr int64_t LINES = DEPTH / 32;  // of a row
  const BFloat16* rows[WIDTH];
  int64_t line = 0;

  void fetch(int64_t at) const {
    if (line + at < WIDTH * LINES) __builtin_prefetch(rows[(line + at) / LINES] + (line + at) % LINES * 32, 0, 2);
  }
};

// Add up `count` pairs of ROWS rows of x and WIDTH columns. sums: (ROWS, WIDTH), which begin with `first`. lines: to
// fetch of those that are needed next.
template <int ROWS>
WITH_BFLOAT16 void add_block(const BFloat16* x, int64_t stride, const __m512i* pairs, int64_t count, bool first,
                             float* to, const Next& next, int64_t lines) {
  __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v)
      sums[r][v] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to + r * WIDTH + v * LANES);
  for (int64_t i = 0; i < count; ++i) {
    if (i < lines) next.fetch(i);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        sums[r][v] = add_pairs(sums[r][v], x + r * stride + 2 * i, pairs[i * VECTORS + v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(to + r * WIDTH + v * LANES, sums[r][v]);
}

template <int ROWS>
void add_rows(int64_t rows, const BFloat16* x, int64_t stride, const __m512i* pairs, int64_t count, bool first,
              float* to, const Next& next, int64_t lines) {
  if (rows == ROWS) return add_block<ROWS>(x, stride, pairs, count, first, to, next, lines);
  if constexpr (ROWS > 1) add_rows<ROWS - 1>(rows, x, stride, pairs, count, first, to, next, lines);
}

// Where a thread has DEPTH numbers of WIDTH columns of W, and sums.
struct Panel {
  std::vector<__m512i> pairs;
  std::vector<float> sums;

  Panel() : pairs(DEPTH / 2 * VECTORS), sums(MOST * WIDTH) {}
};

// WIDTH columns from `column` on, of `count` rows of x from `first` on.
WITH_BFLOAT16 inline void columns_of_many(const Product& p, int64_t first, int64_t count, int64_t column, Panel& panel) {
  const int64_t blocks = (count + BLOCK - 1) / BLOCK, lines = (WIDTH * Next::LINES + blocks - 1) / blocks;
  for (int64_t k = 0; k < p.k; k += DEPTH) {
    const int64_t depth = std::min(DEPTH, p.k - k);
    const bool more = k + DEPTH < p.k;
    Next next;
    for (int64_t i = 0; i < WIDTH; ++i)
      next.rows[i] = p.w.row<BFloat16>(std::min(column + i + (more ? 0 : WIDTH), p.n - 1)) + (more ? k + DEPTH : 0);
    for (int64_t v = 0; v < VECTORS; ++v) {
      const BFloat16* rows[LANES];
      __m512i pairs[LANES];
      p.w.rows_from(column + v * LANES, p.n, rows);
      for (int64_t i = 0; i < depth; i += 32) {
        if (depth - i >= 32)
          transpose(rows, k + i, pairs);
        else
          transpose_last(rows, k + i, depth - i, pairs);
        for (int64_t j = 0; j < std::min(LANES, (depth - i) / 2); ++j)
          panel.pairs[(i / 2 + j) * VECTORS + v] = pairs[j];
      }
    }
    for (int64_t r = 0; r < count; r += BLOCK, next.line += lines)
      add_rows<BLOCK>(std::min(BLOCK, count - r), p.x + (first + r) * p.stride + k, p.stride, panel.pairs.data(),
                      depth / 2, k == 0, &panel.sums[r * WIDTH], next, lines);
  }
  for (int64_t r = 0; r < count; ++r)
    for (int64_t v = 0; v < VECTORS && column + v * LANES < p.n; ++v)
      store_row(p, first + r, column + v * LANES, _mm512_loadu_ps(&panel.sums[r * WIDTH + v * LANES]));
}

// The function for up to `rows` rows, and how many rows of x it reads.
using Columns = void (*)(const Product&, int64_t);
inline std::pair<Columns, int64_t> few_columns(int64_t rows) {
  if (rows <= 1) return {columns_of_few<1>, 1};
  if (rows <= 2) return {columns_of_few<2>, 2};
  if (rows <= 3) return {columns_of_few<3>, 3};
  if (rows <= 4) return {columns_of_few<4>, 4};
  if (rows <= 6) return {columns_of_few<6>, 6};
  if (rows <= 8) return {columns_of_few<8>, 8};
  if (rows <= 12) return {columns_of_few<12>, 12};
  return {columns_of_few<FEW_ROWS>, FEW_ROWS};
}

// Copies of x for products with few rows: with as many rows as are read, and not a power of two apart, so that they do
// not compete for the same lines of a cache.
struct Copies {
  std::vector<BFloat16> x;

  static bool wanted(const Product& p) {
    return p.m <= FEW_ROWS && (few_columns(p.m).second != p.m || (p.m > 4 && p.stride % 1024 == 0));
  }

  explicit Copies(std::vector<Product>& products) {
    int64_t rows = 0;
    for (const Product& p : products) rows += wanted(p) ? few_columns(p.m).second : 0;
    const int64_t k = products[0].k, stride = (k + 31) / 32 * 32 + 32;
    x.resize(rows * stride);
    BFloat16* to = x.data();
    for (Product& p : products) {
      if (!wanted(p)) continue;
      for (int64_t r = 0; r < p.m; ++r) std::copy_n(p.x + r * p.stride, k, to + r * stride);
      p.x = to, p.stride = stride;
      to += few_columns(p.m).second * stride;
    }
  }
};

// Products of equal n and even k.
[[maybe_unused]] void multiply(std::vector<Product> products) {
  const Copies copies(products);
  const int64_t n = products[0].n, k = products[0].k, panels = (n + WIDTH - 1) / WIDTH;
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * WIDTH));
  take_parts(panels * products.size(), grain, [&](auto take) {
    std::optional<Panel> panel;
    for (int64_t begin, end; take(begin, end);)
      for (int64_t last; begin < end; begin = last) {
        const Product& p = products[begin / panels];
        const int64_t before = begin / panels * panels;
        last = std::min(end, before + panels);
        if (p.m <= FEW_ROWS) {
          const Columns columns = few_columns(p.m).first;
          for (int64_t at = (begin - before) * WIDTH; at < std::min((last - before) * WIDTH, n); at += LANES)
            columns(p, at);
          continue;
        }
        if (!panel) panel.emplace();
        for (int64_t r = 0; r < p.m; r += MOST)
          for (int64_t at = (begin - before) * WIDTH; at < std::min((last - before) * WIDTH, n); at += WIDTH)
            columns_of_many(p, r, std::min(MOST, p.m - r), at, *panel);
      }
  });
}

}  // namespace transposing
}  // namespace
#endif
