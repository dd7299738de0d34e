// Rows rounded to int8 and weights of int8 and packed numbers, by tiles (AMX).

#if X86_512
#include <sys/syscall.h>
#include <unistd.h>

namespace {

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

// Tiles 0 to 3 hold sums (BLOCK, 2 TILE) of 4 bytes each. With one tile of x, only the first half of the columns counts.
#define WITH_SUMS inline __attribute__((target("amx-tile"), always_inline))

template <int HALVES>
WITH_SUMS void zero_sums() {
  _tile_zero(0);
  _tile_zero(2);
  if (HALVES == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
}

template <int HALVES, class C>
WITH_SUMS void store_sums(C* to) {
  constexpr int64_t row = 2 * TILE * sizeof(C);  // bytes
  _tile_stored(0, to, row);
  _tile_stored(2, to + TILE * 2 * TILE, row);
  if (HALVES == 2) {
    _tile_stored(1, to + TILE, row);
    _tile_stored(3, to + TILE * 2 * TILE + TILE, row);
  }
}

// C (BLOCK, 2 TILE) = products of BLOCK rows of int8 and one or two tiles of x, over steps of `step` numbers.
template <int HALVES>
WITH_TILES inline void multiply_tiles(const int8_t* w, int64_t stride, const int8_t* x, int64_t apart, int64_t count,
                                      int64_t step, const int8_t* next, int32_t* c) {
  zero_sums<HALVES>();
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
  store_sums<HALVES>(c);
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
  const int64_t group = grouped ? w.group : wide, step = std::clamp<int64_t>(group, 4, 64);  // bytes of a tile's row
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
  for_parts((p.n + BLOCK - 1) / BLOCK, grain, [&](int64_t begin, int64_t end) {
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
  for_parts((p.n + TILE - 1) / TILE, grain, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) f(p, x, i * TILE);
  });
}

template <class T>
void linear_by_rounded_tiles(const Problem<T>& p, int64_t digits) {
  const Rounded x = round_rows(p, digits, p.w.packed() ? p.w.group : std::max<int64_t>(1, p.k));
  if (p.w.packed() && x.rows <= FEW)
    linear_by_columns(p, x);
  else
    linear_by_int8_tiles(p, x);
}

}  // namespace
#endif
