// A paged cache: attention over it (paged_attention.py), in float32, and rows written into it (paged_write.py).
//
// The queries of a key head and of a tile of tokens see the keys in blocks, counted from the start of the sequence:
//
//     s = scale q K^T,   most' = max(most, max(s)),   f = exp(most - most'),   p = exp(s - most')
//     sum' = f sum + sum(p),   o' = f o + p V
//
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.) A block that a query does not see changes
// none of its numbers, so these do not depend on the tile. Threads share the tiles.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using c10::BFloat16;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;

constexpr int64_t KEYS = 64, ROWS = 64;  // of a block; of a tile
constexpr int64_t N = Floats::size();
constexpr int64_t SIDE = 4;                // vectors beside each other in registers
constexpr int QUERIES = N == 16 ? 4 : 2;  // queries in registers at once
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Sizes {
  int64_t heads, key_heads, width, value_width, block, window, causal, sequences, tables;
  int64_t query_token, query_head, key_slot, key_head, value_slot, value_head;  // strides
};

int64_t padded(int64_t n) { return (n + SIDE * N - 1) / (SIDE * N) * (SIDE * N); }

// `count` numbers as float32, and zeros up to `to`.
template <class T>
void widen(const T* x, int64_t count, float* y, int64_t to) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (; i + Halves::size() <= count; i += Halves::size()) {
      auto [a, b] = at::vec::convert_to_float(Halves::loadu(x + i));
      a.store(y + i);
      b.store(y + i + N);
    }
  }
  for (; i < count; ++i) y[i] = x[i];
  std::fill(y + i, y + to, 0.f);
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

// out (Q, columns) = or += a (Q, depth) b (depth, columns), columns a multiple of SIDE vectors.
template <int Q, bool ADD>
void product(const float* a, int64_t of_a, const float* b, int64_t of_b, int64_t depth, int64_t columns, float* out,
             int64_t of_out) {
  for (int64_t c = 0; c < columns; c += SIDE * N) {
    Floats sum[Q][SIDE];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < SIDE; ++v) sum[q][v] = ADD ? Floats::loadu(out + q * of_out + c + v * N) : Floats(0.f);
    for (int64_t d = 0; d < depth; ++d) {
      Floats right[SIDE];
#pragma GCC unroll 4
      for (int v = 0; v < SIDE; ++v) right[v] = Floats::loadu(b + d * of_b + c + v * N);
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

template <bool ADD>
void products(int64_t rows, const float* a, int64_t of_a, const float* b, int64_t of_b, int64_t depth, int64_t columns,
              float* out, int64_t of_out) {
  int64_t r = 0;
  for (; r + QUERIES <= rows; r += QUERIES)
    product<QUERIES, ADD>(a + r * of_a, of_a, b, of_b, depth, columns, out + r * of_out, of_out);
  for (; r < rows; ++r) product<1, ADD>(a + r * of_a, of_a, b, of_b, depth, columns, out + r * of_out, of_out);
}

float reduce_max(const Floats& x) {
  return at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return at::vec::maximum(p, q); }, x);
}

float reduce_sum(const Floats& x) {
  return at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return p + q; }, x);
}

// exp, with an error below the rounding of T
template <class T>
Floats exponential(const Floats& x) {
  if constexpr (std::is_same_v<T, float>) return x.exp();
  return x.exp_u20();
}

// The KEYS products of a query with keys become their share of the softmax. It sees those from `low` to before `high`.
// Returns what the earlier ones count for by then.
template <class T>
float weigh(float* s, int64_t low, int64_t high, float scale, float softcap, float& most, float& sum) {
  if (low >= high) {
    std::fill(s, s + KEYS, 0.f);
    return 1.f;
  }
  Floats top(NOTHING);
  for (int64_t c = 0; c < KEYS; c += N) {
    Floats x = Floats::loadu(s + c) * Floats(scale);
    if (softcap != 0.f) x = Floats(softcap) * (x / Floats(softcap)).tanh();
    x.store(s + c);
  }
  std::fill(s, s + low, NOTHING);
  std::fill(s + high, s + KEYS, NOTHING);
  for (int64_t c = 0; c < KEYS; c += N) top = at::vec::maximum(top, Floats::loadu(s + c));
  const float before = most, found = reduce_max(top);
  most = std::isnan(found) ? found : std::max(before, found);
  const float from = most == NOTHING ? 0.f : most;
  Floats total(0.f);
  for (int64_t c = 0; c < KEYS; c += N) {
    const Floats x = exponential<T>(Floats::loadu(s + c) - Floats(from));
    x.store(s + c);
    total = total + x;
  }
  const float fades = before == most ? 1.f : std::exp(before - from);
  sum = sum * fades + reduce_sum(total);
  return fades;
}

// One thread's memory.
struct Memory {
  int64_t width, value_width;
  std::vector<float> q, k, rows, v, s, o, most, sum;

  Memory(int64_t queries, int64_t width, int64_t values)
      : width(width), value_width(padded(values)), q(queries * width), k(KEYS * width), rows(KEYS * width),
        v(KEYS * value_width), s(queries * KEYS), o(queries * value_width), most(queries), sum(queries) {}
};

struct Tile {
  int64_t sequence, first, count;  // tokens
  int64_t position, length;        // of the first token; of the sequence
};

template <class T>
struct Attention {
  const T *query, *keys, *values;
  T* out;
  const int32_t* tables;
  const float* sinks;
  float scale, softcap;
  Sizes n;

  // The keys and values of a block, the keys transposed.
  void fetch(const Tile& tile, int64_t head, int64_t begin, int64_t count, Memory& m) const {
    const int32_t* table = tables + tile.sequence * n.tables;
    for (int64_t j = 0, run; j < count; j += run) {
      const int64_t at = begin + j, slot = table[at / n.block] * n.block + at % n.block;
      run = std::min(count - j, n.block - at % n.block);
      const T* k = keys + slot * n.key_slot + head * n.key_head;
      if constexpr (std::is_same_v<T, float>) {
        turn(k, n.key_slot, run, m.k.data() + j);
      } else {
        for (int64_t i = 0; i < run; ++i) widen(k + i * n.key_slot, n.width, &m.rows[i * n.width], n.width);
        turn(m.rows.data(), n.width, run, m.k.data() + j);
      }
      const T* v = values + slot * n.value_slot + head * n.value_head;
      for (int64_t i = 0; i < run; ++i)
        widen(v + i * n.value_slot, n.value_width, &m.v[(j + i) * m.value_width], m.value_width);
    }
    if (count < KEYS) {
      for (int64_t d = 0; d < n.width; ++d) std::fill(&m.k[d * KEYS + count], &m.k[d * KEYS] + KEYS, 0.f);
    }
  }

  void turn(const float* x, int64_t stride, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; i += N)
      for (int64_t d = 0; d < n.width; d += N)
        at::vec::transpose_mxn<float>(x + i * stride + d, stride, to + d * KEYS + i, KEYS,
                                      std::min(N, count - i), std::min(N, n.width - d));
  }

  void run(const Tile& tile, int64_t head, Memory& m) const {
    const int64_t group = n.heads / n.key_heads, rows = tile.count * group;
    for (int64_t r = 0; r < rows; ++r)
      widen(query + (tile.first + r / group) * n.query_token + (head * group + r % group) * n.query_head, n.width,
            &m.q[r * n.width], n.width);
    std::fill(m.o.begin(), m.o.begin() + rows * m.value_width, 0.f);
    std::fill(m.most.begin(), m.most.begin() + rows, NOTHING);
    std::fill(m.sum.begin(), m.sum.begin() + rows, 0.f);
    const int64_t end = n.causal ? std::min(tile.length, tile.position + tile.count) : tile.length;
    const int64_t begin = n.window ? std::max<int64_t>(0, tile.position - n.window + 1) / KEYS * KEYS : 0;
    for (int64_t j = begin; j < end; j += KEYS) {
      const int64_t count = std::min(KEYS, end - j);
      fetch(tile, head, j, count, m);
      products<false>(rows, m.q.data(), n.width, m.k.data(), KEYS, n.width, KEYS, m.s.data(), KEYS);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t own = tile.position + r / group;
        const int64_t high = n.causal ? std::min(count, own + 1 - j) : count;
        const int64_t low = n.window ? std::max<int64_t>(0, own - n.window + 1 - j) : 0;
        const float fades = weigh<T>(&m.s[r * KEYS], low, high, scale, softcap, m.most[r], m.sum[r]);
        float* o = &m.o[r * m.value_width];
        if (fades != 1.f)
          for (int64_t d = 0; d < m.value_width; d += N) (Floats::loadu(o + d) * Floats(fades)).store(o + d);
      }
      products<true>(rows, m.s.data(), KEYS, m.v.data(), m.value_width, count, m.value_width, m.o.data(),
                     m.value_width);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = tile.first + r / group, h = head * group + r % group;
      float share = m.sum[r] == 0.f ? 0.f : 1.f / m.sum[r];
      if (sinks) {
        const float top = std::max(m.most[r], sinks[h]), fades = std::exp(m.most[r] - top);
        share = fades / (m.sum[r] * fades + std::exp(sinks[h] - top));
      }
      narrow(&m.o[r * m.value_width], n.value_width, share, out + (token * n.heads + h) * n.value_width);
    }
  }
};

template <class T>
void attend(const void* const* x, const float* sinks, const int32_t* tables, const int32_t* starts,
            const int32_t* lengths, const Sizes& n, double scale, double softcap) {
  const int64_t group = n.heads / n.key_heads, tokens = std::max<int64_t>(1, ROWS / group);
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < n.sequences; ++s)
    for (int64_t t = starts[s]; t < starts[s + 1]; t += tokens)
      tiles.push_back({s, t, std::min(tokens, starts[s + 1] - t), lengths[s] - starts[s + 1] + t, lengths[s]});
  const Attention<T> work{static_cast<const T*>(x[0]), static_cast<const T*>(x[1]), static_cast<const T*>(x[2]),
                          static_cast<T*>(const_cast<void*>(x[3])), tables, sinks, float(scale), float(softcap), n};
  const int64_t items = tiles.size() * n.key_heads;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(items, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    Memory memory(tokens * group, n.width, n.value_width);
    for (int64_t i; (i = next++) < items;) work.run(tiles[i / n.key_heads], i % n.key_heads, memory);
  });
}

}  // namespace

// x: query, keys, values, out, of BFloat16 (half) or float; out is contiguous.
extern "C" void paged_attention(const void* const* x, int64_t half, const float* sinks, const int32_t* tables,
                                const int32_t* starts, const int32_t* lengths, const int64_t* sizes, double scale,
                                double softcap) {
  const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
  if (half)
    attend<BFloat16>(x, sinks, tables, starts, lengths, n, scale, softcap);
  else
    attend<float>(x, sinks, tables, starts, lengths, n, scale, softcap);
}

// Row i of `rows`, of `size` bytes and `apart` bytes from the next, goes to row slots[i] of the cache unless that is
// negative.
extern "C" void paged_write(char* cache, int64_t stride, const char* rows, int64_t apart, const int64_t* slots,
                            int64_t count, int64_t size) {
  at::parallel_for(0, count, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(size, 1)), [&](int64_t i, int64_t end) {
    for (; i < end; ++i)
      if (slots[i] >= 0) std::memcpy(cache + slots[i] * stride, rows + i * apart, size);
  });
}
