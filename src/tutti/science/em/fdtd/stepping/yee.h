// The Yee update of rows, planes and slabs (problem.py describes the arrays), and its transpose. adjoint.cpp and
// forward.cpp are the time loops; kernels.py puts this file before them.
//
// Axes are 0, 1, 2 with 2 contiguous. Component p of E has the terms + d_(p+1) H_(p+2) and - d_(p+2) H_(p+1) by
// backward differences; of -H alike, with E and forward differences, + d_(p+2) E_(p+1) and - d_(p+1) E_(p+2).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
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
#ifndef REAL
#define REAL float
#endif
#define NAMED(name, real) NAMED_(name, real)
#define NAMED_(name, real) name "_" #real

namespace {

using Tensors = at::TensorList;
using Ints = at::IntArrayRef;
enum Side { E = 0, H = 1 };
constexpr int64_t VECTOR = 16;  // cpml.py
constexpr int64_t PLACES = 1536;  // of one loop in two dimensions: they stay in the first cache

// Subnormal numbers are zero within a block: fields decay into them, and they are slow.
struct FlushSubnormal {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  FlushSubnormal() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormal() { _mm_setcsr(before); }
#endif
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

// Nodes: rows of them are numbered from the first of the box.
struct Box {
  int64_t from[3] = {0, 0, 0}, to[3] = {0, 0, 0};
  int64_t cells() const { return (to[0] - from[0]) * (to[1] - from[1]) * (to[2] - from[2]); }
  bool has(int64_t i, int64_t j) const { return i >= from[0] && i < to[0] && j >= from[1] && j < to[1]; }
  int64_t row(int64_t i, int64_t j) const {
    return ((i - from[0]) * (to[1] - from[1]) + j - from[1]) * (to[2] - from[2]);
  }
};

template <class T>
struct Pole : Box {
  T keep, spring, dt;  // J = keep J + gain E - spring P; P = P + dt J
  const T* gain[3];
  T *j[3], *p[3];
};

template <class T>
struct Model {
  int64_t n[3], stride[3], cells, shots, planes, bytes;  // bytes: of the fields, psi, a and b of a shot
  bool flat;                    // one plane of axis 1: two dimensions
  int64_t wall[2];              // planes of axis 0 whose tangential E is zero
  T *f[2][3], *psi[2][3][2];
  const T *a[2][3], *b[2][3];   // X = a X + b curl; null `a` is 1, `b` of one number is `scalar`
  T scalar[2][3];
  const T *w[2][3], *decay[2][3], *drive[2][3];
  const int64_t* at[2][3];      // place along an axis -> row of its layer, or -1
  int64_t layer[2][3];          // rows of the layers of an axis
  int64_t end[2][2][2];         // of axis 2: side, low or high, from and to
  // Rows follow each other along axis 1, or in two dimensions along axis 0; `most` at once. By place: w of axis 2 over
  // so many rows, 0 where nothing is updated; and w, decay and drive over the rows of layers.
  int64_t most;
  std::vector<T> tile[2][4];
  std::vector<T> ones, alike[2][3];  // over `most` rows: an `a` of 1 and a `scalar`, of components that lack arrays
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
    bytes = 0;
    for (const at::Tensor& x : fields) bytes += x.numel() * sizeof(T) / shots;
    for (const at::Tensor& x : coefficients) bytes += x.numel() * sizeof(T);
    most = flat ? std::max<int64_t>(1, PLACES / n[2]) : n[1];
    ones.assign(most * n[2], T(1));
    for (int s = 0; s < 2; ++s) {
      for (int p = 0; p < 3; ++p) alike[s][p].assign(most * n[2], scalar[s][p]);
      for (int64_t k = 0; k < most * n[2]; ++k)
        tile[s][0].push_back(k % n[2] == n[2] - 1 || (s == E && k % n[2] == 0) ? T(0) : w[s][2][k % n[2]]);
      const int d = flat ? 0 : 1;
      for (int64_t j = 0; layer[s][d] && j < n[d]; ++j) {
        const int64_t m = at[s][d][j];
        if (m < 0) continue;
        tile[s][1].insert(tile[s][1].end(), n[2], w[s][d][j]);
        tile[s][2].insert(tile[s][2].end(), n[2], decay[s][d][m]), tile[s][3].insert(tile[s][3].end(), n[2], drive[s][d][m]);
      }
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

  // The first place of a row where component p of E is not zero; the last is n - 2.
  static int64_t begin(int p) { return p == 2 ? 0 : 1; }

  static constexpr int direction(Side s, int p, int term) { return (p + 1 + ((s == E) ? term : 1 - term)) % 3; }
  static constexpr int source(Side s, int p, int term) { return (p + 2 - ((s == E) ? term : 1 - term)) % 3; }

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

  // `f(side, term, count, gain)` of both ends of rows, if component p has psi of axis 2: `count` is a constant, if it
  // is VECTOR places, or 0; gain: whether b is an array.
  template <Side s, class F>
  void each_end(int p, const F& f) const {
    constexpr std::integral_constant<int64_t, VECTOR> vector;
    constexpr std::integral_constant<int64_t, 0> any;
    constexpr std::true_type yes;
    constexpr std::false_type no;
    const int t = direction(s, p, 0) == 2 ? 0 : 1;
    if (p == 2 || !layer[s][2] || !this->f[1 - s][source(s, p, t)]) return;
    for (int side = 0; side < 2; ++side) {
      const bool fixed = end[s][side][1] - end[s][side][0] == VECTOR;
      if (b[s][p]) fixed ? f(side, t, vector, yes) : f(side, t, any, yes);
      else fixed ? f(side, t, vector, no) : f(side, t, any, no);
    }
  }

  // What psi of axis 2 adds to advanced rows [j0, j1), and to what is stored of their curl.
  template <Side s>
  void ends(int p, int64_t shot, int64_t i, int64_t j0, int64_t j1, T* stored) const {
    each_end<s>(p, [&](int side, int t, auto fixed, auto array) {
      const int64_t k0 = end[s][side][0], row = i * stride[0] + k0, at_layer = shift(s, side) + k0;
      const int64_t count = fixed ? int64_t(fixed) : end[s][side][1] - k0;
      const T* x = f[1 - s][source(s, p, t)] + shot * cells + row - (s == E);
      const T *__restrict v = w[s][2] + k0, *__restrict de = decay[s][2] + at_layer, *__restrict dr = drive[s][2] + at_layer;
      const T sign = t ? T(-1) : T(1), one = scalar[s][p];
      for (int64_t j = j0; j < j1; ++j) {
        const T *__restrict x0 = x + j * n[2], *__restrict x1 = x0 + 1, *__restrict gain = array ? b[s][p] + row + j * n[2] : nullptr;
        T *__restrict y = psi_row(s, p, t, shot, i, j) + at_layer, *__restrict z = f[s][p] + shot * cells + row + j * n[2];
#pragma omp simd
        for (int64_t k = 0; k < count; ++k) {
          y[k] = de[k] * y[k] + dr[k] * (sign * v[k] * (x1[k] - x0[k]));
          z[k] += (array ? gain[k] : one) * y[k];
        }
        for (int64_t k = 0; stored && k < count; ++k) stored[(j - j0) * n[2] + k0 + k] += y[k];
      }
    });
  }

  // A term of the curl over whole rows of a plane: v line (x1 - x0), where `line` counts along axis 2 alone.
  struct Term {
    const T *x1, *x0;
    T v, decay, drive;                    // in a layer of planes
    const T *w_at, *decay_at, *drive_at;  // by place, in a layer of rows
    T* psi;
  };

  struct Rows {
    Term term[2];
    T* z;
    const T *a, *b;
    T scalar;
    T* stored;
  };

  // All of component p that one loop needs, over rows of plane i from row j. stored: where its curl goes.
  template <Side s>
  Rows rows(int p, int64_t shot, int64_t i, int64_t j, T* stored) const {
    const int64_t row = i * stride[0] + j * stride[1];
    Rows out{{}, f[s][p] + shot * cells + row, a[s][p] ? a[s][p] + row : ones.data(),
             b[s][p] ? b[s][p] + row : alike[s][p].data(), scalar[s][p], stored};
    for (int t = 0; t < 2; ++t) {
      const int d = direction(s, p, t);
      const T* x = f[1 - s][source(s, p, t)];
      if (!x) continue;
      x += shot * cells + row;
      Term& term = out.term[t];
      term.x1 = s == E ? x : x + stride[d], term.x0 = s == E ? x - stride[d] : x;
      term.v = (t ? T(-1) : T(1)) * (d == 2 ? T(1) : w[s][d][d ? j : i]);
      if (d == 2 || !in_layer(s, d, i, j)) continue;
      const int64_t m = at[s][d][d ? j : i];
      term.psi = psi_row(s, p, t, shot, i, j);
      if (d == 0 && !flat) term.decay = decay[s][0][m], term.drive = drive[s][0][m];
      else {
        term.v = t ? T(-1) : T(1), term.w_at = tile[s][1].data() + m * n[2];
        term.decay_at = tile[s][2].data() + m * n[2], term.drive_at = tile[s][3].data() + m * n[2];
      }
    }
    return out;
  }

  // `f` of the bits of components that rows have, all or `only` one, and of those of the other field.
  template <Side s, class F>
  void present(int only, const F& f) const {
    constexpr std::integral_constant<int, 1> first;
    constexpr std::integral_constant<int, 2> second;
    constexpr std::integral_constant<int, 5> around;
    constexpr std::integral_constant<int, 7> all;
    if (!flat) only == 0 ? f(first, all) : only == 1 ? f(second, all) : f(all, all);
    else if (this->f[s][1]) f(second, around);
    else only == 0 ? f(first, second) : f(around, second);
  }

  // `f` of whether the plane, and whether all of the rows from (i, j) lie in a layer.
  template <Side s, int OTHER, class F>
  void layers(int64_t i, int64_t j, const F& f) const {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    const bool first = in_layer(s, 0, i, j), second = flat ? first : in_layer(s, 1, i, j);
    if constexpr (OTHER == 7) {
      if (first) return second ? f(yes, yes) : f(yes, no);
    }
    second ? f(no, yes) : f(no, no);
  }

  // X = a X + b curl at place k, of component p if there is one.
  template <Side s, int p, int HAS, int OTHER, bool KEEP, bool GAIN, bool FIRST, bool SECOND, bool STORE>
  static void cell(const Rows& r, const T* __restrict line, int64_t k) {
    if constexpr ((HAS >> p & 1) != 0) {
      constexpr int ROWS = OTHER == 7 ? 1 : 0;
      T cur = 0;
      const auto add = [&](const Term& x, auto t) {
        constexpr int d = direction(s, p, t);
        if constexpr ((OTHER >> source(s, p, t) & 1) != 0) {
          const T v = d == 2 ? x.v * line[k] : d == ROWS && SECOND ? x.v * x.w_at[k] : x.v;
          const T part = v * (x.x1[k] - x.x0[k]);
          cur = t == 1 && (OTHER >> source(s, p, 0) & 1) ? cur + part : part;
          if constexpr ((d == 0 && FIRST) || (d == ROWS && SECOND)) {
            const T y = (d == ROWS ? x.decay_at[k] : x.decay) * x.psi[k] + (d == ROWS ? x.drive_at[k] : x.drive) * part;
            x.psi[k] = y;
            cur += y;
          }
        }
      };
      add(r.term[0], std::integral_constant<int, 0>()), add(r.term[1], std::integral_constant<int, 1>());
      if (STORE) r.stored[k] = cur;
      r.z[k] = (KEEP ? r.a[k] * r.z[k] : r.z[k]) + (GAIN ? r.b[k] : r.scalar) * cur;
    }
  }

  // The same over whole rows [j0, j1) of plane i, or in two dimensions over rows from plane i on, in one loop over their
  // places. Those that are not updated stay zero: `line` is zero there, and so is all that the other term reads.
  template <Side s, int HAS, int OTHER, bool KEEP, bool GAIN, bool FIRST, bool SECOND, bool STORE>
  void fused(int64_t shot, int64_t i, int64_t j0, int64_t j1, T* const* stored) const {
    Rows r[3] = {};
    for (int p = 0; p < 3; ++p)
      if (HAS >> p & 1) r[p] = rows<s>(p, shot, i, j0, STORE ? stored[p] : nullptr);
    const T* line = tile[s][0].data();
    const int64_t count = (j1 - j0) * n[2];
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) {
      cell<s, 0, HAS, OTHER, KEEP, GAIN, FIRST, SECOND, STORE>(r[0], line, k);
      cell<s, 1, HAS, OTHER, KEEP, GAIN, FIRST, SECOND, STORE>(r[1], line, k);
      cell<s, 2, HAS, OTHER, KEEP, GAIN, FIRST, SECOND, STORE>(r[2], line, k);
    }
  }

  // stored: where the curl of E goes, by component, from the first place of the rows; null if it is not kept, which
  // that of `only` one always is.
  template <Side s>
  void update(int64_t shot, int64_t i, int64_t j0, int64_t j1, T* const* stored, int only = -1) const {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    const bool keep = a[s][0] || a[s][1] || a[s][2], gain = keep || b[s][0] || b[s][1] || b[s][2];
    present<s>(only, [&](auto has, auto other) {
      layers<s, other>(i, j0, [&](auto first, auto second) {
        const auto go = [&](auto keep, auto gain, auto store) {
          fused<s, has, other, keep, gain, first, second, store>(shot, i, j0, j1, stored);
        };
        constexpr bool edge = other == 7 ? has != 7 : has + other != 7;  // some of the components
        if constexpr (s == E && edge) go(yes, yes, yes);
        else if constexpr (s == E) {
          if (stored) keep ? go(yes, yes, yes) : gain ? go(no, yes, yes) : go(no, no, yes);
          else keep ? go(yes, yes, no) : gain ? go(no, yes, no) : go(no, no, no);
        } else if constexpr (edge) go(no, yes, no);
        else gain ? go(no, yes, no) : go(no, no, no);
      });
      for (int p = 0; p < 3; ++p)
        if (has >> p & 1) ends<s>(p, shot, i, j0, j1, stored ? stored[p] : nullptr);
    });
  }
};

// What gradients need of each step, in a box: the curl that E was advanced with, and E before.
template <class T>
struct History {
  int64_t shots;
  Box box;
  T *curl[3] = {}, *before[3] = {};  // (steps, shots, box)
  History(int64_t shots, Tensors arrays, Ints given) : shots(shots) {
    std::copy_n(given.begin(), 3, box.from), std::copy_n(given.begin() + 3, 3, box.to);
    for (int p = 0; p < 3 && arrays.size(); ++p) curl[p] = data<T>(arrays[p]), before[p] = data<T>(arrays[3 + p]);
  }
  // Where a row of a step begins, from its first place in the box.
  int64_t row(int64_t step, int64_t shot, int64_t i, int64_t j) const {
    return (step * shots + shot) * box.cells() + box.row(i, j);
  }
};

// Rows [first, last) of a plane, which one loop advances.
struct Run {
  int64_t first, last;
};

// Planes [first, last) that are advanced between two looks at other threads: one, or in two dimensions some alike.
struct Band {
  int64_t first, last;
};

template <class T>
struct Bands {
  const Model<T>& m;
  std::vector<Run> runs[2];  // of E and H: rows of a plane that all components have
  std::vector<Band> all;

  Bands(const Model<T>& m, const Box& box) : m(m) {
    const auto e = cuts(E, 0, box), h = cuts(H, 0, box);
    for (int64_t i = 0; i < std::max<int64_t>(m.n[0] - 1, 1); ++i)
      if (m.flat && i > 1 && !e[i] && !h[i] && i - all.back().first < m.most) ++all.back().last;
      else all.push_back({i, i + 1});
    for (Side s : {E, H}) {
      const auto begins = cuts(s, 1, box);
      for (int64_t j = s == E; !m.flat && j < m.n[1] - 1; ++j)
        if (runs[s].empty() || begins[j]) runs[s].push_back({j, j + 1});
        else ++runs[s].back().last;
    }
  }

  int64_t count() const { return all.size(); }

  // Where layers, poles and the history begin and end along an axis.
  std::vector<bool> cuts(Side s, int axis, const Box& box) const {
    std::vector<bool> out(m.n[axis] + 1);
    for (int64_t j = 1; m.layer[s][axis] && j < m.n[axis]; ++j)
      out[j] = (m.at[s][axis][j] < 0) != (m.at[s][axis][j - 1] < 0);
    if (s == H) return out;
    out[box.from[axis]] = out[box.to[axis]] = true;
    for (const Pole<T>& pole : m.poles) out[pole.from[axis]] = out[pole.to[axis]] = true;
    return out;
  }

  // `f` of the runs of a band: rows of its plane, or in two dimensions rows from its first plane on.
  template <class F>
  void each(Side s, const Band& band, const F& f) const {
    if (m.flat) f(Run{0, band.last - band.first});
    for (const Run& x : runs[s]) f(x);
  }
};

constexpr int64_t CACHE = 5 << 20;  // bytes of a thread

// How many bands of all steps a thread has done.
struct alignas(64) Progress {
  std::atomic<int64_t> bands{0};
  void set(int64_t x) { bands.store(x, std::memory_order_release); }
  // Spins briefly and then yields: cores may be shared with other programs.
  void wait(int64_t x) const {
    for (int64_t i = 0; bands.load(std::memory_order_acquire) < x; ++i)
      if (i > 4000) std::this_thread::yield();
  }
};

// Threads, which have shots of their own where there are enough, or else groups of steps.
struct Team {
  int64_t threads;
  bool by_shot;
  Team(int64_t shots, int64_t bands, int64_t cells) {
    const int64_t most = at::in_parallel_region() ? 1 : at::get_num_threads();
    by_shot = shots >= most || bands < 4 * most;
    threads = by_shot ? std::min(most, shots) : most;
    if (cells * shots < 1 << 13) threads = 1, by_shot = true;
  }

  // `work(number)` in each. Threads of our own: those of a second OpenMP would compete with PyTorch's, which spin.
  template <class F>
  void run(const F& work) const {
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back([&work, i] { work(i); });
    work(0);
    for (std::thread& each : others) each.join();
  }
};

// Calls of `make(thread)` a function of (shot, step, band) for all of them, where steps and bands count from the first
// to be done. A band comes after its neighbours on both sides in the step before. Steps follow each other at a band's
// distance, so that bands stay in the cache, and threads take turns at groups of steps; or they have shots.
template <class T, class F>
void march(const Model<T>& m, int64_t bands, int64_t steps, const F& make) {
  const Team team(m.shots, bands, m.cells);
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(8, CACHE * bands / m.bytes - 2));
  const int64_t turns = std::max<int64_t>(1, (steps + most * team.threads - 1) / (most * team.threads));  // of each thread
  const int64_t depth = (steps + turns * team.threads - 1) / (turns * team.threads);
  std::vector<Progress> done(team.threads);
  team.run([&](int64_t me) {
    const FlushSubnormal flush;
    auto work = make(me);
    const auto group = [&](int64_t shot, int64_t end, int64_t first, const auto& before, const auto& after) {
      const int64_t last = std::min(first + depth, steps);
      for (int64_t front = 0; front < bands + last - first - 1; ++front) {
        before(front);
        for (int64_t step = first; step < last; ++step) {
          const int64_t band = front - (step - first);
          if (band < 0 || band >= bands) continue;
          for (int64_t x = shot; x < end; ++x) work(x, step, band);
          if (step == last - 1) after(step * bands + band + 1);
        }
      }
    };
    if (team.by_shot) {
      for (int64_t shot = me; shot < m.shots; shot += team.threads)
        for (int64_t first = 0; first < steps; first += depth)
          group(shot, shot + 1, first, [](int64_t) {}, [](int64_t) {});
      return;
    }
    const Progress& other = done[(me + team.threads - 1) % team.threads];
    for (int64_t first = me * depth; first < steps; first += team.threads * depth)
      group(0, m.shots, first,
            [&](int64_t front) { if (first) other.wait((first - 1) * bands + std::min(front + 2, bands)); },
            [&](int64_t count) { done[me].set(count); });
  });
}

}  // namespace
