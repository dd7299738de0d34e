// Rows of BFloat16 and weights as they are stored, by tiles (AMX).
//
// A tile of W has TILE rows of STEP numbers, as they lie in memory. A tile of x has STEP / 2 pairs of numbers of TILE
// rows, which are copied into that order once. Sums are added up in the order of k, so a row's bits are those of any
// number of rows, and differ from those without tiles. BLOCK rows of W stay in a cache while rows of x pass. What is
// next is not fetched ahead: processors with tiles do that as well by themselves, and fetch less in vain.

#if X86_512
#include <memory>

namespace {
namespace by_tiles {

#define WITH_BFLOAT16_TILES __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
constexpr int64_t STEP = 32;

using Product = Problem<BFloat16>;

// Rows of x in tiles: (tiles, k / 2, TILE) pairs, filled up with zeros.
struct Packed {
  int64_t wide;  // k, rounded up
  std::unique_ptr<__m512i[]> x;  // not initialized

  explicit Packed(const Product& p)
      : wide((p.k + STEP - 1) / STEP * STEP), x(new __m512i[(p.m + TILE - 1) / TILE * wide / 2]) {}

  const BFloat16* tile(int64_t i) const { return reinterpret_cast<const BFloat16*>(&x[i * wide / 2]); }

  void pack(const Product& p, int64_t tile) {
    static const BFloat16 zeros[STEP] = {};
    __m512i* to = &x[tile * wide / 2];
    const int64_t count = std::min(TILE, p.m - tile * TILE);
    const BFloat16* from = p.x + tile * TILE * p.stride;
    int64_t k = 0;
    for (; k + STEP <= p.k; k += STEP)
      transpose_16([&](int i) { return i < count ? from + i * p.stride + k : zeros; }, to + k / 2);
    if (k == p.k) return;
    BFloat16 last[TILE][STEP] = {};
    for (int64_t i = 0; i < count; ++i) std::copy(from + i * p.stride + k, from + i * p.stride + p.k, last[i]);
    transpose_16([&](int i) { return last[i]; }, to + k / 2);
  }
};

// Sums (BLOCK, 2 TILE) of the products of BLOCK rows of W and one or two tiles of x, `apart` from each other. count: of
// numbers in a row.
template <int HALVES>
WITH_BFLOAT16_TILES void multiply(const BFloat16* w, int64_t stride, const BFloat16* x, int64_t apart, int64_t count,
                                  float* sums) {
  zero_sums<HALVES>();
  for (int64_t k = 0; k < count; k += STEP) {
    _tile_loadd(4, w + k, stride * sizeof(BFloat16));
    _tile_loadd(5, w + TILE * stride + k, stride * sizeof(BFloat16));
    _tile_loadd(6, x + k * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (HALVES == 2) {
      _tile_loadd(7, x + apart + k * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  store_sums<HALVES>(sums);
}

// BLOCK columns of the result from `column` on, for `count` rows from `first` on, a multiple of 2 TILE.
WITH_BFLOAT16_TILES void columns(const Product& p, const Packed& x, int64_t first, int64_t count, int64_t column,
                                 std::vector<BFloat16>& copy) {
  const Weight& w = p.w;
  const int64_t rows = std::min(BLOCK, p.n - column);
  const bool copied = w.kind != SAME || rows < BLOCK || p.k % STEP;
  if (copied) copy.resize(BLOCK * x.wide);
  for (int64_t i = 0; copied && i < rows; ++i)
    numbers<BFloat16, BFloat16>(w, column + i, 0, p.k, &copy[i * x.wide]);
  const BFloat16* from = copied ? copy.data() : w.row<BFloat16>(column);
  const int64_t stride = copied ? x.wide : w.stride;
  alignas(64) float sums[BLOCK * 2 * TILE];
  for (int64_t row = first; row < first + count; row += 2 * TILE) {
    const int64_t tile = row / TILE, here = std::min(2 * TILE, first + count - row);
    const auto f = here > TILE ? multiply<2> : multiply<1>;
    f(from, stride, x.tile(tile), TILE * x.wide, x.wide, sums);
    for (int64_t i = 0; i < rows; i += TILE)
      for (int64_t half = 0; half < here; half += TILE) {
        __m512i each[TILE];
        transpose_16([&](int j) { return sums + (i + j) * 2 * TILE + half; }, each);
        const __mmask16 some = rows - i < TILE ? (1 << (rows - i)) - 1 : 0xffff;
        BFloat16* out = p.out + (row + half) * p.n + column + i;
        for (int64_t r = 0; r < std::min(TILE, here - half); ++r, out += p.n) {
          const __m512 y = finished(p, column + i, some, _mm512_castsi512_ps(each[r]));
          _mm256_mask_storeu_epi16(out, some, (__m256i)_mm512_cvtneps_pbh(y));
        }
      }
  }
}

WITH_BFLOAT16_TILES void configure() {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.rows[i] = TILE, shapes.bytes[i] = 64;
  _tile_loadconfig(&shapes);
}

WITH_BFLOAT16_TILES void release() { _tile_release(); }

// Several products with as many columns.
void multiply(const std::vector<Product>& products) {
  const int64_t k = products[0].k, n = products[0].n, blocks = (n + BLOCK - 1) / BLOCK;
  std::vector<Packed> x(products.begin(), products.end());
  for (size_t i = 0; i < x.size(); ++i)
    for_parts((products[i].m + TILE - 1) / TILE, (1 << 15) / (k + 1) + 1, [&](int64_t tile, int64_t end) {
      for (; tile < end; ++tile) x[i].pack(products[i], tile);
    });
  const int64_t most = std::max<int64_t>(128, NEAR / (2 * x[0].wide + 1) / (2 * TILE) * 2 * TILE);
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, k * BLOCK));
  take_parts(blocks * products.size(), grain, [&](auto take) {
    configure();
    std::vector<BFloat16> copy;
    for (int64_t begin, end; take(begin, end);)
      for (int64_t last; begin < end; begin = last) {
        const int64_t i = begin / blocks;
        last = std::min(end, (i + 1) * blocks);
        for (int64_t r = 0; r < products[i].m; r += most)
          for (int64_t at = begin; at < last; ++at)
            columns(products[i], x[i], r, std::min(most, products[i].m - r), at % blocks * BLOCK, copy);
      }
    release();
  });
}

}  // namespace by_tiles
}  // namespace
#endif
