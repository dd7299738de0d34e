// Attention over bfloat16 on a CPU, and its backward pass, with products by oneDNN's brgemm, which sums in float32 and
// uses AMX where there is any. Scores are made transposed, of a block of keys (columns) and one of queries (rows):
//
//     P^T = exp(scale K Q^T + mask - maximum),    O += P V                                     forward
//     P^T = exp(scale K Q^T + mask - lse),    dS^T = scale P^T (V dO^T - sum(dO O)),           backward
//     dV += P^T dO,    dK += dS^T Q,    dQ += dS K
//
// (Dao et al., "FlashAttention", 2022, algorithms 1 and 4.) Threads share the heads: of queries, or of keys.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using c10::BFloat16;
using at::native::cpublas::brgemm;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;

constexpr int64_t ROWS = 64;
constexpr int64_t COLUMNS = 256;

// (batch, heads, tokens, width), of which the last is contiguous.
struct Operand {
  BFloat16* data;
  int64_t batch, head, token;

  BFloat16* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

int64_t even(int64_t n) { return (n + 1) / 2 * 2; }

// What brgemm takes as its second operand has pairs of its rows beside each other, as one number of 32 bits. Rows
// beyond the last are zero.

// (rows, width), for a product that sums over rows.
void pack(const BFloat16* x, int64_t stride, int64_t rows, int64_t padded, int64_t width, BFloat16* packed) {
  auto to = reinterpret_cast<uint32_t*>(packed);
  for (int64_t r = 0; r < padded; r += 2, to += width) {
    auto low = reinterpret_cast<const uint16_t*>(x + r * stride), high = low + stride;
    if (r + 1 < rows)
      for (int64_t d = 0; d < width; ++d) to[d] = low[d] | uint32_t(high[d]) << 16;
    else
      for (int64_t d = 0; d < width; ++d) to[d] = r < rows ? low[d] : 0;
  }
}

// The transpose of (rows, width), width a multiple of 32, to (width, ROWS), for a product that sums over width.
void pack_transposed(const BFloat16* x, int64_t stride, int64_t rows, int64_t width, BFloat16* packed) {
  constexpr int64_t n = 16;
  auto to = reinterpret_cast<float*>(packed);
  if (rows < ROWS) std::fill(to, to + ROWS * width / 2, 0.f);
  int64_t r = 0;
  for (; r + n <= rows; r += n)
    for (int64_t d = 0; d < width / 2; d += n)
      at::vec::transpose_mxn<float, n, n>(
          reinterpret_cast<const float*>(x + r * stride) + d, stride / 2, to + d * ROWS + r, ROWS);
  for (; r < rows; ++r)
    for (int64_t d = 0; d < width / 2; ++d) to[d * ROWS + r] = reinterpret_cast<const float*>(x + r * stride)[d];
}

// (columns, ROWS) to (ROWS, padded), with zeros beyond the last column.
void transpose(const BFloat16* x, int64_t columns, int64_t padded, BFloat16* to) {
  int64_t c = 0;
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int64_t n = 32;
  for (; c + n <= columns; c += n)
    for (int64_t r = 0; r < ROWS; r += n)
      at::vec::transpose_mxn<BFloat16, n, n>(x + c * ROWS + r, ROWS, to + r * padded + c, padded);
#endif
  for (; c < padded; ++c)
    for (int64_t r = 0; r < ROWS; ++r) to[r * padded + c] = c < columns ? x[c * ROWS + r] : BFloat16(0);
}

float dot(const BFloat16* x, const BFloat16* y, int64_t n) {
  Floats sum(0.f);
  for (int64_t i = 0; i < n; i += Halves::size()) {
    auto [a, b] = at::vec::convert_to_float(Halves::loadu(x + i));
    auto [c, d] = at::vec::convert_to_float(Halves::loadu(y + i));
    sum = at::vec::fmadd(a, c, at::vec::fmadd(b, d, sum));
  }
  return at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return p + q; }, sum);
}

void store(const float* x, int64_t width, BFloat16* to, float scale = 1.f) {
  for (int64_t d = 0; d < width; d += Halves::size())
    at::vec::convert_from_float<BFloat16>(Floats::loadu(x + d) * Floats(scale),
                                          Floats::loadu(x + d + Floats::size()) * Floats(scale)).store(to + d);
}

void store(const std::vector<float>& x, int64_t tokens, int64_t width, const Operand& to, int64_t b, int64_t h) {
  for (int64_t t = 0; t < tokens; ++t) store(&x[t * width], width, to.at(b, h, t));
}

// One thread's memory for the forward pass.
struct Forward {
  std::vector<float> o, scores;
  std::vector<BFloat16> v, q_transposed, p, p_transposed;

  Forward(int64_t keys, int64_t width)
      : o(ROWS * width), scores(COLUMNS * ROWS), v(even(keys) * width), q_transposed(ROWS * width), p(COLUMNS * ROWS),
        p_transposed(COLUMNS * ROWS) {}
};

// One thread's memory for the backward pass.
struct Backward {
  std::vector<float> gq, gk, gv, lse, delta, scores, grads;
  std::vector<BFloat16> k, q, q_transposed, grad, grad_transposed, p, s, s_transposed;

  Backward(int64_t queries, int64_t keys, int64_t width)
      : gq(queries * width), gk(keys * width), gv(keys * width), lse(queries + ROWS), delta(queries + ROWS),
        scores(COLUMNS * ROWS), grads(COLUMNS * ROWS), k(COLUMNS * width), q(ROWS * width), q_transposed(ROWS * width),
        grad(ROWS * width), grad_transposed(ROWS * width), p(COLUMNS * ROWS), s(COLUMNS * ROWS),
        s_transposed(COLUMNS * ROWS) {}
};

// What is added to scores: (batch, heads, queries, keys) of float or BFloat16, or nothing, where data is null.
struct Mask {
  const void* data;
  bool half;
  int64_t batch, head, query, key;

  int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const { return b * batch + h * head + i * query + j * key; }

  float operator[](int64_t at) const {
    return half ? float(static_cast<const BFloat16*>(data)[at]) : static_cast<const float*>(data)[at];
  }
};

// The scores of a key and `n` of the queries, with what is added to them. at: where the mask has the first of all queries,
// of which there are `rows`; i: the first of these here.
Floats score(const float* scores, float scale, const Mask& mask, int64_t at, int64_t rows, int64_t i) {
  constexpr int64_t n = Floats::size();
  const Floats x = Floats::loadu(scores + i) * Floats(scale);
  if (!mask.data) return x;
  float added[n];
  for (int64_t u = 0; u < n; ++u) added[u] = i + u < rows ? mask[at + (i + u) * mask.query] : 0.f;
  return x + Floats::loadu(added);
}

// The numbers, but `other` for queries before `unseen`, of which the first here is i.
Floats hidden(Floats x, int64_t i, int64_t unseen, float other) {
  if (i >= unseen) return x;
  float seen[Floats::size()];
  x.store(seen);
  std::fill(seen, seen + std::min<int64_t>(unseen - i, Floats::size()), other);
  return Floats::loadu(seen);
}

// The first `count` numbers, and zeros: what is made of queries that are not there may be no number.
Floats first(Floats x, int64_t count) {
  if (count >= Floats::size()) return x;
  return Floats::set(Floats(0.f), x, std::max<int64_t>(count, 0));
}

// Scores of `columns` keys and ROWS queries become P^T, where `most` and `sum` are of earlier keys, and then of these,
// too; `faded` is what the earlier ones count for by then. at, rows: as above, of the first key; causal: how many queries
// do not see the first key, one more for each that follows, or none at all.
void keys_seen(float* scores, int64_t columns, float scale, const Mask& mask, int64_t at, int64_t rows,
               const int64_t* causal, float* most, float* sum, float* faded, BFloat16* p) {
  constexpr int64_t n = Floats::size(), parts = ROWS / n;
  constexpr float nothing = -std::numeric_limits<float>::infinity();
  Floats top[parts], total[parts];
  for (int64_t k = 0; k < parts; ++k) top[k] = Floats::loadu(most + k * n);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t k = 0; k < parts; ++k) {
      Floats x = score(scores + c * ROWS, scale, mask, at + c * mask.key, rows, k * n);
      if (causal) x = hidden(x, k * n, *causal + c, nothing);
      x.store(scores + c * ROWS + k * n);
      top[k] = at::vec::maximum(top[k], x);
    }
  for (int64_t k = 0; k < parts; ++k) {
    const Floats before = Floats::loadu(most + k * n);
    top[k].store(most + k * n);
    top[k] = Floats::blendv(top[k], Floats(0.f), top[k] == Floats(nothing));  // of a query that has seen no key
    const Floats fades = (before - top[k]).exp_u20();
    fades.store(faded + k * n);
    total[k] = Floats::loadu(sum + k * n) * fades;
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t k = 0; k < parts; k += 2) {
      Floats x[2];
      for (int64_t half = 0; half < 2; ++half) {
        x[half] = (Floats::loadu(scores + c * ROWS + (k + half) * n) - top[k + half]).exp_u20();
        total[k + half] = total[k + half] + x[half];
      }
      at::vec::convert_from_float<BFloat16>(x[0], x[1]).store(p + c * ROWS + k * n);
    }
  for (int64_t k = 0; k < parts; ++k) total[k].store(sum + k * n);
}

// Scores of a key and ROWS queries become P^T, their gradients dS^T. at, rows: as above; the first `unseen` do not see
// the key.
void one_key(const float* scores, const float* grads, const float* lse, const float* delta, float scale,
             const Mask& mask, int64_t at, int64_t rows, int64_t unseen, BFloat16* p, BFloat16* s) {
  constexpr int64_t n = Floats::size();
  for (int64_t r = 0; r < ROWS; r += 2 * n) {
    Floats x[2], y[2];
    for (int64_t half = 0, i = r; half < 2; ++half, i += n) {
      const Floats made = (score(scores, scale, mask, at, rows, i) - Floats::loadu(lse + i)).exp_u20();
      x[half] = first(hidden(made, i, unseen, 0.f), rows - i);
      y[half] = first(x[half] * (Floats::loadu(grads + i) - Floats::loadu(delta + i)) * Floats(scale), rows - i);
    }
    at::vec::convert_from_float<BFloat16>(x[0], x[1]).store(p + r);
    at::vec::convert_from_float<BFloat16>(y[0], y[1]).store(s + r);
  }
}

}  // namespace

// operands: q, k, v, out. sizes: as below. strides: of (batch, head, token) of the operands and of lse; of the mask.
extern "C" void attention(BFloat16** operands, float* lse, const void* added, int64_t half, const int64_t* sizes,
                          const int64_t* strides, double scale, int64_t causal) {
  const int64_t batch = sizes[0], groups = sizes[1], heads = sizes[2], queries = sizes[3], keys = sizes[4],
                width = sizes[5];
  Operand x[4];
  for (int i = 0; i < 4; ++i) x[i] = {operands[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
  const Operand &q = x[0], &k = x[1], &v = x[2], &out = x[3];
  const int64_t* of_lse = strides + 12;
  const int64_t* of_mask = strides + 15;
  const Mask mask{added, half != 0, of_mask[0], of_mask[1], of_mask[2], of_mask[3]};

  at::parallel_for(0, batch * groups * heads, 1, [&](int64_t begin, int64_t end) {
    Forward w(keys, width);
    float most[ROWS], sum[ROWS], faded[ROWS];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / (groups * heads), h = task % (groups * heads), g = h / heads;
      if (task == begin || h % heads == 0) pack(v.at(b, g, 0), v.token, keys, even(keys), width, w.v.data());
      for (int64_t i = 0; i < queries; i += ROWS) {
        const int64_t rows = std::min(ROWS, queries - i), last = causal ? std::min(keys, i + rows) : keys;
        std::fill(w.o.begin(), w.o.end(), 0.f);
        std::fill(sum, sum + ROWS, 0.f);
        std::fill(most, most + ROWS, -std::numeric_limits<float>::infinity());
        pack_transposed(q.at(b, h, i), q.token, rows, width, w.q_transposed.data());
        for (int64_t j = 0; j < last; j += COLUMNS) {
          const int64_t columns = std::min(COLUMNS, last - j), unseen = j - i;
          brgemm(columns, ROWS, width, k.token, ROWS, ROWS, false, k.at(b, g, j), w.q_transposed.data(),
                 w.scores.data());
          keys_seen(w.scores.data(), columns, scale, mask, mask.at(b, h, i, j), rows, causal ? &unseen : nullptr, most,
                    sum, faded, w.p.data());
          transpose(w.p.data(), columns, even(columns), w.p_transposed.data());
          for (int64_t r = 0; j && r < rows; ++r)
            for (int64_t d = 0; d < width; d += Floats::size())
              (Floats::loadu(&w.o[r * width + d]) * Floats(faded[r])).store(&w.o[r * width + d]);
          brgemm(rows, width, even(columns), even(columns), width, width, true, w.p_transposed.data(),
                 &w.v[j * width], w.o.data());
        }
        for (int64_t r = 0; r < rows; ++r) {
          const bool none = sum[r] == 0.f;  // all keys are hidden
          store(&w.o[r * width], width, out.at(b, h, i + r), none ? 0.f : 1.f / sum[r]);
          lse[b * of_lse[0] + h * of_lse[1] + (i + r) * of_lse[2]] = none ? 0.f : most[r] + std::log(sum[r]);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

// operands: grad, q, k, v, out, gq, gk, gv. sizes: batch, heads of keys, heads of queries for each, queries, keys,
// width. strides: of (batch, head, token) of the operands and of lse; of (batch, head, query, key) of the mask,
// zeros where there is none.
extern "C" void attention_backward(BFloat16** operands, const float* lse, const void* added, int64_t half,
                                   const int64_t* sizes, const int64_t* strides, double scale, int64_t causal) {
  const int64_t batch = sizes[0], groups = sizes[1], heads = sizes[2], queries = sizes[3], keys = sizes[4],
                width = sizes[5];
  Operand x[8];
  for (int i = 0; i < 8; ++i) x[i] = {operands[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
  const Operand &grad = x[0], &q = x[1], &k = x[2], &v = x[3], &out = x[4];
  const int64_t* of_lse = strides + 24;
  const int64_t* of_mask = strides + 27;
  const Mask mask{added, half != 0, of_mask[0], of_mask[1], of_mask[2], of_mask[3]};

  at::parallel_for(0, batch * groups, 1, [&](int64_t begin, int64_t end) {
    Backward w(queries, keys, width);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / groups, g = task % groups;
      std::fill(w.gk.begin(), w.gk.end(), 0.f);
      std::fill(w.gv.begin(), w.gv.end(), 0.f);
      for (int64_t h = g * heads; h < (g + 1) * heads; ++h) {
        std::fill(w.gq.begin(), w.gq.end(), 0.f);
        for (int64_t i = 0; i < queries; ++i) {
          w.lse[i] = lse[b * of_lse[0] + h * of_lse[1] + i * of_lse[2]];
          w.delta[i] = dot(grad.at(b, h, i), out.at(b, h, i), width);
        }
        for (int64_t j = 0; j < keys; j += COLUMNS) {
          const int64_t here = std::min(COLUMNS, keys - j);
          pack(k.at(b, g, j), k.token, here, even(here), width, w.k.data());
          for (int64_t i = causal ? j / ROWS * ROWS : 0; i < queries; i += ROWS) {
            const int64_t rows = std::min(ROWS, queries - i);
            const int64_t columns = causal ? std::min(here, i + rows - j) : here;
            pack_transposed(q.at(b, h, i), q.token, rows, width, w.q_transposed.data());
            pack_transposed(grad.at(b, h, i), grad.token, rows, width, w.grad_transposed.data());
            pack(q.at(b, h, i), q.token, rows, ROWS, width, w.q.data());
            pack(grad.at(b, h, i), grad.token, rows, ROWS, width, w.grad.data());
            brgemm(columns, ROWS, width, k.token, ROWS, ROWS, false, k.at(b, g, j), w.q_transposed.data(),
                   w.scores.data());
            brgemm(columns, ROWS, width, v.token, ROWS, ROWS, false, v.at(b, g, j), w.grad_transposed.data(),
                   w.grads.data());
            for (int64_t c = 0; c < columns; ++c) {
              one_key(&w.scores[c * ROWS], &w.grads[c * ROWS], &w.lse[i], &w.delta[i], scale, mask,
                      mask.at(b, h, i, j + c), rows, causal ? j + c - i : 0, &w.p[c * ROWS], &w.s[c * ROWS]);
            }
            transpose(w.s.data(), columns, even(columns), w.s_transposed.data());
            brgemm(columns, width, ROWS, ROWS, width, width, true, w.p.data(), w.grad.data(), &w.gv[j * width]);
            brgemm(columns, width, ROWS, ROWS, width, width, true, w.s.data(), w.q.data(), &w.gk[j * width]);
            brgemm(rows, width, even(columns), even(columns), width, width, true, w.s_transposed.data(), w.k.data(),
                   &w.gq[i * width]);
          }
        }
        store(w.gq, queries, width, x[5], b, h);
      }
      store(w.gk, keys, width, x[6], b, g);
      store(w.gv, keys, width, x[7], b, g);
    }
    at::native::cpublas::brgemm_release();
  });
}
