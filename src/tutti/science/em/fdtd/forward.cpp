// The time loop. One sweep over the planes of axis 0 updates H and then E of a plane: numbers come from memory once in
// a step. Threads have shots, or slabs of planes; results do not depend on their number.

namespace {

// What gradients need of each step, in a box: the curl that E was advanced with, and E before.
template <class T>
struct History {
  Box box;
  T *curl[3] = {}, *before[3] = {};  // (steps, shots, box)
};

template <class T>
struct Forward {
  const Model<T>& m;
  const Entries<T>&soft, &hard, &magnetic;  // currents, prescribed E, and what is added to H
  const T* waves;                            // (steps, number)
  int64_t number;
  History<T> history;

  void h_plane(int64_t step, int64_t shot, int64_t i) const {
    for (int p = 0; p < 3; ++p) {
      if (!m.updates(H, p, i) || (!m.is_node(H, p, 0) && i == m.n[0] - 1)) continue;
      int64_t j0, j1, k0, k1;
      m.range(H, p, 1, j0, j1), m.range(H, p, 2, k0, k1);
      for (int64_t j = j0; j < j1; ++j) m.template update<H>(p, shot, i, j, k0, k1);
    }
    const T* wave = waves + step * number;
    for (int64_t x = magnetic.first[shot * m.planes + i]; x < magnetic.first[shot * m.planes + i + 1]; ++x)
      m.f[H][magnetic.component[x] - 3][shot * m.cells + magnetic.place[x]] += magnetic.amount[x] * wave[magnetic.wave[x]];
  }

  // normal, tangential: which components of E.
  void e_plane(int64_t step, int64_t shot, int64_t i, bool normal, bool tangential, T* cur) const {
    for (int p = 0; p < 3; ++p) {
      if (!(p ? tangential : normal) || !m.updates(E, p, i) || (p == 0 && i == m.n[0] - 1)) continue;
      int64_t j0, j1, k0, k1;
      m.range(E, p, 1, j0, j1), m.range(E, p, 2, k0, k1);
      for (int64_t j = j0; j < j1; ++j) {
        const bool stored = history.curl[p] && history.box.has(i, j);
        if (!stored && m.poles.empty()) {
          m.template update<E>(p, shot, i, j, k0, k1);
          continue;
        }
        const int64_t row = i * m.stride[0] + j * m.stride[1];
        m.template curl<E>(p, shot, i, j, k0, k1, cur);
        for (const Pole<T>& pole : m.poles)
          if (pole.gain[p] && pole.has(i, j)) {
            const int64_t at = pole.row(i, j) - pole.from[2], by = shot * pole.cells() + at;
            T* __restrict y = pole.j[p] + by;
            T* __restrict q = pole.p[p] + by;
            const T* __restrict gain = pole.gain[p] + at;
            const T* __restrict x = m.f[E][p] + shot * m.cells + row;
            const int64_t from = std::max(k0, pole.from[2]), to = std::min(k1, pole.to[2]);
#pragma omp simd
            for (int64_t k = from; k < to; ++k) {
              y[k] = pole.keep * y[k] + gain[k] * x[k] - pole.spring * q[k];
              q[k] += pole.dt * y[k];
              cur[k] -= y[k];
            }
          }
        T* kept = nullptr;
        if (stored) {
          const int64_t length = history.box.to[2] - history.box.from[2];
          const int64_t to = (step * m.shots + shot) * history.box.cells() + history.box.row(i, j);
          kept = history.curl[p] + to;
          std::memcpy(kept, cur + history.box.from[2], length * sizeof(T));
          if (history.before[p])
            std::memcpy(history.before[p] + to, m.f[E][p] + shot * m.cells + row + history.box.from[2], length * sizeof(T));
        }
        m.advance(E, p, shot, row, k0, k1, cur);
        m.template ends<E>(p, shot, i, j, kept, history.box.from[2], history.box.to[2]);
      }
    }
    const T* wave = waves + step * number;
    for (int64_t x = soft.first[shot * m.planes + i]; x < soft.first[shot * m.planes + i + 1]; ++x) {
      const int64_t p = soft.component[x], place = soft.place[x];
      if (!(p ? tangential : normal)) continue;
      const T current = soft.amount[x] * wave[soft.wave[x]];
      m.f[E][p][shot * m.cells + place] += (m.b[E][p] ? m.b[E][p][place] : m.scalar[E][p]) * current;
      const int64_t j = place / m.stride[1] % m.n[1], k = place % m.n[2];
      if (history.curl[p] && history.box.has(i, j) && k >= history.box.from[2] && k < history.box.to[2])
        history.curl[p][(step * m.shots + shot) * history.box.cells() + history.box.row(i, j) + k - history.box.from[2]]
            += current;
    }
    for (int64_t x = hard.first[shot * m.planes + i]; x < hard.first[shot * m.planes + i + 1]; ++x)
      if (hard.component[x] ? tangential : normal)
        m.f[E][hard.component[x]][shot * m.cells + hard.place[x]] = hard.amount[x] * wave[hard.wave[x]];
  }
};

// Samples of planes after a step, and running Fourier sums.
template <class T>
struct Reader : Readings<T> {
  using Readings<T>::Readings;

  void read(const Model<T>& m, int64_t step, int64_t start, int64_t shot, int64_t i0, int64_t i1) const {
    for (size_t g = 0; g < this->groups.size(); ++g) {
      const int64_t slot = this->slot(g, step, start), frequencies = this->frequencies[g];
      if (slot < 0) continue;
      const Group& x = this->groups[g];
      if (!this->phase[g]) {
        T* to = this->numbers[g] + (slot * m.shots + shot) * x.count;
        for (int64_t y = x.first[i0]; y < x.first[i1]; ++y)
          to[y] = m.f[x.component[y] / 3][x.component[y] % 3][shot * m.cells + x.place[y]];
        continue;
      }
      for (int64_t v = 0; v < frequencies; ++v) {
        const T* phase = this->phase[g] + (step * frequencies + v) * 2;
        T* to = this->numbers[g] + (shot * frequencies + v) * x.count * 2;
        for (int64_t y = x.first[i0]; y < x.first[i1]; ++y) {
          const T value = m.f[x.component[y] / 3][x.component[y] % 3][shot * m.cells + x.place[y]];
          to[2 * y] += phase[0] * value, to[2 * y + 1] += phase[1] * value;
        }
      }
    }
  }
};

// Threads, and the planes of each: shots are shared out where there are enough, else slabs of planes.
struct Team {
  int64_t threads;
  bool by_shot;
  Team(int64_t shots, int64_t planes, int64_t cells) {
    const int64_t most = at::in_parallel_region() ? 1 : at::get_num_threads();
    by_shot = shots >= most || planes < 4 * most;
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

void run(const char* what, const at::Tensor& like, const std::function<void(float)>& f32,
         const std::function<void(double)>& f64) {
  if (like.scalar_type() == at::kFloat) f32(0); else if (like.scalar_type() == at::kDouble) f64(0);
  else TORCH_CHECK_VALUE(false, what, " takes float32 or float64, not ", like.scalar_type());
}

template <class T>
void forward_loop(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints,
                  at::ArrayRef<double> reals, Tensors sources, const at::Tensor& waves, Tensors read, Tensors results,
                  Tensors phases, Ints every, int64_t start, int64_t steps, Tensors history, Ints box) {
  const Model<T> m(fields, coefficients, lines, pole, ints, reals);
  const Entries<T> soft(sources.slice(0, 5)), hard(sources.slice(5, 5)), magnetic(sources.slice(10, 5));
  const Reader<T> reader(read, results, phases, every);
  Forward<T> f{m, soft, hard, magnetic, data<T>(waves), waves.size(1), {}};
  std::copy_n(box.begin(), 3, f.history.box.from), std::copy_n(box.begin() + 3, 3, f.history.box.to);
  for (int p = 0; p < 3 && history.size(); ++p) f.history.curl[p] = data<T>(history[p]), f.history.before[p] = data<T>(history[3 + p]);
  const int64_t planes = std::max<int64_t>(m.n[0] - 1, 1);
  const Team team(m.shots, planes, m.cells);
  Barrier barrier(team.threads);
  team.run([&](int64_t me) {
    const FlushSubnormal flush;
    std::vector<T> row(m.n[2] + 16);
    T* cur = row.data();
    const int64_t of = team.threads;
    if (team.by_shot) {
      for (int64_t shot = me; shot < m.shots; shot += of)
        for (int64_t step = 0; step < steps; ++step) {
          for (int64_t i = 0; i < planes; ++i) {
            f.h_plane(step, shot, i);
            f.e_plane(step, shot, i, true, true, cur);
          }
          reader.read(m, step, start, shot, 0, planes);
        }
    } else {
      const int64_t lo = planes * me / of, hi = planes * (me + 1) / of;
      for (int64_t step = 0; step < steps; ++step) {
        for (int64_t shot = 0; shot < m.shots; ++shot)
          for (int64_t i = lo; i < hi; ++i) {
            f.h_plane(step, shot, i);
            f.e_plane(step, shot, i, true, i > lo, cur);
          }
        barrier.wait();  // the first plane waits for H of the slab before
        for (int64_t shot = 0; shot < m.shots; ++shot) {
          f.e_plane(step, shot, lo, false, true, cur);
          reader.read(m, step, start, shot, lo, hi);
        }
        barrier.wait();
      }
    }
  });
}

// Advance fields in place by `steps`. See kernels.py.
void fdtd_forward(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints,
                  at::ArrayRef<double> reals, Tensors sources, const at::Tensor& waves, Tensors read, Tensors results,
                  Tensors phases, Ints every, int64_t start, int64_t steps, Tensors history, Ints box) {
  const auto go = [&](auto zero) {
    forward_loop<decltype(zero)>(fields, coefficients, lines, pole, ints, reals, sources, waves, read, results, phases,
                                 every, start, steps, history, box);
  };
  run("fdtd_forward", waves, go, go);
}

}  // namespace
