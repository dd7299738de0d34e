// Rows of x rounded to int8, and their products with weights of int8 and packed numbers by instructions that add up
// products of quads of bytes (AVX-512 VNNI).
//
// 16 rows of W are transposed in registers as they are stored: a vector then has a quad of codes of each of 16 rows, and
// is multiplied by that quad of a row of x. The codes of DEPTH numbers of WIDTH columns are stored, so that BLOCK rounded
// rows at a time pass. Products are summed in integers within a group, less the zeros of its codes, and in floats over
// the groups in their order: a result has the same bits whatever the number of rows, columns, or threads.

#if X86_512
namespace {

// Rows as int8, their scales, and the totals of their groups. With two digits a row becomes two, whose second is what
// is left of FINER times, so that their sum has 16 bits.
constexpr int FINER = 256;
constexpr int64_t UNUSED = 8;  // rows of zeros in the end, which functions for a few rows may read

struct Rounded {
  int64_t digits, rows, stride, groups;
  std::vector<int8_t> x;
  std::vector<float> scales, sums;

  // group: numbers whose total is needed
  Rounded(int64_t m, int64_t digits, int64_t k, int64_t group)
      : digits(digits), rows(m * digits), stride((k + 63) / 64 * 64), groups((k + group - 1) / group),
        x((rows + UNUSED) * stride), scales(rows), sums(rows * groups) {}
};

// Round a row. `group` is a multiple of 16, or k.
template <class T>
WITH_INT8 void round_row(const T* x, int64_t k, int64_t group, Rounded& to, int64_t row) {
  const auto some = [&](int64_t i) -> __mmask16 { return k - i < 16 ? (1 << (k - i)) - 1 : 0xffff; };
  Floats top(0.f);
  for (int64_t i = 0; i < k; i += 16) top = at::vec::maximum(top, Floats(load(x + i, some(i))).abs());
  const float most = greatest(top);
  const __m512 inverse = _mm512_set1_ps(most > 0.f ? 127.f / most : 0.f), finer = _mm512_set1_ps(FINER);
  const int64_t at = row * to.digits;
  to.scales[at] = most / 127.f;
  if (to.digits == 2) to.scales[at + 1] = most / (127.f * FINER);
  for (int64_t g = 0; g < to.groups; ++g) {
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const auto put = [&](int digit, int64_t i, __m512i numbers) WITH_INT8 {
      sums[digit] = _mm512_add_epi32(sums[digit], numbers);
      _mm512_mask_cvtsepi32_storeu_epi8(&to.x[(at + digit) * to.stride + i], some(i), numbers);
    };
    for (int64_t i = g * group; i < std::min(k, (g + 1) * group); i += 16) {
      const __m512 exact = _mm512_mul_ps(load(x + i, some(i)), inverse);
      const __m512i near = _mm512_cvtps_epi32(exact);
      put(0, i, near);
      if (to.digits == 1) continue;
      const __m512 left = _mm512_mul_ps(_mm512_sub_ps(exact, _mm512_cvtepi32_ps(near)), finer);
      put(1, i, _mm512_min_epi32(_mm512_cvtps_epi32(left), _mm512_set1_epi32(127)));
    }
    for (int64_t digit = 0; digit < to.digits; ++digit)
      to.sums[(at + digit) * to.groups + g] = float(_mm512_reduce_add_epi32(sums[digit]));
  }
}

template <class T>
Rounded round_rows(const Problem<T>& p, int64_t digits, int64_t group) {
  Rounded x(p.m, digits, p.k, group);
  for_parts(p.m, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, p.k)), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) round_row(p.x + i * p.stride, p.k, group, x, i);
  });
  return x;
}

namespace quads {

constexpr int64_t LANES = 16, DEPTH = 256;
constexpr int64_t VECTORS = 2, WIDTH = VECTORS * LANES;
constexpr int64_t BLOCK = 8;     // rounded rows that are multiplied at once
constexpr int64_t MOST = 512;    // rows whose sums a thread has at once
constexpr int64_t AHEAD = 2048;  // bytes of a row that are fetched before they are needed
static_assert(FINER == 1 << 8 && 255LL * (127 * FINER + 128) * DEPTH < 1LL << 31);

// What is multiplied: W (n, k), rounded rows, and the totals of their groups, whose digits are added up: (m, groups).
// starts: what the sums of a group begin with: minus what a zero that all codes share adds to them.
struct Product {
  const Weight& w;
  int64_t n, k, group;
  const Rounded& x;
  std::vector<float> totals;
  std::vector<int32_t> starts;

  Product(const Weight& w, int64_t n, int64_t k, int64_t group, const Rounded& x)
      : w(w), n(n), k(k), group(group), x(x), totals((x.rows / x.digits + BLOCK) * std::max<int64_t>(1, x.groups)),
        starts(totals.size()) {
    const int32_t zero = w.zeros ? 0 : w.kind == INT8 ? 128 : w.zero(0);
    for (int64_t row = 0; row < x.rows; ++row)
      for (int64_t g = 0; g < x.groups; ++g) {
        const int64_t at = row / x.digits * x.groups + g;
        totals[at] = totals[at] * FINER + x.sums[row * x.groups + g];
        if (std::abs(totals[at]) <= 1 << 23) starts[at] = -zero * int32_t(totals[at]);  // else x is not finite
      }
  }

  // How far from byte `at` of a row the byte is that is fetched: of the same rows, then of those LANES further on.
  int64_t ahead(int64_t at) const {
    const int64_t bytes = (w.stride + 63) / 64 * 64, same = std::min(AHEAD, bytes);
    return at + same < bytes ? same : LANES * w.stride + same - bytes;
  }
};

// The scales of KEPT groups of 16 columns, and their products with zeros of their own.
struct Groups {
  static constexpr int64_t KEPT = 16;
  __m512 scales[KEPT], offsets[KEPT];

  // Those of group g and the ones after it.
  WITH_INT8 void load(const Product& p, int64_t column, int64_t g) {
    const Weight& w = p.w;
    if (w.kind == INT8) {  // a single scale
      const int64_t count = std::clamp<int64_t>(p.n - column, 0, LANES);
      scales[0] = _mm512_maskz_loadu_ps((1 << count) - 1, w.scales + column);
      return;
    }
    const __mmask16 here = (1 << std::min(KEPT, w.groups - g)) - 1;
    alignas(64) float copies[LANES][KEPT], products[LANES][KEPT];
    for (int64_t i = 0; i < LANES; ++i) {
      const int64_t at = std::min(column + i, p.n - 1) * w.groups + g;
      const __m512 of_row = _mm512_maskz_loadu_ps(here, w.scales + at);
      _mm512_store_ps(copies[i], of_row);
      if (w.zeros) {
        const __m512i zeros = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, w.zeros + at));
        _mm512_store_ps(products[i], _mm512_mul_ps(of_row, _mm512_cvtepi32_ps(zeros)));
      }
    }
    transpose_16([&](int i) { return copies[i]; }, reinterpret_cast<__m512i*>(scales));
    if (w.zeros) transpose_16([&](int i) { return products[i]; }, reinterpret_cast<__m512i*>(offsets));
  }
};

// The codes of numbers k to k + 63 of 16 rows, as 16 vectors of a quad of each row. count: numbers from k on
template <Kind KIND>
WITH_INT8 inline void load_quads(const uint8_t* const* rows, int64_t k, int64_t count, __m512i* quads) {
  const int64_t at = KIND == INT8 ? k : k / 64 * packed_bytes(KIND);
  if (KIND == INT4) {
    __m512i halves[8];
    transpose_16<2>([&](int i) { return rows[i] + at; }, halves);
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      quads[i] = _mm512_and_si512(halves[i], low);
      quads[i + 8] = _mm512_and_si512(_mm512_srli_epi16(halves[i], 4), low);
    }
    return;
  }
  if (KIND == INT8 && count >= 64) {
    transpose_16([&](int i) { return rows[i] + at; }, quads);
  } else {
    alignas(64) uint8_t copies[LANES][64];
    for (int64_t i = 0; i < LANES; ++i)
      if constexpr (KIND == INT8)
        _mm512_store_si512(copies[i], _mm512_maskz_loadu_epi8((1ull << count) - 1, rows[i] + at));
      else
        _mm512_store_si512(copies[i], codes<KIND>(rows[i] + at));
    transpose_16([&](int i) { return copies[i]; }, quads);
  }
  if (KIND == INT8)
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) quads[i] = _mm512_xor_si512(quads[i], _mm512_set1_epi8(char(128)));
}

// sum += products of quads of codes and of rounded numbers. GCC copies the sums of the intrinsic in each step of a loop.
inline void add_quads(__m512i& sum, __m512i codes, const int8_t* quad) {
  int32_t four;
  std::memcpy(&four, quad, sizeof four);
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(_mm512_set1_epi32(four)));
}

// sum + the products of a row and of group g. c: products of its digits, `apart` vectors from each other.
template <int DIGITS>
WITH_INT8 inline __m512 add_group(__m512 sum, const __m512i* c, int64_t apart, const Product& p, const Groups& groups,
                                  int64_t row, int64_t g) {
  const int64_t slot = p.w.kind == INT8 ? 0 : g % Groups::KEPT;
  __m512i all = c[0];
  if (DIGITS == 2) all = _mm512_add_epi32(_mm512_slli_epi32(all, 8), c[apart]);
  sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), groups.scales[slot], sum);
  if (!p.w.zeros) return sum;
  return _mm512_fnmadd_ps(groups.offsets[slot], _mm512_set1_ps(p.totals[row * p.x.groups + g]), sum);
}

// What the products of the last digit of a row and of group g begin with.
inline __m512i start_of(const Product& p, int64_t row, int64_t g) {
  return _mm512_set1_epi32(p.starts[row * p.x.groups + g]);
}

// sums (ROWS, LANES) of 16 columns from `column` on, of all rows.
template <Kind KIND, int ROWS, int DIGITS>
WITH_INT8 void columns_of_few(const Product& p, int64_t column, Groups& groups, float* to) {
  const uint8_t* rows[LANES];
  p.w.rows_from(column, p.n, rows);
  __m512 sums[ROWS];
  __m512i c[ROWS * DIGITS], quads[LANES];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps();
  const auto begin = [&](int64_t g) __attribute__((always_inline)) WITH_INT8 {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS * DIGITS; ++r)
      c[r] = r % DIGITS < DIGITS - 1 ? _mm512_setzero_si512() : start_of(p, r / DIGITS, g);
  };
  begin(0);
  for (int64_t k = 0; k < p.k; k += 64) {
    const int64_t at = k * p.w.bytes() / 64;
    if (at % 64 < p.w.bytes()) {
      const int64_t ahead = at + p.ahead(at);
      for (int64_t i = 0; i < LANES; ++i) __builtin_prefetch(rows[i] + ahead, 0, 2);
    }
    load_quads<KIND>(rows, k, p.k - k, quads);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int i = 8 * half; i < 8 * half + 8; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS * DIGITS; ++r) add_quads(c[r], quads[i], &p.x.x[r * p.x.stride + k + 4 * i]);
      const int64_t end = k + 32 * half + 32, g = (end - 1) / p.group;
      if (end % p.group && (half == 0 || end < p.k)) continue;
      if (KIND == INT8 ? g == 0 : g % Groups::KEPT == 0) groups.load(p, column, g);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) sums[r] = add_group<DIGITS>(sums[r], c + r * DIGITS, 1, p, groups, r, g);
      if (end < p.k) begin(g + 1);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(to + r * LANES, sums[r]);
}

// Where a thread has the codes of DEPTH numbers of WIDTH columns of W, the scales and zeros of groups, and sums.
struct Panel {
  std::vector<__m512i> codes;  // (DEPTH / 4, VECTORS)
  std::vector<Groups> groups;  // (VECTORS)
  std::vector<float> sums;     // (MOST, WIDTH)

  Panel() : codes(DEPTH / 4 * VECTORS), groups(VECTORS), sums(MOST * WIDTH) {}
};

// WIDTH rows of W, of which `lines` times 64 bytes each are needed next, and what is fetched already.
struct Next {
  const uint8_t* rows[WIDTH];
  int64_t lines, row = 0, line = 0;

  void fetch() {
    if (row == WIDTH) return;
    __builtin_prefetch(rows[row] + line * 64, 0, 2);
    if (++line == lines) ++row, line = 0;
  }
};

// sums (ROWS, WIDTH) += products of ROWS rows from `row` on, and numbers k to k + depth.
template <int ROWS, int DIGITS>
WITH_INT8 void add_block(const Product& p, int64_t row, int64_t k, int64_t depth, const Panel& panel, float* sums,
                         Next& next, int64_t lines) {
  const int8_t* x = &p.x.x[row * DIGITS * p.x.stride + k];
  const int64_t stride = p.x.stride;
  const __m512i* codes = panel.codes.data();
  __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = _mm512_maskz_loadu_ps(k ? 0xffff : 0, sums + r * WIDTH + v * LANES);
  for (int64_t begin = 0; begin < depth; begin += p.group, x += p.group) {
    const int64_t steps = (std::min(p.group, depth - begin) + 3) / 4, g = (k + begin) / p.group;
    __m512i c[ROWS * DIGITS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS * DIGITS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        c[r][v] = r % DIGITS < DIGITS - 1 ? _mm512_setzero_si512() : start_of(p, row + r / DIGITS, g);
    for (int64_t i = 0; i < steps; ++i, codes += VECTORS) {
      if (lines-- > 0) next.fetch();
#pragma GCC unroll 8
      for (int r = 0; r < ROWS * DIGITS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) add_quads(c[r][v], codes[v], x + r * stride + 4 * i);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        sum[r][v] = add_group<DIGITS>(sum[r][v], &c[r * DIGITS][v], VECTORS, p, panel.groups[v], row + r, g);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(sums + r * WIDTH + v * LANES, sum[r][v]);
}

template <int ROWS, int DIGITS>
void add_rows(int64_t rows, const Product& p, int64_t row, int64_t k, int64_t depth, const Panel& panel, float* sums,
              Next& next, int64_t lines) {
  if (rows == ROWS) return add_block<ROWS, DIGITS>(p, row, k, depth, panel, sums, next, lines);
  if constexpr (ROWS > 1) add_rows<ROWS - 1, DIGITS>(rows, p, row, k, depth, panel, sums, next, lines);
}

// The sums of WIDTH columns from `column` on, of `count` rows of x from `first` on.
template <Kind KIND, int DIGITS>
WITH_INT8 void columns_of_many(const Product& p, int64_t first, int64_t count, int64_t column, Panel& panel) {
  constexpr int64_t EACH = BLOCK / DIGITS;
  for (int64_t k = 0; k < p.k; k += DEPTH) {
    const int64_t depth = std::min(DEPTH, p.k - k), g = k / p.group;
    const bool more = k + DEPTH < p.k;
    const int64_t from = more ? (k + DEPTH) * p.w.bytes() / 64 : 0;
    Next next;
    next.lines = (std::min(DEPTH * p.w.bytes() / 64, p.w.stride - from) + 63) / 64;
    for (int64_t i = 0; i < WIDTH; ++i)
      next.rows[i] = p.w.row<uint8_t>(std::min(column + i + (more ? 0 : WIDTH), p.n - 1)) + from;
    const int64_t blocks = (count + EACH - 1) / EACH, lines = (WIDTH * next.lines + blocks - 1) / blocks;
    for (int64_t v = 0; v < VECTORS; ++v) {
      const uint8_t* rows[LANES];
      p.w.rows_from(column + v * LANES, p.n, rows);
      if (KIND == INT8 ? g == 0 : g % Groups::KEPT == 0) panel.groups[v].load(p, column + v * LANES, g);
      for (int64_t i = 0; i < depth; i += 64) {
        __m512i quads[LANES];
        load_quads<KIND>(rows, k + i, depth - i, quads);
#pragma GCC unroll 16
        for (int64_t j = 0; j < LANES; ++j) panel.codes[(i / 4 + j) * VECTORS + v] = quads[j];
      }
    }
    for (int64_t r = 0; r < count; r += EACH)
      add_rows<EACH, DIGITS>(std::min(EACH, count - r), p, first + r, k, depth, panel, &panel.sums[r * WIDTH],
                             next, lines);
  }
}

// Round sums (rows, `width`) of `count` rows from `first` on and of columns from `column` on.
template <class T>
WITH_INT8 void store_rows(const Problem<T>& p, const Rounded& x, int64_t first, int64_t count, int64_t column,
                          int64_t width, const float* sums) {
  for (int64_t r = first; r < first + count; ++r, sums += width)
    for (int64_t i = 0; i < std::min(width, p.n - column); i += LANES) {
      const int64_t at = column + i;
      const __mmask16 here = p.n - at < LANES ? (1 << (p.n - at)) - 1 : 0xffff;
      const __m512 scale = _mm512_set1_ps(x.scales[(r + 1) * x.digits - 1]);
      __m512 y = _mm512_mul_ps(_mm512_loadu_ps(sums + i), scale);
      if (p.bias) y = _mm512_add_ps(y, load(p.bias + at, here));
      store(p.out + r * p.n + at, here, y);
    }
}

using Few = void (*)(const Product&, int64_t, Groups&, float*);
using Many = void (*)(const Product&, int64_t, int64_t, int64_t, Panel&);

template <Kind KIND, int DIGITS>
std::pair<Few, Many> functions(int64_t rows) {
  constexpr int64_t MOST_FEW = BLOCK / DIGITS;
  const Few few = rows <= 1          ? columns_of_few<KIND, 1, DIGITS>
                  : rows <= 2        ? columns_of_few<KIND, 2, DIGITS>
                  : rows <= 4        ? columns_of_few<KIND, 4, DIGITS>
                  : rows <= MOST_FEW ? columns_of_few<KIND, MOST_FEW, DIGITS>
                                     : nullptr;
  return {few, columns_of_many<KIND, DIGITS>};
}

template <int DIGITS>
std::pair<Few, Many> functions(Kind kind, int64_t rows) {
  return kind == INT8   ? functions<INT8, DIGITS>(rows)
         : kind == INT4 ? functions<INT4, DIGITS>(rows)
         : kind == INT3 ? functions<INT3, DIGITS>(rows)
                        : functions<INT2, DIGITS>(rows);
}

template <class T>
void multiply(const Problem<T>& p, int64_t digits) {
  const int64_t group = p.w.kind == INT8 ? DEPTH : p.w.group;
  const Rounded x = round_rows(p, digits, group);
  const Product product(p.w, p.n, p.k, group, x);
  const auto [few, many] = digits == 2 ? functions<2>(p.w.kind, p.m) : functions<1>(p.w.kind, p.m);
  const int64_t width = few ? LANES : WIDTH, grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, p.k * width));
  take_parts((p.n + width - 1) / width, grain, [&, few = few, many = many](auto take) {
    std::optional<Panel> panel;
    Groups groups;
    float sums[BLOCK * LANES];
    if (!few) panel.emplace();
    for (int64_t i, end; take(i, end);)
      for (; i < end; ++i)
        for (int64_t r = 0; r < p.m; r += MOST) {
          const int64_t count = std::min(MOST, p.m - r);
          few ? few(product, i * width, groups, sums) : many(product, r, count, i * width, *panel);
          store_rows(p, x, r, count, i * width, width, few ? sums : panel->sums.data());
        }
  });
}

}  // namespace quads
}  // namespace
#endif
