// The transposed time loop, last step first. `m` holds the adjoint fields: dL/dE, dL/dH, dL/dpsi. In a sweep from the
// last band to the first, a band of E gives its part to H (the transposed curl), then H to E. What crosses a band is
// added to the neighbour.

namespace {

// P = dL/d(x1 - x0) of both terms of three components, over the rows of a band, with a row of zeros on both sides.
template <class T>
struct Parts {
  int64_t row, size;
  std::vector<T> numbers;
  Parts(int64_t rows, int64_t row) : row(row), size((rows + 2) * row), numbers(6 * size, T(0)) {}
  T* of(int p, int t) { return numbers.data() + (2 * p + t) * size + row; }
};

template <class T>
struct Gradients {
  T *b[3] = {}, *a[3] = {};  // (shots, box)
  std::vector<T*> gain;      // 3 per pole, (shots, box of the pole), or null
};

template <class T>
struct Adjoint {
  using Term = typename Model<T>::Term;
  using Rows = typename Model<T>::Rows;
  const Model<T>& m;
  const Entries<T>&soft, &hard, &magnetic;
  int64_t number;
  const History<T>& history;
  const Bands<T>& bands;
  const Gradients<T>& g;

  // P of place k of component p, from dL/dcur = b x. Advances psi.
  template <Side s, int p, int HAS, int OTHER, bool GAIN, bool FIRST, bool SECOND>
  static void cell(const Rows& r, const T* __restrict line, int64_t k, T* const* out) {
    if constexpr ((HAS >> p & 1) != 0) {
      constexpr int ROWS = OTHER == 7 ? 1 : 0;
      const T x = (GAIN ? r.b[k] : r.scalar) * r.z[k];
      const auto add = [&](const Term& term, auto t) {
        constexpr int d = Model<T>::direction(s, p, t);
        if constexpr ((OTHER >> Model<T>::source(s, p, t) & 1) != 0) {
          const T v = d == 2 ? term.v * line[k] : d == ROWS && SECOND ? term.v * term.w_at[k] : term.v;
          if constexpr ((d == 0 && FIRST) || (d == ROWS && SECOND)) {
            const T both = x + term.psi[k];
            out[2 * p + t][k] = v * (x + (d == ROWS ? term.drive_at[k] : term.drive) * both);
            term.psi[k] = (d == ROWS ? term.decay_at[k] : term.decay) * both;
          } else {
            out[2 * p + t][k] = v * x;
          }
        }
      };
      add(r.term[0], std::integral_constant<int, 0>()), add(r.term[1], std::integral_constant<int, 1>());
    }
  }

  // P over rows [j0, j1) of the components HAS, where the other field has OTHER. See Model::fused.
  template <Side s, int HAS, int OTHER, bool GAIN, bool FIRST, bool SECOND>
  void fused(int64_t shot, int64_t i, int64_t j0, int64_t j1, Parts<T>& parts) const {
    Rows r[3] = {};
    T* out[6];
    for (int p = 0; p < 3; ++p) {
      if (HAS >> p & 1) r[p] = m.template rows<s>(p, shot, i, j0, nullptr);
      for (int t = 0; t < 2; ++t) out[2 * p + t] = parts.of(p, t) + j0 * m.n[2];
    }
    const T* line = m.tile[s][0].data();
    const int64_t count = (j1 - j0) * m.n[2];
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) {
      cell<s, 0, HAS, OTHER, GAIN, FIRST, SECOND>(r[0], line, k, out);
      cell<s, 1, HAS, OTHER, GAIN, FIRST, SECOND>(r[1], line, k, out);
      cell<s, 2, HAS, OTHER, GAIN, FIRST, SECOND>(r[2], line, k, out);
    }
  }

  // P over rows of all components, or of `only` one.
  template <Side s>
  void give(int64_t shot, int64_t i, int64_t j0, int64_t j1, Parts<T>& parts, int only = -1) const {
    m.template present<s>(only, [&](auto has, auto other) {
      m.template layers<s, other>(i, j0, [&](auto first, auto second) {
        if (m.b[s][0] || m.b[s][1] || m.b[s][2]) fused<s, has, other, true, first, second>(shot, i, j0, j1, parts);
        else fused<s, has, other, false, first, second>(shot, i, j0, j1, parts);
      });
      for (int p = 0; p < 3; ++p)
        if (has >> p & 1) ends<s>(p, shot, i, j0, j1, parts);
    });
  }

  // What psi of axis 2 adds to P over rows [j0, j1). Advances it.
  template <Side s>
  void ends(int p, int64_t shot, int64_t i, int64_t j0, int64_t j1, Parts<T>& parts) const {
    m.template each_end<s>(p, [&](int side, int t, auto fixed, auto array) {
      const int64_t k0 = m.end[s][side][0], row = i * m.stride[0] + k0, by = m.shift(s, side) + k0;
      const int64_t count = fixed ? int64_t(fixed) : m.end[s][side][1] - k0;
      const T *__restrict v = m.w[s][2] + k0, *__restrict de = m.decay[s][2] + by, *__restrict dr = m.drive[s][2] + by;
      const T sign = t ? T(-1) : T(1), one = m.scalar[s][p];
      for (int64_t j = j0; j < j1; ++j) {
        const T *__restrict x = m.f[s][p] + shot * m.cells + row + j * m.n[2];
        const T *__restrict b = array ? m.b[s][p] + row + j * m.n[2] : nullptr;
        T *__restrict y = m.psi_row(s, p, t, shot, i, j) + by, *__restrict out = parts.of(p, t) + j * m.n[2] + k0;
#pragma omp simd
        for (int64_t k = 0; k < count; ++k) {
          const T both = (array ? b[k] : one) * x[k] + y[k];
          out[k] += sign * v[k] * dr[k] * both;
          y[k] = de[k] * both;
        }
      }
    });
  }

  // Gradients of a row of component p of E, its poles, and what `a` leaves of it. s: room for a row.
  void keep(int64_t step, int64_t shot, int64_t i, int64_t j, int p, T* s) const {
    const int64_t row = i * m.stride[0] + j * m.stride[1];
    const Box& box = history.box;
    const int64_t k0 = m.begin(p), k1 = m.n[2] - 1;
    T* __restrict x = m.f[E][p] + shot * m.cells + row;
    const bool here = history.curl[p] && box.has(i, j);
    const int64_t by = here ? history.row(step, shot, i, j) - box.from[2] : 0;
    const T* __restrict before = here && history.before[p] ? history.before[p] + by : nullptr;
    if (here) {
      const int64_t at = shot * box.cells() + box.row(i, j) - box.from[2];
      const T* __restrict curl = history.curl[p] + by;
      T* __restrict gb = g.b[p] + at;
      T* __restrict ga = g.a[p] ? g.a[p] + at : nullptr;
      const int64_t from = std::max(k0, box.from[2]), to = std::min(k1, box.to[2]);
#pragma omp simd
      for (int64_t k = from; k < to; ++k) gb[k] += x[k] * curl[k];
      if (ga)
#pragma omp simd
        for (int64_t k = from; k < to; ++k) ga[k] += x[k] * before[k];
    }
    for (int64_t k = k0; m.poles.size() && k < k1; ++k) s[k] = (m.b[E][p] ? m.b[E][p][row + k] : m.scalar[E][p]) * x[k];
    if (m.a[E][p]) {
      const T* __restrict a = m.a[E][p] + row;
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) x[k] *= a[k];
    }
    for (size_t n = 0; n < m.poles.size(); ++n) {
      const Pole<T>& pole = m.poles[n];
      if (!pole.gain[p] || !pole.has(i, j)) continue;
      const int64_t from = pole.row(i, j) - pole.from[2], to = shot * pole.cells() + from;
      T* __restrict y = pole.j[p] + to;
      T* __restrict q = pole.p[p] + to;
      const T* __restrict gain = pole.gain[p] + from;
      T* __restrict gg = g.gain[3 * n + p] ? g.gain[3 * n + p] + to : nullptr;
      for (int64_t k = std::max(k0, pole.from[2]); k < std::min(k1, pole.to[2]); ++k) {
        const T total = y[k] - s[k] + pole.dt * q[k];
        y[k] = pole.keep * total;
        q[k] -= pole.spring * total;
        x[k] += gain[k] * total;
        if (gg) gg[k] += total * before[k];
      }
    }
  }

  // Rows of E, all components or one: P, then what is left of E.
  void e_rows(int64_t step, int64_t shot, int64_t i, const Run& rows, Parts<T>& parts, T* s, int only = -1) const {
    const int64_t j0 = rows.first, j1 = rows.last;
    for (int p = 0; p < 2; ++p)  // what H gave to tangential E on the walls of axis 2, which is zero
      for (int64_t j = j0; m.f[E][p] && j < j1; ++j) {
        T* x = m.f[E][p] + shot * m.cells + i * m.stride[0] + j * m.n[2];
        x[0] = x[m.n[2] - 1] = T(0);
      }
    give<E>(shot, i, j0, j1, parts, only);
    const auto has = [&](const auto& x) { return x.has(m.flat ? i + j0 : i, m.flat ? 0 : j0); };
    const bool kept = m.a[E][0] || m.a[E][1] || m.a[E][2] || has(history.box) || std::any_of(m.poles.begin(), m.poles.end(), has);
    for (int64_t j = j0; kept && j < j1; ++j)
      for (int p = 0; p < 3; ++p)
        if (m.f[E][p] && (only < 0 || only == p)) keep(step, shot, m.flat ? i + j : i, m.flat ? 0 : j, p, s);
  }

  template <bool MINUS>
  static void add(T* __restrict x, const T* __restrict y, int64_t count) {
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) x[k] += MINUS ? -y[k] : y[k];
  }

  // What the P of a band of `s` gives to the other field. Along axis 0 one half of it goes to the plane before (of H)
  // or after (of E): there before, here after all else, so that sums do not depend on the bands.
  template <Side s>
  void take(int64_t shot, const Band& band, Parts<T>& parts) const {
    const int64_t place = shot * m.cells + band.first * m.stride[0], count = (band.last - band.first) * m.stride[0];
    for (bool across : {s == E, s == H})
      for (int p = 0; p < 3; ++p)
        for (int t = 0; t < 2; ++t) {
          T* x = m.f[1 - s][m.source(s, p, t)];
          if (!m.f[s][p] || !x) continue;
          x += place;
          const int d = m.direction(s, p, t);
          T* y = parts.of(p, t);
          if (across && d == 0) {
            const int64_t skip = s == E && band.first == 0 ? m.stride[0] : 0, last = s == H && band.last == m.n[0] - 1 ? m.stride[0] : 0;
            if (s == E) add<true>(x - m.stride[0] + skip, y + skip, count - skip);
            else add<false>(x + m.stride[0], y, count - last);
          } else if (!across && d == 0) {
            add<s == H>(x, y, count);
          } else if (!across) {
            const T* __restrict one = s == E ? y : y - m.stride[d];
            const T* __restrict two = s == E ? y + m.stride[d] : y;
#pragma omp simd
            for (int64_t k = 0; k < count; ++k) x[k] += one[k] - two[k];
          }
        }
  }

  // E to H, H to E.
  void band(int64_t step, int64_t shot, const Band& band, Parts<T>& e, Parts<T>& h, T* s, T* waves) const {
    const int64_t i = band.first, from = shot * m.planes + i, to = shot * m.planes + band.last, place = shot * m.cells;
    for (int64_t x = hard.first[to] - 1; x >= hard.first[from]; --x) {  // prescribed E depends on nothing else
      T& value = m.f[E][hard.component[x]][place + hard.place[x]];
      if (waves) waves[step * number + hard.wave[x]] += hard.amount[x] * value;
      value = 0;
    }
    for (int64_t x = soft.first[from]; waves && x < soft.first[to]; ++x) {
      const int64_t p = soft.component[x], at = soft.place[x];
      const T b = m.b[E][p] ? m.b[E][p][at] : m.scalar[E][p];
      waves[step * number + soft.wave[x]] += soft.amount[x] * b * m.f[E][p][place + at];
    }
    const bool wall = i == m.wall[0] || i == m.wall[1];  // tangential E is zero
    for (int p = 1; p < 3 && wall; ++p)
      for (int t = 0; t < 2; ++t) std::fill_n(e.of(p, t), m.stride[0], T(0));
    if (!wall && !m.flat) e_rows(step, shot, i, {0, 1}, e, s, 1);
    if (!wall || m.f[E][0]) bands.each(E, band, [&](const Run& x) { e_rows(step, shot, i, x, e, s, wall ? 0 : -1); });
    take<E>(shot, band, e);
    for (int64_t x = magnetic.first[from]; waves && x < magnetic.first[to]; ++x)
      waves[step * number + magnetic.wave[x]] += magnetic.amount[x] * m.f[H][magnetic.component[x] - 3][place + magnetic.place[x]];
    bands.each(H, band, [&](const Run& x) { give<H>(shot, i, x.first, x.last, h); });
    if (!m.flat) give<H>(shot, i, m.n[1] - 1, m.n[1], h, 1);
    take<H>(shot, band, h);
  }
};

// Adds gradients of samples to the adjoint fields.
template <class T>
struct Injector : Readings<T> {
  using Readings<T>::Readings;

  // To E of a band, and to H of the planes before: all of them still wait for what E gives.
  void add(const Model<T>& m, int64_t step, int64_t start, int64_t shot, const Band& band) const {
    for (size_t g = 0; g < this->groups.size(); ++g) {
      const int64_t slot = this->slot(g, step, start), frequencies = this->frequencies[g];
      if (!this->numbers[g] || slot < 0) continue;
      const Group& x = this->groups[g];
      if (!x.count) continue;
      const int64_t back = x.component[0] < 3 ? 0 : 1, last = m.n[0] - 1;
      const int64_t from = std::max<int64_t>(band.first - back, 0), to = band.last < last ? band.last - back : band.last;
      for (int64_t y = x.first[from]; y < x.first[to]; ++y) {
        T sum = 0;
        if (!this->phase[g]) sum = this->numbers[g][(slot * m.shots + shot) * x.count + y];
        for (int64_t v = 0; v < frequencies; ++v) {
          const T* from = this->numbers[g] + ((shot * frequencies + v) * x.count + y) * 2;
          const T* phase = this->phase[g] + (step * frequencies + v) * 2;
          sum += phase[0] * from[0] + phase[1] * from[1];
        }
        const Side s = x.component[y] < 3 ? E : H;
        const int p = x.component[y] % 3;
        if ((s == E) == (p != 2) || x.place[y] % m.n[2] < m.n[2] - 1)  // beyond the last node nothing is advanced
          m.f[s][p][shot * m.cells + x.place[y]] += sum;
      }
    }
  }
};

// Transposes `forward_loop`: adjoint fields are changed in place, gradients are added. See kernels.py.
template <class T>
void adjoint_loop(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints,
                  at::ArrayRef<double> reals, Tensors sources, Tensors read, Tensors given, Tensors phases, Ints every,
                  int64_t start, int64_t steps, Tensors history, Ints box, Tensors gradients, const at::Tensor& waves) {
  const Model<T> m(fields, coefficients, lines, pole, ints, reals);
  const Entries<T> soft(sources.slice(0, 5)), hard(sources.slice(5, 5)), magnetic(sources.slice(10, 5));
  const Injector<T> injector(read, given, phases, every);
  const History<T> past(m.shots, history, box);
  const Bands<T> bands(m, past.box);
  Gradients<T> g;
  for (int p = 0; p < 3 && history.size(); ++p) g.b[p] = data<T>(gradients[p]), g.a[p] = data<T>(gradients[3 + p]);
  for (size_t i = 0; i < 3 * m.poles.size(); ++i) g.gain.push_back(history.size() ? data<T>(gradients[6 + i]) : nullptr);
  const int64_t number = waves.dim() == 3 ? waves.size(2) : 0;  // (threads, steps, number)
  const Adjoint<T> f{m, soft, hard, magnetic, number, past, bands, g};
  march(m, bands.count(), steps, [&](int64_t me) {
    T* of_waves = number ? data<T>(waves) + me * steps * number : nullptr;
    return [&, of_waves, e = Parts<T>(m.most, m.n[2]), h = Parts<T>(m.most, m.n[2]), row = std::vector<T>(m.n[2])](
               int64_t shot, int64_t step, int64_t at) mutable {
      const Band& band = bands.all[bands.count() - 1 - at];
      injector.add(m, steps - 1 - step, start, shot, band);
      f.band(steps - 1 - step, shot, band, e, h, row.data(), of_waves);
    };
  });
}

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(
      NAMED("fdtd_forward", REAL) "(Tensor[] fields, Tensor[] coefficients, Tensor[] lines, Tensor[] pole, int[] ints, float[] reals, "
      "Tensor[] sources, Tensor waves, Tensor[] read, Tensor[] results, Tensor[] phases, int[] every, int start, "
      "int steps, Tensor[] history, int[] box) -> ()", forward_loop<REAL>);
  library.def(
      NAMED("fdtd_adjoint", REAL) "(Tensor[] fields, Tensor[] coefficients, Tensor[] lines, Tensor[] pole, int[] ints, float[] reals, "
      "Tensor[] sources, Tensor[] read, Tensor[] given, Tensor[] phases, int[] every, int start, int steps, "
      "Tensor[] history, int[] box, Tensor[] gradients, Tensor waves) -> ()", adjoint_loop<REAL>);
}

}  // namespace
