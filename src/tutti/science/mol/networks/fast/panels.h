// Products of features with layers, whose weights lie in panels, and loops over rows of features.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#ifndef NAMESPACE
#define NAMESPACE tutti_compiled
#endif
#ifndef REAL
#define REAL float
#endif
#define NAMED(name, real) NAMED_(name, real)
#define NAMED_(name, real) name "_" #real

namespace {

using T = REAL;
using Vec = at::vec::Vectorized<T>;
using at::vec::fmadd;
constexpr int64_t WIDTH = Vec::size(), PANEL = 64;
constexpr int64_t SHARED = 96;  // rows that are worth a second thread
constexpr int HIGH = 6, WIDE = 4;  // rows and vectors of a tile, whose sums stay in registers

template <class F>
void each_row(int64_t rows, const F& f) {
  at::parallel_for(0, rows, SHARED, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) f(r);
  });
}

inline void multiply(T* x, const T* by, int64_t count) {
  for (int64_t c = 0; c < count; c += WIDTH) (Vec::loadu(x + c) * Vec::loadu(by + c)).store(x + c);
}

inline double total(const Vec& x) {
  T parts[WIDTH];
  x.store(parts);
  double whole = 0;
  for (int64_t c = 0; c < WIDTH; ++c) whole += parts[c];
  return whole;
}

template <int ROWS, int VECTORS>
void tile(const T* x, const T* panel, T* out, int64_t n, int64_t k, const T* bias, bool adds) {
  Vec sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      sum[r][v] = bias ? Vec::loadu(bias + v * WIDTH) : Vec(T(0));
      if (adds) sum[r][v] = sum[r][v] + Vec::loadu(out + r * n + v * WIDTH);
    }
  for (int64_t c = 0; c < k; ++c) {
    Vec w[VECTORS];
    for (int v = 0; v < VECTORS; ++v) w[v] = Vec::loadu(panel + c * PANEL + v * WIDTH);
    for (int r = 0; r < ROWS; ++r) {
      const Vec each(x[r * k + c]);
      for (int v = 0; v < VECTORS; ++v) sum[r][v] = fmadd(each, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) sum[r][v].store(out + r * n + v * WIDTH);
}

template <int ROWS>
void tiles(const T* x, const T* panel, T* out, int64_t n, int64_t k, const T* bias, bool adds, int64_t rows) {
  if constexpr (ROWS > 0) {
    if (rows < ROWS) return tiles<ROWS - 1>(x, panel, out, n, k, bias, adds, rows);
    tile<ROWS, WIDE>(x, panel, out, n, k, bias, adds);
  }
}

// out (rows, n) = x (rows, k) w + bias, and what was in `out` if it `adds`. w: panels (n / PANEL, k, PANEL).
inline void product(const T* x, const T* w, T* out, int64_t rows, int64_t n, int64_t k, const T* bias, bool adds) {
  at::parallel_for(0, (rows + HIGH - 1) / HIGH, SHARED / HIGH, [&](int64_t from, int64_t to) {
    for (int64_t c = 0; c < n; c += WIDE * WIDTH) {
      const T* panel = w + c / PANEL * PANEL * k + c % PANEL;
      for (int64_t r = from * HIGH; r < std::min(rows, to * HIGH); r += HIGH)
        tiles<HIGH>(x + r * k, panel, out + r * n + c, n, k, bias ? bias + c : nullptr, adds, rows - r);
    }
  });
}

}  // namespace

