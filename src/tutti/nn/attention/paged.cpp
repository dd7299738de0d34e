// A paged cache: attention over it (paged_attention.py), in float32, and rows written into it (paged_write.py).
// Processors with bfloat16 instructions multiply queries and keys by these, two numbers at a time.
//
// The queries of a key head and of a tile of tokens see the keys in blocks, counted from the start of the sequence:
//
//     s = scale q K^T,   most' = max(most, max(s)),   f = exp(most - most'),   p = exp(s - most')
//     sum' = f sum + sum(p),   o' = f o + p V
//
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.) A block that a query does not see
// changes none of its numbers, so these do not depend on the tile. Threads share the tiles. The heads of a tile of few
// queries take turns at each block, whose keys and values lie beside each other in the cache; what is needed next is
// fetched meanwhile. Keys are transposed for many queries; few queries are multiplied with them where they are (`pairs.h`).

#include <limits>

#include "pairs.h"

namespace {

constexpr int64_t KEYS = 64, ROWS = 64;  // of a block; of a tile
constexpr int64_t SQUARE = 8;             // values that take as long as a square of keys
constexpr int64_t TILES = 4;              // that a thread computes, at least, where there are so many heads
constexpr int64_t LINE = 64;              // bytes of a line of a cache
constexpr int64_t SIDE = 4;               // vectors beside each other in registers
constexpr int QUERIES = N == 16 ? 4 : 2;  // queries in registers at once
constexpr int64_t SCALE = sizeof(float);  // bytes after the numbers of a row of int8, of a group of int4
constexpr int64_t FEW = 16;               // queries of a key head that are multiplied with keys as they are stored
constexpr int64_t GROUP = 64;             // numbers of int4 with a scale
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Sizes {
  int64_t tokens, heads, key_heads, width, value_width, block, window, causal, sequences, tables, distances;
  int64_t query_token, query_head, key_slot, key_head, value_slot, value_head;  // strides
};

int64_t padded(int64_t n) { return (n + SIDE * N - 1) / (SIDE * N) * (SIDE * N); }

// `count` numbers as float32, and zeros up to `to`.
template <class T>
void widen(const T* x, int64_t count, float* y, int64_t to) {
  widen(x, count, y);
  std::fill(y + count, y + to, 0.f);
}

void load(const float* x, Floats (&y)[SIDE]) {
#pragma GCC unroll 4
  for (int v = 0; v < SIDE; ++v) y[v] = Floats::loadu(x + v * N);
}

void load(const BFloat16* x, Floats (&y)[SIDE]) {
  auto [a, b] = at::vec::convert_to_float(Halves::loadu(x));
  auto [c, d] = at::vec::convert_to_float(Halves::loadu(x + 2 * N));
  y[0] = a, y[1] = b, y[2] = c, y[3] = d;
}

template <class T>
void narrow(const float* x, int64_t count, float scale, T* y) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (; i + Halves::size() <= count; i += Halves::size())
      at::vec::convert_from_float<BFloat16>(Floats::loadu(x + i) * Floats(scale),
                                            Floats::loadu(x + i + N) * Floats(scale)).store(y + i);
  }
  for (; i < count; ++i) y[i] = T(x[i] * scale);
}

// out (Q, columns) = or += a (Q, depth) b (depth, columns), columns a multiple of SIDE vectors. row: of b.
template <int Q, bool ADD, class F>
void product(const float* a, int64_t of_a, F row, int64_t depth, int64_t columns, float* out, int64_t of_out) {
  for (int64_t c = 0; c < columns; c += SIDE * N) {
    Floats sum[Q][SIDE];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < SIDE; ++v) sum[q][v] = ADD ? Floats::loadu(out + q * of_out + c + v * N) : Floats(0.f);
    for (int64_t d = 0; d < depth; ++d) {
      Floats right[SIDE];
      load(row(d) + c, right);
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) {
        const Floats left(a[q * of_a + d]);
#pragma GCC unroll 4
        for (int v = 0; v < SIDE; ++v) sum[q][v] = at::vec::fmadd(left, right[v], sum[q][v]);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < SIDE; ++v) sum[q][v].store(out + q * of_out + c + v * N);
  }
}

// Call f with the first of QUERIES rows, as often as there are so many, and then with one row at a time.
template <class F>
void by_rows(int64_t rows, F f) {
  int64_t r = 0;
  for (; r + QUERIES <= rows; r += QUERIES) f(r, std::integral_constant<int, QUERIES>());
  for (; r < rows; ++r) f(r, std::integral_constant<int, 1>());
}

// exp, with an error below the rounding of T
template <class T>
Floats exponential(const Floats& x) {
  if constexpr (std::is_same_v<T, float>) return x.exp();
  return x.exp_u20();
}

// Logits that depend on the distance of a query from each of KEYS keys. bias: by distance, `distances` of them, of which
// the last is that of all larger ones. own: the distance from the first key.
struct ByDistance {
  const float* bias;
  int64_t distances, own;

  void add_to(float* s, int64_t low, int64_t high) const {
    for (int64_t c = low; c < high; ++c) s[c] += bias[std::min(own - c, distances - 1)];
  }
};

// The KEYS products of a query with keys become their share of the softmax. It sees those from `low` to before `high`.
// Returns what the earlier ones count for by then.
template <class T>
float weigh(float* s, int64_t low, int64_t high, float scale, float softcap, const ByDistance& by, float& most,
            float& sum) {
  if (low >= high) {
    std::fill(s, s + KEYS, 0.f);
    return 1.f;
  }
  const int64_t end = (high + N - 1) / N * N;
  Floats top(NOTHING);
  for (int64_t c = 0; c < end; c += N) {
    Floats x = Floats::loadu(s + c) * Floats(scale);
    if (softcap != 0.f) x = Floats(softcap) * (x / Floats(softcap)).tanh();
    x.store(s + c);
  }
  if (by.bias) by.add_to(s, low, high);
  std::fill(s, s + low, NOTHING);
  std::fill(s + high, s + end, NOTHING);
  std::fill(s + end, s + KEYS, 0.f);
  for (int64_t c = 0; c < end; c += N) top = at::vec::maximum(top, Floats::loadu(s + c));
  const float before = most, found = greatest(top);
  most = std::isnan(found) ? found : std::max(before, found);
  const float from = most == NOTHING ? 0.f : most;
  Floats total(0.f);
  for (int64_t c = 0; c < end; c += N) {
    const Floats x = exponential<T>(Floats::loadu(s + c) - Floats(from));
    x.store(s + c);
    total = total + x;
  }
  const float fades = before == most ? 1.f : std::exp(before - from);
  sum = sum * fades + ::sum(total);
  return fades;
}

// Lines of a cache that are needed soon. They are fetched a few at a time between other work: a core waits when more are
// on their way than it can count.
struct Ahead {
  std::vector<std::pair<const char*, int64_t>> rows;  // with their bytes
  size_t row = 0;
  int64_t at = 0, lines = 0;

  void clear() { rows.clear(), row = at = lines = 0; }
  void add(const void* x, int64_t bytes) {
    rows.emplace_back(static_cast<const char*>(x), bytes);
    lines += (bytes + LINE - 1) / LINE;
  }

  void fetch(int64_t count) {
    for (; count > 0 && row < rows.size(); --count) {
      __builtin_prefetch(rows[row].first + at, 0, 2);
      if ((at += LINE) >= rows[row].second) ++row, at = 0;
    }
  }
};

// Where the keys and values of a block are, those of the first head of a tile.
struct Rows {
  int64_t count = 0;
  const BFloat16 *keys[KEYS], *values[KEYS];
};

// One thread's memory. depth: of the products of queries and keys, in numbers or pairs of them.
template <class T>
struct Memory {
  int64_t depth, value_width;
  std::vector<float> q, k, wide, v, s, o, most, sum;
  std::vector<T> row;   // of int8 keys
  float scales[KEYS];   // of these
  const T* rows[KEYS];
  Rows blocks[2];       // that are added to few queries
  Ahead ahead;
  int64_t share = 0;    // lines of it to fetch with each value; SQUARE times as many with each square of keys

  Memory(int64_t queries, int64_t width, int64_t values, bool pairs)
      : depth(pairs ? width / 2 : width), value_width(padded(values)), q(queries * depth), k(KEYS * depth),
        wide(KEYS * width), row(KEYS * width), scales{}, v(KEYS * value_width), s(queries * KEYS), o(queries * value_width), most(queries),
        sum(queries) {}
};

struct Tile {
  int64_t sequence, first, count;  // tokens
  int64_t position, length;        // of the first token; of the sequence
  int64_t head, heads;             // key heads
};

// C: of the cache, T, int8, or uint8 for int4.
template <class T, class C>
struct Attention {
  static constexpr bool ROUNDED = std::is_same_v<C, int8_t> || std::is_same_v<C, uint8_t>;
  const T* query;
  const C *keys, *values;
  T* out;
  const int32_t* tables;
  const float *sinks, *bias;
  float scale, softcap;
  Sizes n;
  const bool native = multiplies_bfloat16();

  bool pairs() const {
    return X86_512 && std::is_same_v<T, BFloat16> && n.width % 2 == 0;
  }

  // Call f with each run of keys that lie behind each other: how many, the first among the `count` from `begin` on, and
  // where its key and value are.
  template <class F>
  void runs(const Tile& tile, int64_t head, int64_t begin, int64_t count, F f) const {
    const int32_t* table = tables + tile.sequence * n.tables;
    for (int64_t j = 0, run; j < count; j += run) {
      const int64_t at = begin + j, slot = table[at / n.block] * n.block + at % n.block;
      run = std::min(count - j, n.block - at % n.block);
      f(run, j, keys + slot * n.key_slot + head * n.key_head, values + slot * n.value_slot + head * n.value_head);
    }
  }

  // A row of int8 as float32, without its scale, which is returned.
  static float widen_rounded(const int8_t* x, int64_t count, float* y) {
    float scale;
    std::memcpy(&scale, x + count, sizeof scale);
    for (int64_t i = 0; i < count; ++i) y[i] = x[i];
    return scale;
  }

  // A row of int4 as float32.
  static float widen_rounded(const uint8_t* x, int64_t count, float* y) {
    for (int64_t d = 0; d < count; d += GROUP) {
      const int64_t half = std::min(GROUP, count - d) / 2;
      c10::Half of_group[2];
      std::memcpy(of_group, x + count / 2 + d / GROUP * SCALE, sizeof of_group);
      const float scale = of_group[0], least = of_group[1];
      const uint8_t* q = x + d / 2;
      for (int64_t i = 0; i < half; ++i) y[d + i] = least + scale * float(q[i] & 15);
      for (int64_t i = 0; i < half; ++i) y[d + half + i] = least + scale * float(q[i] >> 4);
    }
    return 1.f;
  }

  // The same for int8 and int4: numbers of int8 are exact in T, and logits are multiplied by the scales of their keys.
  void fetch_rounded(const Tile& tile, int64_t head, int64_t begin, int64_t count, Memory<T>& m) const {
    runs(tile, head, begin, count, [&](int64_t run, int64_t j, const C* k, const C* v) {
      for (int64_t i = 0; i < run; ++i) {
        float* wide = &m.wide[i * n.width];
        m.scales[j + i] = widen_rounded(k + i * n.key_slot, n.width, wide);
        if (pairs()) narrow(wide, n.width, 1.f, &m.row[i * n.width]);
        float* to = &m.v[(j + i) * m.value_width];
        const float scale = widen_rounded(v + i * n.value_slot, n.value_width, to);
        for (int64_t d = 0; d < n.value_width; ++d) to[d] *= scale;
      }
      if (pairs())
        turn(reinterpret_cast<const float*>(m.row.data()), n.width / 2, run, &m.k[j], m);
      else
        turn(m.wide.data(), n.width, run, &m.k[j], m);
    });
  }

  // The keys and values of a block, the keys transposed. wide: whether the values, too, are copied.
  void fetch(const Tile& tile, int64_t head, int64_t begin, int64_t count, bool wide, Memory<T>& m) const {
    if constexpr (ROUNDED)
      fetch_rounded(tile, head, begin, count, m);
    else
      fetch_stored(tile, head, begin, count, wide, m);
    for (int64_t d = 0; count < KEYS && d < m.depth; ++d) std::fill(&m.k[d * KEYS + count], &m.k[d * KEYS] + KEYS, 0.f);
  }

  void fetch_stored(const Tile& tile, int64_t head, int64_t begin, int64_t count, bool wide, Memory<T>& m) const {
    runs(tile, head, begin, count, [&](int64_t run, int64_t j, const C* k, const C* v) {
      if constexpr (std::is_same_v<T, float>) {
        turn(k, n.key_slot, run, &m.k[j], m);
      } else if (pairs()) {
        turn(reinterpret_cast<const float*>(k), n.key_slot / 2, run, &m.k[j], m);
      } else {
        for (int64_t i = 0; i < run; ++i) widen(k + i * n.key_slot, n.width, &m.wide[i * n.width], n.width);
        turn(m.wide.data(), n.width, run, &m.k[j], m);
      }
      for (int64_t i = 0; i < run; ++i) {
        m.rows[j + i] = v + i * n.value_slot;
        if (wide) widen(m.rows[j + i], n.value_width, &m.v[(j + i) * m.value_width], m.value_width);
      }
    });
  }

  // Fetch, while a block is added, the keys and values of all heads of a part of the block of a tile from `begin` on.
  // now, rows: keys of the block that is added meanwhile, and queries that it is added to.
  void prefetch(const Tile& tile, int64_t begin, int64_t part, int64_t parts, int64_t now, int64_t rows,
                Memory<T>& m) const {
    const int64_t count = std::max<int64_t>(0, std::min(KEYS, end(tile) - begin));
    const int64_t first = count * part / parts, some = count * (part + 1) / parts - first;
    const auto list = [&](const C* x, int64_t head, int64_t width) {
      if (head <= 2 * width) return m.ahead.add(x, tile.heads * head * sizeof(C));  // heads lie beside each other
      for (int64_t h = 0; h < tile.heads; ++h) m.ahead.add(x + h * head, width * sizeof(C));
    };
    m.ahead.clear();
    runs(tile, tile.head, begin + first, some, [&](int64_t run, int64_t, const C* k, const C* v) {
      for (int64_t i = 0; i < run; ++i) {
        list(k + i * n.key_slot, n.key_head, n.width);
        list(v + i * n.value_slot, n.value_head, n.value_width);
      }
    });
    const int64_t squares = (now + N - 1) / N * ((m.depth + N - 1) / N);
    const int64_t times = squares * SQUARE + (is_wide(rows, m) ? 0 : now);
    m.share = (m.ahead.lines + times - 1) / times;
  }

  // Transpose `rows` by `columns` numbers.
  static void square(const float* x, int64_t stride, int64_t rows, int64_t columns, float* to) {
#if X86_512
    if (rows == N && columns == N) {
      __m512i lines[N];
      transpose_16([&](int i) { return x + i * stride; }, lines);
      for (int i = 0; i < N; ++i) _mm512_storeu_si512(to + i * KEYS, lines[i]);
      return;
    }
#endif
    at::vec::transpose_mxn<float>(x, stride, to, KEYS, rows, columns);
  }

  static void turn(const float* x, int64_t stride, int64_t count, float* to, Memory<T>& m) {
    for (int64_t i = 0; i < count; i += N)
      for (int64_t d = 0; d < m.depth; d += N) {
        m.ahead.fetch(SQUARE * m.share);
        square(x + i * stride + d, stride, std::min(N, count - i), std::min(N, m.depth - d), to + d * KEYS + i);
      }
  }

  // Whether values are copied as float32 before they are added to so many queries.
  bool is_wide(int64_t rows, const Memory<T>& m) const {
    return ROUNDED || rows > QUERIES || n.value_width != m.value_width;
  }

  int64_t begin(const Tile& tile) const {
    return n.window ? std::max<int64_t>(0, tile.position - n.window + 1) / KEYS * KEYS : 0;
  }

  int64_t end(const Tile& tile) const {
    return n.causal ? std::min(tile.length, tile.position + tile.count) : tile.length;
  }

  // next: the tile that the thread computes next, or null.
  void run(const Tile& tile, const Tile* next, Memory<T>& m) const {
    const int64_t group = n.heads / n.key_heads, each = tile.count * group, rows = tile.heads * each;
    const auto query_head = [&](int64_t r) { return (tile.head + r / each) * group + r % group; };
    const auto token = [&](int64_t r) { return tile.first + r % each / group; };
    for (int64_t r = 0; r < rows; ++r) {
      const T* q = query + token(r) * n.query_token + query_head(r) * n.query_head;
      if (pairs())
        std::memcpy(&m.q[r * m.depth], q, n.width * sizeof(T));
      else
        widen(q, n.width, &m.q[r * m.depth], n.width);
    }
    std::fill(m.o.begin(), m.o.begin() + rows * m.value_width, 0.f);
    std::fill(m.most.begin(), m.most.begin() + rows, NOTHING);
    std::fill(m.sum.begin(), m.sum.begin() + rows, 0.f);
    const bool in_order = is_read_in_order(each, m);
    if constexpr (std::is_same_v<C, BFloat16>)
      if (in_order) add_in_order(tile, next, each, m);
    if (!in_order) add_by_heads(tile, next, each, m);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = query_head(r);
      float share = m.sum[r] == 0.f ? 0.f : 1.f / m.sum[r];
      if (sinks) {
        const float top = std::max(m.most[r], sinks[h]), fades = std::exp(m.most[r] - top);
        share = fades / (m.sum[r] * fades + std::exp(sinks[h] - top));
      }
      narrow(&m.o[r * m.value_width], n.value_width, share, out + (token(r) * n.heads + h) * n.value_width);
    }
  }

  void add_by_heads(const Tile& tile, const Tile* next, int64_t each, Memory<T>& m) const {
    for (int64_t j = begin(tile); j < end(tile); j += KEYS)
      for (int64_t h = 0; h < tile.heads; ++h) {
        const int64_t now = std::min(KEYS, end(tile) - j);
        if (j + KEYS < end(tile))
          prefetch(tile, j + KEYS, h, tile.heads, now, each, m);
        else if (next)
          prefetch(*next, begin(*next), h, tile.heads, now, each, m);
        else
          m.ahead.clear();
        add(tile, tile.head + h, j, h * each, each, m);
      }
  }

  // Whether the keys and values of all heads of a tile are multiplied where they are, in the order of the cache.
  bool is_read_in_order(int64_t each, const Memory<T>& m) const {
    return pairs() && std::is_same_v<C, BFloat16> && each <= FEW && m.depth % LANES == 0 && n.value_width % (2 * N) == 0;
  }

  void locate(const Tile* tile, int64_t begin, Rows& rows) const {
    rows.count = tile ? std::clamp<int64_t>(end(*tile) - begin, 0, KEYS) : 0;
    if (rows.count == 0) return;
    runs(*tile, tile->head, begin, rows.count, [&](int64_t run, int64_t j, const C* k, const C* v) {
      for (int64_t i = 0; i < run; ++i) rows.keys[j + i] = k + i * n.key_slot, rows.values[j + i] = v + i * n.value_slot;
    });
  }

  // Fetch the rows of a head that belong to a part of a block.
  static void fetch_part(const BFloat16* const* rows, int64_t count, int64_t part, int64_t parts, int64_t offset,
                         int64_t width) {
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i)
      for (int64_t c = 0; c < width; c += LINE / sizeof(BFloat16)) __builtin_prefetch(rows[i] + offset + c, 0, 2);
  }

  // Values are fetched while queries and keys are multiplied, the next keys while values are added. Whose keys these are
  // is a guess at the end of a tile: another thread may take the next one.
  void add_in_order(const Tile& tile, const Tile* next, int64_t each, Memory<T>& m) const {
    const int64_t w = m.value_width, rows = tile.heads * each;
    Rows *now = &m.blocks[0], *after = &m.blocks[1];
    locate(&tile, begin(tile), *after);
    for (int64_t j = begin(tile); j < end(tile); j += KEYS) {
      std::swap(now, after);
      const bool last = j + KEYS >= end(tile);
      locate(last ? next : &tile, last && next ? begin(*next) : j + KEYS, *after);
      const int64_t count = now->count, parts = (count + N - 1) / N;
      std::fill(now->keys + count, now->keys + parts * N, now->keys[count - 1]);
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t h = 0; h < tile.heads; ++h) {
          fetch_part(now->values, count, part, parts, h * n.value_head, n.value_width);
          for (int64_t r = h * each; r < (h + 1) * each; ++r)
            (native ? products_of_row<true> : products_of_row<false>)(
                &m.q[r * m.depth], m.depth, now->keys + part * N, h * n.key_head, &m.s[r * KEYS + part * N]);
        }
      for (int64_t h = 0; h < tile.heads; ++h) weigh_rows(tile, tile.head + h, j, h * each, each, m);
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t h = 0; h < tile.heads; ++h) {
          fetch_part(after->keys, after->count, part, parts, h * n.key_head, n.width);
          by_rows(each, [&](int64_t r, auto some) {
            const int64_t row = h * each + r;
            add_values<some>(&m.s[row * KEYS + part * N], KEYS, std::min(N, count - part * N), now->values + part * N,
                             h * n.value_head, n.value_width, &m.o[row * w], w);
          });
        }
    }
    for (int64_t r = 0; r < rows; ++r) interleave(&m.o[r * w], n.value_width);
  }

  // Products with the keys of a block from j on become shares of the softmax.
  void weigh_rows(const Tile& tile, int64_t head, int64_t j, int64_t first, int64_t rows, Memory<T>& m) const {
    const int64_t group = n.heads / n.key_heads, w = m.value_width, count = std::min(KEYS, end(tile) - j);
    float *const s = &m.s[first * KEYS], *const o = &m.o[first * w];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t own = tile.position + r / group;
      const int64_t high = n.causal ? std::min(count, own + 1 - j) : count;
      const int64_t low = n.window ? std::max<int64_t>(0, own - n.window + 1 - j) : 0;
      if (ROUNDED)
        for (int64_t c = 0; c < KEYS; c += N)
          (Floats::loadu(s + r * KEYS + c) * Floats::loadu(m.scales + c)).store(s + r * KEYS + c);
      const ByDistance by{bias ? bias + (head * group + r % group) * n.distances : nullptr, n.distances, own - j};
      const float fades = weigh<T>(s + r * KEYS, low, high, scale, softcap, by, m.most[first + r], m.sum[first + r]);
      if (fades != 1.f)
        for (int64_t d = 0; d < w; d += N) (Floats::loadu(o + r * w + d) * Floats(fades)).store(o + r * w + d);
    }
  }

  // Add the keys and values of a block from j on to rows `first` to `first + rows` of queries.
  void add(const Tile& tile, int64_t head, int64_t j, int64_t first, int64_t rows, Memory<T>& m) const {
    const int64_t w = m.value_width, count = std::min(KEYS, end(tile) - j);
    const bool wide = is_wide(rows, m);
    float *const q = &m.q[first * m.depth], *const s = &m.s[first * KEYS], *const o = &m.o[first * w];
    fetch(tile, head, j, count, wide, m);
    by_rows(rows, [&](int64_t r, auto some) {
      if (pairs())
        (native ? product_of_pairs<some, true> : product_of_pairs<some, false>)(
            q + r * m.depth, m.depth, m.k.data(), m.depth, KEYS, s + r * KEYS);
      else
        product<some, false>(q + r * m.depth, m.depth, [&](int64_t d) { return &m.k[d * KEYS]; }, m.depth, KEYS,
                             s + r * KEYS, KEYS);
    });
    weigh_rows(tile, head, j, first, rows, m);
    by_rows(rows, [&](int64_t r, auto some) {
      if (wide)
        product<some, true>(s + r * KEYS, KEYS, [&](int64_t d) { return &m.v[d * w]; }, count, w, o + r * w, w);
      else
        product<some, true>(s + r * KEYS, KEYS, [&](int64_t d) {
          m.ahead.fetch(m.share);
          return m.rows[d];
        }, count, w, o + r * w, w);
    });
  }
};

template <class T, class C>
void attend(const void* const* x, const float* sinks, const float* bias, const int32_t* tables, const int32_t* starts,
            const int32_t* lengths, const Sizes& n, double scale, double softcap) {
  const int64_t group = n.heads / n.key_heads, tokens = std::max<int64_t>(1, ROWS / group);
  int64_t keys = 0;  // of all tiles and heads
  for (int64_t s = 0; s < n.sequences; ++s)
    keys += (starts[s + 1] - starts[s] + tokens - 1) / tokens * lengths[s] * n.key_heads;
  const int64_t share = keys / (TILES * tutti_threads::threads_here());
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < n.sequences; ++s)
    for (int64_t t = starts[s]; t < starts[s + 1]; t += tokens) {
      const int64_t here = std::min(tokens, starts[s + 1] - t), most = share / std::max<int64_t>(1, lengths[s]);
      const int64_t heads = std::clamp<int64_t>(ROWS / (here * group), 1, std::clamp<int64_t>(most, 1, n.key_heads));
      for (int64_t h = 0; h < n.key_heads; h += heads)
        tiles.push_back({s, t, here, lengths[s] - starts[s + 1] + t, lengths[s], h, std::min(heads, n.key_heads - h)});
    }
  const Attention<T, C> work{static_cast<const T*>(x[0]), static_cast<const C*>(x[1]), static_cast<const C*>(x[2]),
                          static_cast<T*>(const_cast<void*>(x[3])), tables, sinks, bias, float(scale), float(softcap), n};
  const int64_t items = tiles.size(), row = n.heads * n.value_width;
  std::fill(work.out + starts[n.sequences] * row, work.out + n.tokens * row, T(0));
  std::atomic<int64_t> next{0};
  for_parts(std::min<int64_t>(items, tutti_threads::threads_here()), 1, [&](int64_t, int64_t) {
    Memory<T> memory(std::max(tokens * group, ROWS), n.width, n.value_width, work.pairs());
    for (int64_t i; (i = next++) < items;) {
      const int64_t after = next;  // most likely this thread's, which must not claim it yet: others may be idle
      work.run(tiles[i], after < items ? &tiles[after] : nullptr, memory);
    }
  });
}

// Contiguous rows that begin at multiples of 4 bytes.
at::Tensor aligned(const at::Tensor& x) {
  const int64_t step = std::max<int64_t>(1, 4 / x.element_size());
  const bool fits = x.stride(2) == 1 && !(x.stride(0) % step || x.stride(1) % step || x.storage_offset() % step);
  return fits ? x : x.contiguous();
}

// That sequences have tokens that there are, and blocks for their length, which the cache has.
void check_blocks(const at::Tensor& tables, const at::Tensor& starts, const at::Tensor& lengths, int64_t block,
                  int64_t slots, int64_t tokens, bool causal) {
  const auto table = tables.const_data_ptr<int32_t>(), start = starts.const_data_ptr<int32_t>();
  const auto length = lengths.const_data_ptr<int32_t>();
  TORCH_CHECK_INDEX(starts.size(0) == tables.size(0) + 1 && lengths.size(0) == tables.size(0), "paged_attention: ",
                    starts.size(0), " starts and ", lengths.size(0), " lengths of ", tables.size(0), " sequences");
  for (int64_t i = 0; i < tables.size(0); ++i) {
    const int64_t first = start[i], end = start[i + 1];
    TORCH_CHECK_INDEX(0 <= first && first <= end && end <= tokens && (!causal || first == end || end - first <= length[i]),
                      "paged_attention: tokens ", first, " to ", end, " of ", tokens, ", in a sequence of ", length[i]);
    if (first == end) continue;
    const int64_t count = (length[i] + block - 1) / block;
    TORCH_CHECK_INDEX(count <= tables.size(1), "paged_attention: ", length[i], " tokens in ", tables.size(1),
                      " blocks of ", block);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = table[i * tables.size(1) + j];
      TORCH_CHECK_INDEX(at >= 0 && (at + 1) * block <= slots, "paged_attention: block ", at, " of a cache of ", slots,
                        " slots");
    }
  }
}

at::Tensor integers(const at::Tensor& x) { return x.to(at::kInt).contiguous(); }

// query is of float or BFloat16; keys and values are, too, or of int8 with a scale after each row, or of int4 (kByte).
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& tables, const at::Tensor& starts, const at::Tensor& lengths,
                           int64_t block, double scale, int64_t window, double softcap,
                           const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& bias, bool causal) {
  const bool int4 = keys.scalar_type() == at::kByte, rounded = int4 || keys.scalar_type() == at::kChar;
  const at::Tensor q = aligned(query), k = rounded ? in_rows(keys) : aligned(keys);
  const at::Tensor v = rounded ? in_rows(values) : aligned(values);
  const int64_t groups = int4 ? (v.size(2) + GROUP / 2 + SCALE - 1) / (GROUP / 2 + SCALE) : 1;
  const int64_t value_width = (v.size(2) - (rounded ? groups * SCALE : 0)) * (int4 ? 2 : 1);
  const at::Tensor t = integers(tables), s = integers(starts), l = integers(lengths);
  const at::Tensor sunk = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const at::Tensor added = bias ? bias->to(at::kFloat).contiguous() : at::Tensor();
  at::Tensor out = at::empty({q.size(0), q.size(1), value_width}, q.options());
  const Sizes n{q.size(0), q.size(1), k.size(1), q.size(2), value_width, block, window, causal, t.size(0), t.size(1),
                bias ? added.size(1) : 0, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)};
  check_blocks(t, s, l, block, std::min(k.size(0), v.size(0)), q.size(0), causal);
  const void* x[] = {q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), out.data_ptr()};
  const bool half = q.scalar_type() == at::kBFloat16;
  const auto f = int4 ? (half ? attend<BFloat16, uint8_t> : attend<float, uint8_t>)
                 : rounded ? (half ? attend<BFloat16, int8_t> : attend<float, int8_t>)
                         : (half ? attend<BFloat16, BFloat16> : attend<float, float>);
  f(x, sinks ? sunk.const_data_ptr<float>() : nullptr, bias ? added.const_data_ptr<float>() : nullptr,
    t.const_data_ptr<int32_t>(), s.const_data_ptr<int32_t>(), l.const_data_ptr<int32_t>(), n, scale, softcap);
  return out;
}

template <class T>
void write_int8(const T* x, int64_t count, std::vector<float>& wide, int8_t* to) {
  wide.resize(count);
  widen(x, count, wide.data());
  float most = 0.f;
  for (int64_t i = 0; i < count; ++i) most = std::isnan(wide[i]) ? wide[i] : std::max(most, std::abs(wide[i]));
  const float scale = most / 127.f, inverse = most > 0.f ? 127.f / most : 0.f;
  for (int64_t i = 0; i < count; ++i) to[i] = int8_t(std::nearbyint(std::clamp(wide[i] * inverse, -127.f, 127.f)));
  std::memcpy(to + count, &scale, sizeof scale);
}

template <class T>
void write_int4(const T* x, int64_t count, std::vector<float>& wide, uint8_t* to) {
  constexpr float MOST = 65504.f;  // of float16
  wide.resize(count);
  widen(x, count, wide.data());
  for (int64_t d = 0; d < count; d += GROUP) {
    const int64_t size = std::min(GROUP, count - d), half = size / 2;
    const float* y = &wide[d];
    float low = y[0], high = y[0];
    for (int64_t i = 0; i < size; ++i) {
      low = std::isnan(y[i]) ? y[i] : std::min(low, y[i]);
      high = std::isnan(y[i]) ? y[i] : std::max(high, y[i]);
    }
    const c10::Half least(std::clamp(low, -MOST, MOST));
    const c10::Half scale(std::clamp((high - float(least)) / 15.f, 0.f, MOST));
    const float inverse = float(scale) > 0.f ? 1.f / float(scale) : 0.f;
    const auto code = [&](float v) {
      const float q = (v - float(least)) * inverse;
      return std::isnan(q) ? 0 : int(std::nearbyint(std::clamp(q, 0.f, 15.f)));
    };
    for (int64_t i = 0; i < half; ++i) to[d / 2 + i] = code(y[i]) | code(y[half + i]) << 4;
    const c10::Half of_group[] = {scale, least};
    std::memcpy(to + count / 2 + d / GROUP * SCALE, of_group, sizeof of_group);
  }
}

// The same as `paged_write` below into a cache of int8 or int4, whose rows have scales behind their numbers.
template <class T>
void write_rounded(const at::Tensor& cache, const at::Tensor& values, const int64_t* at) {
  const int64_t heads = values.size(1), width = values.size(2), size = heads * cache.size(2);
  for_parts(values.size(0), std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(size, 1)),
            [&](int64_t i, int64_t end) {
    std::vector<float> wide;
    for (; i < end; ++i)
      for (int64_t h = 0; at[i] >= 0 && h < heads; ++h) {
        const T* from = static_cast<const T*>(values.const_data_ptr()) + i * values.stride(0) + h * width;
        const auto to = static_cast<char*>(cache.data_ptr()) + at[i] * cache.stride(0) + h * cache.size(2);
        if (cache.scalar_type() == at::kChar)
          write_int8(from, width, wide, reinterpret_cast<int8_t*>(to));
        else
          write_int4(from, width, wide, reinterpret_cast<uint8_t*>(to));
      }
  });
}

// Row i of values goes to slot slots[i] of the cache unless that is negative. Both are of one type, or the cache is of
// int8 or int4 and values are of float or BFloat16; and a slot is contiguous.
void paged_write(at::Tensor cache, const at::Tensor& given, const at::Tensor& places) {
  const auto is_contiguous = [&](const at::Tensor& x) { return x.stride(2) == 1 && x.stride(1) == x.size(2); };
  TORCH_CHECK_VALUE(is_contiguous(cache), "paged_write: a slot of the cache has strides ", cache.strides());
  const at::Tensor values = is_contiguous(given) ? given : given.contiguous(), slots = places.contiguous();
  const int64_t bytes = cache.element_size(), size = bytes * cache.size(1) * cache.size(2), count = slots.size(0);
  const auto to = static_cast<char*>(cache.data_ptr());
  const auto from = static_cast<const char*>(values.const_data_ptr());
  const auto at = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(at[i] < cache.size(0), "paged_write: slot ", at[i], " of a cache with ", cache.size(0), " slots");
  if (cache.scalar_type() != values.scalar_type())
    return values.scalar_type() == at::kBFloat16 ? write_rounded<BFloat16>(cache, values, at)
                                                 : write_rounded<float>(cache, values, at);
  for_parts(count, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(size, 1)), [&](int64_t i, int64_t end) {
    for (; i < end; ++i)
      if (at[i] >= 0) std::memcpy(to + at[i] * cache.stride(0) * bytes, from + i * values.stride(0) * bytes, size);
  });
}

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor starts, Tensor lengths, "
      "int block, float scale, int window, float softcap, Tensor? sinks, Tensor? bias, bool causal) -> Tensor",
      paged_attention);
  library.def("paged_write(Tensor(a!) cache, Tensor values, Tensor slots) -> ()", paged_write);
}

}  // namespace
