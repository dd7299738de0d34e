// The transposed time loop, last step first. `m` holds the adjoint fields: dL/dE, dL/dH, dL/dpsi. In a sweep from the
// last plane to the first, a plane of E gives its part to H (the transposed curl), then H to E. What crosses a plane
// is added to the neighbour. Sums are in the same order with any number of threads.

namespace {

// P = dL/d(x1 - x0) of both terms of three components, for one plane.
template <class T>
struct Plane {
  int64_t cells;
  std::vector<T> numbers;
  explicit Plane(int64_t n) : cells(n), numbers(6 * n, T(0)) {}
  T* of(int p, int t) { return numbers.data() + (2 * p + t) * cells; }
};

template <class T>
struct Gradients {
  T *b[3] = {}, *a[3] = {};         // (shots, box)
  std::vector<T*> gain;             // 3 per pole, (shots, box of the pole), or null
  T* waves = nullptr;               // (threads, steps, number), or null
  int64_t wave_stride = 0;
};

template <class T>
struct Adjoint {
  const Model<T>& m;
  const Entries<T>&soft, &hard, &magnetic;
  int64_t number;
  const History<T>& history;
  const Gradients<T>& g;

  // P of a term over a row, from s = dL/dcur. Advances psi unless it only looks.
  template <Side s>
  void term(int p, int t, int64_t shot, int64_t i, int64_t j, int64_t k0, int64_t k1, const T* __restrict x,
            T* __restrict out, bool look = false) const {
    const int d = m.direction(s, p, t);
    const T sign = t ? T(-1) : T(1);
    if (d < 2) {
      const int64_t place = d == 0 ? i : j;
      const T v = sign * m.w[s][d][place];
      if (!m.in_layer(s, d, i, j)) {
#pragma omp simd
        for (int64_t k = k0; k < k1; ++k) out[k] = v * x[k];
        return;
      }
      const int64_t row = m.at[s][d][place];
      const T de = m.decay[s][d][row], dr = m.drive[s][d][row];
      T* __restrict y = m.psi_row(s, p, t, shot, i, j);
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) {
        const T both = x[k] + y[k];
        out[k] = v * (x[k] + dr * both);
        if (!look) y[k] = de * both;
      }
      return;
    }
    const T* __restrict v = m.w[s][2];
#pragma omp simd
    for (int64_t k = k0; k < k1; ++k) out[k] = sign * v[k] * x[k];
    for (int side = 0; m.layer[s][2] && side < 2; ++side) {
      const int64_t by = m.shift(s, side);
      const T* __restrict de = m.decay[s][2] + by;
      const T* __restrict dr = m.drive[s][2] + by;
      T* __restrict y = m.psi_row(s, p, t, shot, i, j) + by;
#pragma omp simd
      for (int64_t k = m.end[s][side][0]; k < m.end[s][side][1]; ++k) {
        const T both = x[k] + y[k];
        out[k] = sign * v[k] * (x[k] + dr[k] * both);
        y[k] = de[k] * both;
      }
    }
  }

  void scale(Side s, int p, int64_t row, int64_t k0, int64_t k1, const T* __restrict x, T* __restrict out) const {
    const T* __restrict b = m.b[s][p] ? m.b[s][p] + row : nullptr;
    const T one = m.scalar[s][p];
    if (b) {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) out[k] = b[k] * x[k];
    } else {
#pragma omp simd
      for (int64_t k = k0; k < k1; ++k) out[k] = one * x[k];
    }
  }

  void keep(Side s, int p, int64_t row, int64_t k0, int64_t k1, T* __restrict x) const {
    if (!m.a[s][p]) return;
    const T* __restrict a = m.a[s][p] + row;
#pragma omp simd
    for (int64_t k = k0; k < k1; ++k) x[k] *= a[k];
  }

  // dL/dE of a plane before the step but for what comes from H, gradients, and P.
  void e_plane(int64_t step, int64_t shot, int64_t i, Plane<T>& out, T* s, T* waves) const {
    for (int64_t x = soft.first[shot * m.planes + i]; waves && x < soft.first[shot * m.planes + i + 1]; ++x) {
      const int64_t p = soft.component[x], place = soft.place[x];
      const T b = m.b[E][p] ? m.b[E][p][place] : m.scalar[E][p];
      waves[step * number + soft.wave[x]] += soft.amount[x] * b * m.f[E][p][shot * m.cells + place];
    }
    for (int p = 0; p < 3; ++p) {
      if (!m.f[E][p]) continue;
      if (!m.updates(E, p, i)) {
        for (int t = 0; t < 2; ++t) std::fill_n(out.of(p, t), out.cells, T(0));
        continue;
      }
      int64_t j0, j1, k0, k1;
      m.range(E, p, 1, j0, j1), m.range(E, p, 2, k0, k1);
      for (int64_t j = j0; j < j1; ++j) {
        const int64_t row = i * m.stride[0] + j * m.stride[1];
        T* __restrict x = m.f[E][p] + shot * m.cells + row;
        scale(E, p, row, k0, k1, x, s);
        if (history.curl[p] && history.box.has(i, j)) {
          const Box& box = history.box;
          const int64_t at = box.row(i, j) - box.from[2], by = (step * m.shots + shot) * box.cells() + at;
          const T* __restrict curl = history.curl[p] + by;
          const T* __restrict before = history.before[p] ? history.before[p] + by : nullptr;
          T* __restrict gb = g.b[p] + shot * box.cells() + at;
          T* __restrict ga = g.a[p] ? g.a[p] + shot * box.cells() + at : nullptr;
          const int64_t from = std::max(k0, box.from[2]), to = std::min(k1, box.to[2]);
#pragma omp simd
          for (int64_t k = from; k < to; ++k) gb[k] += x[k] * curl[k];
          if (ga)
#pragma omp simd
            for (int64_t k = from; k < to; ++k) ga[k] += x[k] * before[k];
        }
        keep(E, p, row, k0, k1, x);
        for (size_t n = 0; n < m.poles.size(); ++n) {
          const Pole<T>& pole = m.poles[n];
          if (!pole.gain[p] || !pole.has(i, j)) continue;
          const int64_t at = pole.row(i, j) - pole.from[2], by = shot * pole.cells() + at;
          T* __restrict y = pole.j[p] + by;
          T* __restrict q = pole.p[p] + by;
          const T* __restrict gain = pole.gain[p] + at;
          const Box& box = history.box;
          T* __restrict gg = g.gain[3 * n + p] ? g.gain[3 * n + p] + by : nullptr;
          const T* before = gg ? history.before[p] + (step * m.shots + shot) * box.cells() + box.row(i, j) - box.from[2] : nullptr;
          for (int64_t k = std::max(k0, pole.from[2]); k < std::min(k1, pole.to[2]); ++k) {
            const T total = y[k] - s[k] + pole.dt * q[k];
            y[k] = pole.keep * total;
            q[k] -= pole.spring * total;
            x[k] += gain[k] * total;
            if (gg) gg[k] += total * before[k];
          }
        }
        for (int t = 0; t < 2; ++t)
          if (m.f[H][m.source(E, p, t)]) term<E>(p, t, shot, i, j, k0, k1, s, out.of(p, t) + j * m.stride[1]);
      }
    }
  }

  // H of plane i gets what E of the plane after it gives.
  void to_h_before(int64_t shot, int64_t i, Plane<T>& from) const {
    for (int p = 1; p < 3; ++p)
      for (int t = 0; t < 2; ++t) {
        if (m.direction(E, p, t) != 0 || !m.f[E][p]) continue;
        T* __restrict x = m.f[H][m.source(E, p, t)] + shot * m.cells + i * m.stride[0];
        const T* __restrict y = from.of(p, t);
#pragma omp simd
        for (int64_t k = 0; k < m.stride[0]; ++k) x[k] -= y[k];
      }
  }

  void to_h(int64_t shot, int64_t i, Plane<T>& from) const {
    for (int p = 0; p < 3; ++p)
      for (int t = 0; t < 2; ++t) {
        if (!m.f[E][p] || !m.f[H][m.source(E, p, t)]) continue;
        const int d = m.direction(E, p, t);
        T* __restrict x = m.f[H][m.source(E, p, t)] + shot * m.cells + i * m.stride[0];
        const T* __restrict y = from.of(p, t);
        if (d == 0) {
#pragma omp simd
          for (int64_t k = 0; k < m.stride[0]; ++k) x[k] += y[k];
        } else {
          const T* __restrict z = y + m.stride[d];
          const int64_t most = m.stride[0] - m.stride[d];  // beyond, P is zero
#pragma omp simd
          for (int64_t k = 0; k < most; ++k) x[k] += y[k] - z[k];
        }
      }
  }

  void h_plane(int64_t step, int64_t shot, int64_t i, Plane<T>& out, T* s, T* waves) const {
    for (int64_t x = magnetic.first[shot * m.planes + i]; waves && x < magnetic.first[shot * m.planes + i + 1]; ++x)
      waves[step * number + magnetic.wave[x]] +=
          magnetic.amount[x] * m.f[H][magnetic.component[x] - 3][shot * m.cells + magnetic.place[x]];
    for (int p = 0; p < 3; ++p) {
      if (!m.f[H][p]) continue;
      int64_t j0, j1, k0, k1;
      m.range(H, p, 1, j0, j1), m.range(H, p, 2, k0, k1);
      for (int64_t j = j0; j < j1; ++j) {
        const int64_t row = i * m.stride[0] + j * m.stride[1];
        T* x = m.f[H][p] + shot * m.cells + row;
        scale(H, p, row, k0, k1, x, s);
        keep(H, p, row, k0, k1, x);
        for (int t = 0; t < 2; ++t)
          if (m.f[E][m.source(H, p, t)]) term<H>(p, t, shot, i, j, k0, k1, s, out.of(p, t) + j * m.stride[1]);
      }
    }
  }

  void to_e(int64_t shot, int64_t i, Plane<T>& from) const {
    for (int p = 0; p < 3; ++p)
      for (int t = 0; t < 2; ++t) {
        if (!m.f[H][p] || !m.f[E][m.source(H, p, t)]) continue;
        const int d = m.direction(H, p, t);
        T* __restrict x = m.f[E][m.source(H, p, t)] + shot * m.cells + i * m.stride[0];
        const T* __restrict y = from.of(p, t);
        if (d == 0) {
#pragma omp simd
          for (int64_t k = 0; k < m.stride[0]; ++k) x[k] -= y[k];
        } else {
          const int64_t by = m.stride[d];
          const T* __restrict z = y - by;
#pragma omp simd
          for (int64_t k = by; k < m.stride[0]; ++k) x[k] += z[k] - y[k];
        }
      }
  }

  // E of plane i gets what H of the plane before it gives: two arrays, of components 1 and 2 of H.
  void to_e_after(int64_t shot, int64_t i, const T* one, const T* two) const {
    for (int p = 1; p < 3; ++p)
      for (int t = 0; t < 2; ++t) {
        if (m.direction(H, p, t) != 0 || !m.f[H][p] || !m.f[E][m.source(H, p, t)]) continue;
        T* __restrict x = m.f[E][m.source(H, p, t)] + shot * m.cells + i * m.stride[0];
        const T* __restrict y = p == 1 ? one : two;
#pragma omp simd
        for (int64_t k = 0; k < m.stride[0]; ++k) x[k] += y[k];
      }
  }

  // P of tangential E of plane i along axis 0, without changing anything.
  void look(int64_t shot, int64_t i, Plane<T>& out, T* s) const {
    for (int p = 1; p < 3; ++p) {
      if (!m.f[E][p]) continue;
      const int t = m.direction(E, p, 0) == 0 ? 0 : 1;
      if (!m.updates(E, p, i)) {
        std::fill_n(out.of(p, t), out.cells, T(0));
        continue;
      }
      int64_t j0, j1, k0, k1;
      m.range(E, p, 1, j0, j1), m.range(E, p, 2, k0, k1);
      for (int64_t j = j0; j < j1; ++j) {
        const int64_t row = i * m.stride[0] + j * m.stride[1];
        scale(E, p, row, k0, k1, m.f[E][p] + shot * m.cells + row, s);
        term<E>(p, t, shot, i, j, k0, k1, s, out.of(p, t) + j * m.stride[1], true);
      }
    }
  }

  // Gradients of prescribed E, which does not depend on anything else.
  void prescribed(int64_t step, int64_t shot, int64_t i0, int64_t i1, T* waves) const {
    for (int64_t x = hard.first[shot * m.planes + i0]; x < hard.first[shot * m.planes + i1]; ++x) {
      T& value = m.f[E][hard.component[x]][shot * m.cells + hard.place[x]];
      if (waves) waves[step * number + hard.wave[x]] += hard.amount[x] * value;
      value = 0;
    }
  }

  // One plane: E to H, H to E.
  void plane(int64_t step, int64_t shot, int64_t i, Plane<T>& e, Plane<T>& h, T* s, T* waves) const {
    e_plane(step, shot, i, e, s, waves);
    to_h(shot, i, e);
    h_plane(step, shot, i, h, s, waves);
    to_e(shot, i, h);
  }
};

// Adds gradients of samples to the adjoint fields.
template <class T>
struct Injector : Readings<T> {
  using Readings<T>::Readings;

  void add(const Model<T>& m, int64_t step, int64_t start, int64_t shot, int64_t i0, int64_t i1) const {
    for (size_t g = 0; g < this->groups.size(); ++g) {
      const int64_t slot = this->slot(g, step, start), frequencies = this->frequencies[g];
      if (!this->numbers[g] || slot < 0) continue;
      const Group& x = this->groups[g];
      for (int64_t y = x.first[i0]; y < x.first[i1]; ++y) {
        T sum = 0;
        if (!this->phase[g]) sum = this->numbers[g][(slot * m.shots + shot) * x.count + y];
        for (int64_t v = 0; v < frequencies; ++v) {
          const T* from = this->numbers[g] + ((shot * frequencies + v) * x.count + y) * 2;
          const T* phase = this->phase[g] + (step * frequencies + v) * 2;
          sum += phase[0] * from[0] + phase[1] * from[1];
        }
        m.f[x.component[y] / 3][x.component[y] % 3][shot * m.cells + x.place[y]] += sum;
      }
    }
  }
};

template <class T>
void adjoint_loop(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints,
                  at::ArrayRef<double> reals, Tensors sources, Tensors read, Tensors given, Tensors phases, Ints every,
                  int64_t start, int64_t steps, Tensors history, Ints box, Tensors gradients, const at::Tensor& waves) {
  const Model<T> m(fields, coefficients, lines, pole, ints, reals);
  const Entries<T> soft(sources.slice(0, 5)), hard(sources.slice(5, 5)), magnetic(sources.slice(10, 5));
  const Injector<T> injector(read, given, phases, every);
  History<T> past;
  std::copy_n(box.begin(), 3, past.box.from), std::copy_n(box.begin() + 3, 3, past.box.to);
  Gradients<T> g;
  for (int p = 0; p < 3 && history.size(); ++p) {
    past.curl[p] = data<T>(history[p]), past.before[p] = data<T>(history[3 + p]);
    g.b[p] = data<T>(gradients[p]), g.a[p] = data<T>(gradients[3 + p]);
  }
  for (size_t i = 0; i < 3 * m.poles.size(); ++i) g.gain.push_back(history.size() ? data<T>(gradients[6 + i]) : nullptr);
  const int64_t number = waves.dim() == 3 ? waves.size(2) : 0;  // (threads, steps, number)
  const Adjoint<T> f{m, soft, hard, magnetic, number, past, g};
  const int64_t planes = std::max<int64_t>(m.n[0] - 1, 1);
  const Team team(m.shots, planes, m.cells);
  Barrier barrier(team.threads);
  const int first = Model<T>::direction(H, 1, 0) == 0 ? 0 : 1, second = Model<T>::direction(H, 2, 0) == 0 ? 0 : 1;
  std::vector<T> edges(team.by_shot ? 0 : team.threads * m.shots * 2 * m.stride[0]);
  team.run([&](int64_t me) {
    const FlushSubnormal flush;
    std::vector<T> row(m.n[2] + 16);
    T* s = row.data();
    Plane<T> e(m.stride[0]), h(m.stride[0]);
    const int64_t of = team.threads;
    T* wave = number ? data<T>(waves) + me * steps * number : nullptr;
    if (team.by_shot) {
      for (int64_t shot = me; shot < m.shots; shot += of)
        for (int64_t step = steps - 1; step >= 0; --step) {
          injector.add(m, step, start, shot, 0, planes);
          f.prescribed(step, shot, 0, planes, wave);
          for (int64_t i = planes - 1; i >= 0; --i) {
            f.plane(step, shot, i, e, h, s, wave);
            if (i + 1 < planes) f.to_e_after(shot, i + 1, h.of(1, first), h.of(2, second));
            if (i > 0) f.to_h_before(shot, i - 1, e);
          }
        }
    } else {
      const int64_t lo = planes * me / of, hi = planes * (me + 1) / of, size = 2 * m.stride[0];
      const auto edge = [&](int64_t of_thread, int64_t shot) { return edges.data() + (of_thread * m.shots + shot) * size; };
      std::vector<Plane<T>> after(hi < planes ? m.shots : 0, Plane<T>(m.stride[0]));
      for (int64_t step = steps - 1; step >= 0; --step) {
        for (int64_t shot = 0; shot < m.shots; ++shot) {
          injector.add(m, step, start, shot, lo, hi);
          f.prescribed(step, shot, lo, hi, wave);
        }
        barrier.wait();
        for (size_t shot = 0; shot < after.size(); ++shot) f.look(shot, hi, after[shot], s);
        barrier.wait();
        for (int64_t shot = 0; shot < m.shots; ++shot) {
          if (hi < planes) f.to_h_before(shot, hi - 1, after[shot]);
          for (int64_t i = hi - 1; i >= lo; --i) {
            f.plane(step, shot, i, e, h, s, wave);
            if (i + 1 < hi) f.to_e_after(shot, i + 1, h.of(1, first), h.of(2, second));
            else {
              std::copy_n(h.of(1, first), m.stride[0], edge(me, shot));
              std::copy_n(h.of(2, second), m.stride[0], edge(me, shot) + m.stride[0]);
            }
            if (i > lo) f.to_h_before(shot, i - 1, e);
          }
        }
        barrier.wait();
        for (int64_t shot = 0; me > 0 && shot < m.shots; ++shot)
          f.to_e_after(shot, lo, edge(me - 1, shot), edge(me - 1, shot) + m.stride[0]);
      }
    }
  });
}

// Transposes `fdtd_forward`: adjoint fields are changed in place, gradients are added. See kernels.py.
void fdtd_adjoint(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints,
                  at::ArrayRef<double> reals, Tensors sources, Tensors read, Tensors given, Tensors phases, Ints every,
                  int64_t start, int64_t steps, Tensors history, Ints box, Tensors gradients, const at::Tensor& waves) {
  const auto go = [&](auto zero) {
    adjoint_loop<decltype(zero)>(fields, coefficients, lines, pole, ints, reals, sources, read, given, phases, every,
                                 start, steps, history, box, gradients, waves);
  };
  for (const at::Tensor& x : fields)
    if (x.numel()) return run("fdtd_adjoint", x, go, go);
}

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(
      "fdtd_forward(Tensor[] fields, Tensor[] coefficients, Tensor[] lines, Tensor[] pole, int[] ints, float[] reals, "
      "Tensor[] sources, Tensor waves, Tensor[] read, Tensor[] results, Tensor[] phases, int[] every, int start, "
      "int steps, Tensor[] history, int[] box) -> ()", fdtd_forward);
  library.def(
      "fdtd_adjoint(Tensor[] fields, Tensor[] coefficients, Tensor[] lines, Tensor[] pole, int[] ints, float[] reals, "
      "Tensor[] sources, Tensor[] read, Tensor[] given, Tensor[] phases, int[] every, int start, int steps, "
      "Tensor[] history, int[] box, Tensor[] gradients, Tensor waves) -> ()", fdtd_adjoint);
}

}  // namespace
