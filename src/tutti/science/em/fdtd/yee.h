// The Yee update of rows, planes and slabs (layout.py describes the arrays), and its transpose. adjoint.cpp and
// forward.cpp are the time loops; kernels.py puts this file before them.
//
// Axes are 0, 1, 2 with 2 contiguous. Component p of E has the terms + d_(p+1) H_(p+2) and - d_(p+2) H_(p+1) by
// backward differences; of -H alike, with E and forward differences, + d_(p+2) E_(p+1) and - d_(p+1) E_(p+2).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Inductor's flags turn this off, and with it `omp simd`.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")
#endif

#ifndef NAMESPACE
#define NAMESPACE tutti_compiled
#endif

namespace {

using Tensors = at::TensorList;
using Ints = at::IntArrayRef;
enum Side { E = 0, H = 1 };

// Subnormal numbers are zero within a block: fields decay into them, and they are slow.
struct FlushSubnormal {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  FlushSubnormal() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormal() { _mm_setcsr(before); }
#endif
};

// A barrier that spins briefly and then yields: cores may be shared with other programs.
class Barrier {
 public:
  explicit Barrier(int64_t members) : members_(members) {}
  void wait() {
    if (members_ == 1) return;
    const int64_t turn = turn_.load(std::memory_order_relaxed);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
      here_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int64_t i = 0; turn_.load(std::memory_order_acquire) == turn; ++i)
      if (i > 4000) std::this_thread::yield();
  }

 private:
  const int64_t members_;
  std::atomic<int64_t> here_{0}, turn_{0};
};

template <class T>
T* data(const at::Tensor& x) {
  return x.numel() ? x.data_ptr<T>() : nullptr;
}

// Source entries of one kind, sorted by shot and plane: (shot, plane) has first[shot * planes + plane] to the next.
template <class T>
struct Entries {
  const int64_t *first = nullptr, *component = nullptr, *place = nullptr, *wave = nullptr;
  const T* amount = nullptr;
  explicit Entries(Tensors x)
      : first(data<int64_t>(x[0])), component(data<int64_t>(x[1])), place(data<int64_t>(x[2])),
        wave(data<int64_t>(x[3])), amount(data<T>(x[4])) {}
};

// Numbers read after each step, sorted by plane.
struct Group {
  const int64_t *first, *component, *place;
  int64_t count;
  Group(const at::Tensor& f, const at::Tensor& c, const at::Tensor& p)
      : first(data<int64_t>(f)), component(data<int64_t>(c)), place(data<int64_t>(p)), count(p.numel()) {}
};

// What is read after steps: samples of places (steps / every, shots, count), or running Fourier sums
// (shots, frequencies, count, 2). The adjoint takes their gradients in the same arrays.
template <class T>
struct Readings {
  std::vector<Group> groups;
  std::vector<int64_t> every, frequencies;
  std::vector<T*> numbers;
  std::vector<const T*> phase;  // null, or (steps, frequencies, 2)

  // read: groups of (first, component, place); arrays and phases alike
  Readings(Tensors read, Tensors arrays, Tensors phases, Ints step) {
    for (size_t g = 0; g < arrays.size(); ++g) {
      groups.emplace_back(read[3 * g], read[3 * g + 1], read[3 * g + 2]);
      every.push_back(step[g]), numbers.push_back(data<T>(arrays[g])), phase.push_back(data<T>(phases[g]));
      frequencies.push_back(phases[g].numel() ? phases[g].size(1) : 0);
    }
  }

  // The row of samples that a step writes, -1 if it writes none. start: steps done before this loop.
  int64_t slot(size_t g, int64_t step, int64_t start) const {
    if ((start + step + 1) % every[g]) return -1;
    return (start + step + 1) / every[g] - start / every[g] - 1;
  }
};

template <class T>
struct Pole {
  int64_t from[3], to[3];  // a box of cells
  T keep, spring, dt;      // J = keep J + gain E - spring P; P = P + dt J
  const T* gain[3];
  T *j[3], *p[3];
  int64_t cells() const { return (to[0] - from[0]) * (to[1] - from[1]) * (to[2] - from[2]); }
  int64_t row(int64_t i, int64_t k) const {
    return ((i - from[0]) * (to[1] - from[1]) + k - from[1]) * (to[2] - from[2]);
  }
  bool has(int64_t i, int64_t k) const { return i >= from[0] && i < to[0] && k >= from[1] && k < to[1]; }
};

struct Box {
  int64_t from[3] = {0, 0, 0}, to[3] = {0, 0, 0};
  int64_t cells() const { return (to[0] - from[0]) * (to[1] - from[1]) * (to[2] - from[2]); }
  bool has(int64_t i, int64_t j) const { return i >= from[0] && i < to[0] && j >= from[1] && j < to[1]; }
  int64_t row(int64_t i, int64_t j) const {
    return ((i - from[0]) * (to[1] - from[1]) + j - from[1]) * (to[2] - from[2]);
  }
};

template <class T>
struct Model {
  int64_t n[3], stride[3], cells, shots, planes;
  bool flat;                    // one plane of axis 1: two dimensions
  int64_t wall[2];              // planes of axis 0 whose tangential E is zero
  T *f[2][3], *psi[2][3][2];
  const T *a[2][3], *b[2][3];   // X = a X + b curl; null `a` is 1, `b` of one number is `scalar`
  T scalar[2][3];
  const T *w[2][3], *decay[2][3], *drive[2][3];
  const int64_t* at[2][3];      // place along an axis -> row of its layer, or -1
  int64_t layer[2][3];          // rows of the layers of an axis
  int64_t end[2][2][2];         // of axis 2: side, low or high, from and to
  std::vector<Pole<T>> poles;

  // fields: E0 E1 E2 H0 H1 H2, then psi of E (component, term), then of H. coefficients: a and b of E and H. lines: for
  // E then H, by axis: w, decay, drive, at. ints: n, shots, flat, wall, end, then 6 per pole. reals: 3 per pole. pole
  // tensors: gain, j, p by component.
  Model(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints, at::ArrayRef<double> reals) {
    std::copy(ints.begin(), ints.begin() + 3, n);
    shots = ints[3], flat = ints[4], wall[0] = ints[5], wall[1] = ints[6], planes = n[0];
    stride[0] = n[1] * n[2], stride[1] = n[2], stride[2] = 1, cells = n[0] * n[1] * n[2];
    for (int s = 0; s < 2; ++s)
      for (int p = 0; p < 3; ++p) {
        f[s][p] = data<T>(fields[3 * s + p]);
        for (int t = 0; t < 2; ++t) psi[s][p][t] = data<T>(fields[6 + 6 * s + 2 * p + t]);
        a[s][p] = data<T>(coefficients[6 * s + p]);
        const at::Tensor& given = coefficients[6 * s + 3 + p];
        b[s][p] = given.numel() > 1 ? data<T>(given) : nullptr;
        scalar[s][p] = given.numel() == 1 ? *data<T>(given) : T(0);
        const int64_t l = 12 * s + 4 * p;
        w[s][p] = data<T>(lines[l]), decay[s][p] = data<T>(lines[l + 1]), drive[s][p] = data<T>(lines[l + 2]);
        at[s][p] = data<int64_t>(lines[l + 3]), layer[s][p] = lines[l + 1].numel();
        for (int64_t x = 0; s == 0 && p < 2 && x < 4; ++x) end[p][x / 2][x % 2] = ints[7 + 4 * p + x];
      }
    for (int64_t i = 0; 15 + 6 * i < int64_t(ints.size()); ++i) {
      Pole<T> x;
      std::copy_n(ints.begin() + 15 + 6 * i, 3, x.from), std::copy_n(ints.begin() + 18 + 6 * i, 3, x.to);
      x.keep = T(reals[3 * i]), x.spring = T(reals[3 * i + 1]), x.dt = T(reals[3 * i + 2]);
      for (int p = 0; p < 3; ++p) {
        x.gain[p] = data<T>(pole[9 * i + p]), x.j[p] = data<T>(pole[9 * i + 3 + p]);
        x.p[p] = data<T>(pole[9 * i + 6 + p]);
      }
      poles.push_back(x);
    }
  }

  bool is_node(Side s, int p, int axis) const { return (s == E) != (p == axis); }

  // Places along an axis that are updated. Tangential E on the walls is zero.
  void range(Side s, int p, int axis, int64_t& from, int64_t& to) const {
    from = 0, to = n[axis];
    if (axis == 1 && flat) return;
    if (!is_node(s, p, axis)) to = n[axis] - 1;
    else if (s == E) from = 1, to = n[axis] - 1;
  }

  bool updates(Side s, int p, int64_t plane) const {
    if (!f[s][p]) return false;
    return !(s == E && p != 0) || (plane != wall[0] && plane != wall[1]);
  }

  static int direction(Side s, int p, int term) { return (p + 1 + ((s == E) ? term : 1 - term)) % 3; }
  static int source(Side s, int p, int term) { return (p + 2 - ((s == E) ? term : 1 - term)) % 3; }

  T* psi_row(Side s, int p, int t, int64_t shot, int64_t i, int64_t j) const {
    const int d = direction(s, p, t);
    const int64_t count = layer[s][d];
    if (d == 0) return psi[s][p][t] + ((shot * count + at[s][0][i]) * n[1] + j) * n[2];
    if (d == 1) return psi[s][p][t] + ((shot * n[0] + i) * count + at[s][1][j]) * n[2];
    return psi[s][p][t] + ((shot * n[0] + i) * n[1] + j) * count;
  }

  bool in_layer(Side s, int d, int64_t i, int64_t j) const {
    if (!layer[s][d]) return false;
    return d == 0 ? at[s][0][i] >= 0 : d == 1 ? at[s][1][j] >= 0 : true;
  }

  // Where the rows of a layer of axis 2 begin in `psi_row`, minus the place in a row.
  int64_t shift(Side s, int side) const { return side ? end[s][0][1] - end[s][0][0] - end[s][1][0] : -end[s][0][0]; }

  // cur += sign (w (x1 - x0)) + psi over a row, where psi has the sign of the term: psi = decay psi + drive sign w (..).
  template <Side s>
  void term(int p, int t, int64_t shot, int64_t i, int64_t j, int64_t k0, int64_t k1, T* __restrict cur, bool first) const {
    const int d = direction(s, p, t);
    const T* x = f[1 - s][source(s, p, t)] + shot * cells + i * stride[0] + j * stride[1];
    const T* __restrict x1 = s == E ? x : x + stride[d];
    const T* __restrict x0 = s == E ? x - stride[d] : x;
    const T sign = t ? T(-1) : T(1);
    if (d < 2) {
      const int64_t place = d == 0 ? i : j;
      const T v = sign * w[s][d][place];
      if (first) {
#pragma omp simd
        for (int64_t k = k0; k < k1; ++k) cur[k] = v * (x1[k] - x0[k]);
      } else {
#pragma omp simd
        for (int64_t k = k0; k < k1; ++k) cur[k] += v * (x1[k] - x0[k]);
      }
      if (!in_layer(s, d, i, j)) return;
      const int64_t m = at[s][d][place];
      const T de = decay[s][d][m], dr = drive[s][d][m];
      T* __restrict y = psi_row(s, p, t, shot, i, j);
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) {
        y[k] = de * y[k] + dr * (v * (x1[k] - x0[k]));
        cur[k] += y[k];
      }
      return;
    }
    const T* __restrict v = w[s][2];
    if (first) {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) cur[k] = sign * v[k] * (x1[k] - x0[k]);
    } else {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) cur[k] += sign * v[k] * (x1[k] - x0[k]);
    }
  }

  // What psi of axis 2 adds to an advanced row, and to what is stored of its curl (places from, to).
  template <Side s>
  void ends(int p, int64_t shot, int64_t i, int64_t j, T* stored = nullptr, int64_t from = 0, int64_t to = 0) const {
    const int t = direction(s, p, 0) == 2 ? 0 : 1, d = direction(s, p, t);
    if (d != 2 || !layer[s][2] || !f[1 - s][source(s, p, t)]) return;
    const int64_t row = i * stride[0] + j * stride[1];
    const T* x = f[1 - s][source(s, p, t)] + shot * cells + row;
    const T* __restrict x1 = s == E ? x : x + 1;
    const T* __restrict x0 = s == E ? x - 1 : x;
    const T* __restrict v = w[s][2];
    T* __restrict z = f[s][p] + shot * cells + row;
    const T* __restrict gain = b[s][p] ? b[s][p] + row : nullptr;
    const T sign = t ? T(-1) : T(1), one = scalar[s][p];
    for (int side = 0; side < 2; ++side) {
      const int64_t by = shift(s, side), k0 = end[s][side][0], k1 = end[s][side][1];
      const T* __restrict de = decay[s][2] + by;
      const T* __restrict dr = drive[s][2] + by;
      T* __restrict y = psi_row(s, p, t, shot, i, j) + by;
      if (gain) {
#pragma omp simd
        for (int64_t k = k0; k < k1; ++k) {
          y[k] = de[k] * y[k] + dr[k] * (sign * v[k] * (x1[k] - x0[k]));
          z[k] += gain[k] * y[k];
        }
      } else {
#pragma omp simd
        for (int64_t k = k0; k < k1; ++k) {
          y[k] = de[k] * y[k] + dr[k] * (sign * v[k] * (x1[k] - x0[k]));
          z[k] += one * y[k];
        }
      }
      for (int64_t k = std::max(k0, from); stored && k < std::min(k1, to); ++k) stored[k - from] += y[k];
    }
  }

  // The curl of a row.
  template <Side s>
  void curl(int p, int64_t shot, int64_t i, int64_t j, int64_t k0, int64_t k1, T* cur) const {
    bool first = true;
    for (int t = 0; t < 2; ++t)
      if (f[1 - s][source(s, p, t)]) term<s>(p, t, shot, i, j, k0, k1, cur, first), first = false;
  }

  // Curl and advance of a row in one loop, with the same bits as `curl` and `advance`. VECTOR: which term is along axis
  // 2, or none (2). PSI: bit t is set if term t lies in a layer of axis 0 or 1.
  template <Side s, int VECTOR, bool TWO, int PSI, bool KEEP, bool GAIN>
  void fused(int p, int one, int two, int64_t shot, int64_t i, int64_t j, int64_t k0, int64_t k1) const {
    const int64_t row = i * stride[0] + j * stride[1];
    const int d0 = direction(s, p, one), d1 = direction(s, p, two);
    const T* from0 = f[1 - s][source(s, p, one)] + shot * cells + row;
    const T* from1 = TWO ? f[1 - s][source(s, p, two)] + shot * cells + row : from0;
    const T* __restrict x1 = s == E ? from0 : from0 + stride[d0];
    const T* __restrict x0 = s == E ? from0 - stride[d0] : from0;
    const T* __restrict y1 = s == E ? from1 : from1 + stride[d1];
    const T* __restrict y0 = s == E ? from1 - stride[d1] : from1;
    const T* __restrict w2 = w[s][2];
    const T sx = one ? T(-1) : T(1), sy = two ? T(-1) : T(1);
    const T vx = VECTOR == 0 ? sx : sx * w[s][d0][d0 == 0 ? i : j];
    const T vy = VECTOR == 1 ? sy : sy * w[s][d1][d1 == 0 ? i : j];
    const int64_t mx = PSI & 1 ? at[s][d0][d0 == 0 ? i : j] : 0, my = PSI & 2 ? at[s][d1][d1 == 0 ? i : j] : 0;
    const T dex = PSI & 1 ? decay[s][d0][mx] : T(0), drx = PSI & 1 ? drive[s][d0][mx] : T(0);
    const T dey = PSI & 2 ? decay[s][d1][my] : T(0), dry = PSI & 2 ? drive[s][d1][my] : T(0);
    T* __restrict px = PSI & 1 ? psi_row(s, p, one, shot, i, j) : nullptr;
    T* __restrict py = PSI & 2 ? psi_row(s, p, two, shot, i, j) : nullptr;
    T* __restrict z = f[s][p] + shot * cells + row;
    const T* __restrict keep = KEEP ? a[s][p] + row : nullptr;
    const T* __restrict gain = GAIN ? b[s][p] + row : nullptr;
    const T single = scalar[s][p];
#pragma omp simd
    for (int64_t k = k0; k < k1; ++k) {
      const T first = (VECTOR == 0 ? vx * w2[k] : vx) * (x1[k] - x0[k]);
      T cur = first;
      if (PSI & 1) {
        px[k] = dex * px[k] + drx * first;
        cur += px[k];
      }
      if (TWO) {
        const T second = (VECTOR == 1 ? vy * w2[k] : vy) * (y1[k] - y0[k]);
        cur += second;
        if (PSI & 2) {
          py[k] = dey * py[k] + dry * second;
          cur += py[k];
        }
      }
      z[k] = (KEEP ? keep[k] * z[k] : z[k]) + (GAIN ? gain[k] : single) * cur;
    }
  }

  template <Side s, int VECTOR, bool TWO, int PSI>
  void fused(int p, int one, int two, int64_t shot, int64_t i, int64_t j, int64_t k0, int64_t k1) const {
    if (a[s][p]) {
      if (b[s][p]) fused<s, VECTOR, TWO, PSI, true, true>(p, one, two, shot, i, j, k0, k1);
      else fused<s, VECTOR, TWO, PSI, true, false>(p, one, two, shot, i, j, k0, k1);
    } else {
      if (b[s][p]) fused<s, VECTOR, TWO, PSI, false, true>(p, one, two, shot, i, j, k0, k1);
      else fused<s, VECTOR, TWO, PSI, false, false>(p, one, two, shot, i, j, k0, k1);
    }
  }

  // X = a X + b (curl) over a row. The same bits as `curl` and `advance`.
  template <Side s>
  void update(int p, int64_t shot, int64_t i, int64_t j, int64_t k0, int64_t k1) const {
    const bool first = f[1 - s][source(s, p, 0)], second = f[1 - s][source(s, p, 1)];
    const int d0 = direction(s, p, 0), d1 = direction(s, p, 1), one = first ? 0 : 1;
    const bool l0 = d0 < 2 && in_layer(s, d0, i, j), l1 = d1 < 2 && in_layer(s, d1, i, j);
    if (first && second) {
      if (d0 == 2) {
        if (l1) fused<s, 0, true, 2>(p, 0, 1, shot, i, j, k0, k1);
        else fused<s, 0, true, 0>(p, 0, 1, shot, i, j, k0, k1);
      } else if (d1 == 2) {
        if (l0) fused<s, 1, true, 1>(p, 0, 1, shot, i, j, k0, k1);
        else fused<s, 1, true, 0>(p, 0, 1, shot, i, j, k0, k1);
      } else if (l0 && l1) fused<s, 2, true, 3>(p, 0, 1, shot, i, j, k0, k1);
      else if (l0) fused<s, 2, true, 1>(p, 0, 1, shot, i, j, k0, k1);
      else if (l1) fused<s, 2, true, 2>(p, 0, 1, shot, i, j, k0, k1);
      else fused<s, 2, true, 0>(p, 0, 1, shot, i, j, k0, k1);
    } else if (direction(s, p, one) == 2) fused<s, 0, false, 0>(p, one, one, shot, i, j, k0, k1);
    else if (one ? l1 : l0) fused<s, 2, false, 1>(p, one, one, shot, i, j, k0, k1);
    else fused<s, 2, false, 0>(p, one, one, shot, i, j, k0, k1);
    ends<s>(p, shot, i, j);
  }

  // X = a X + b cur over a row.
  void advance(Side s, int p, int64_t shot, int64_t row, int64_t k0, int64_t k1, const T* __restrict cur) const {
    T* __restrict x = f[s][p] + shot * cells + row;
    const T* __restrict keep = a[s][p] ? a[s][p] + row : nullptr;
    const T* __restrict gain = b[s][p] ? b[s][p] + row : nullptr;
    const T one = scalar[s][p];
    if (keep && gain) {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) x[k] = keep[k] * x[k] + gain[k] * cur[k];
    } else if (gain) {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) x[k] += gain[k] * cur[k];
    } else if (keep) {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) x[k] = keep[k] * x[k] + one * cur[k];
    } else {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) x[k] += one * cur[k];
    }
  }
};

}  // namespace
