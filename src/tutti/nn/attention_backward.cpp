// The backward pass of attention over bfloat16 on a CPU, with products by oneDNN's brgemm, which sums in float32 and
// uses AMX where there is any. Of each block of keys (columns) and queries (rows) the transposed scores are made anew:
//
//     P^T = exp(scale K Q^T + mask - lse),    dS^T = scale P^T (V dO^T - sum(dO O)),
//     dV += P^T dO,    dK += dS^T Q,    dQ += dS K
//
// (Dao et al., "FlashAttention", 2022, algorithm 4.) Threads share the heads of keys.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
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

void store(const std::vector<float>& x, int64_t tokens, int64_t width, const Operand& to, int64_t b, int64_t h) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t d = 0; d < width; d += Halves::size()) {
      const float* at = &x[t * width + d];
      at::vec::convert_from_float<BFloat16>(Floats::loadu(at), Floats::loadu(at + Floats::size()))
          .store(to.at(b, h, t) + d);
    }
}

// One thread's memory.
struct Work {
  std::vector<float> gq, gk, gv, lse, delta, scores, grads;
  std::vector<BFloat16> k, q, q_transposed, grad, grad_transposed, p, s, s_transposed;

  Work(int64_t queries, int64_t keys, int64_t width)
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

// Scores of a key and ROWS queries become P^T, their gradients dS^T. at: where the mask has the first of the queries,
// of which there are `rows`; the first `unseen` do not see the key.
void one_key(const float* scores, const float* grads, const float* lse, const float* delta, float scale,
             const Mask& mask, int64_t at, int64_t rows, int64_t unseen, BFloat16* p, BFloat16* s) {
  constexpr int64_t n = Floats::size();
  float seen[n];
  for (int64_t r = 0; r < ROWS; r += 2 * n) {
    Floats x[2], y[2];
    for (int64_t half = 0, i = r; half < 2; ++half, i += n) {
      Floats score = Floats::loadu(scores + i) * Floats(scale);
      if (mask.data) {
        for (int64_t u = 0; u < n; ++u) seen[u] = i + u < rows ? mask[at + (i + u) * mask.query] : 0.f;
        score = score + Floats::loadu(seen);
      }
      x[half] = (score - Floats::loadu(lse + i)).exp_u20();
      if (i < unseen) {
        x[half].store(seen);
        std::fill(seen, seen + std::min(unseen - i, n), 0.f);
        x[half] = Floats::loadu(seen);
      }
      y[half] = x[half] * (Floats::loadu(grads + i) - Floats::loadu(delta + i)) * Floats(scale);
    }
    at::vec::convert_from_float<BFloat16>(x[0], x[1]).store(p + r);
    at::vec::convert_from_float<BFloat16>(y[0], y[1]).store(s + r);
  }
}

}  // namespace

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
    Work w(queries, keys, width);
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
