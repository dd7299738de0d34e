// The time loop. One sweep over the planes of axis 0 updates H and then E of a plane: numbers come from memory once in
// a step. Threads have shots, or slabs of planes; results do not depend on their number.

namespace {

// What gradients need of each step, in a box: the curl that E was advanced with, and E before.
template <class T>
struct History {
  Box box;
  T *curl[3] = {}, *before[3] = {};  // (steps, shots, box)
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
struct Forward {
  const Model<T>& m;
  const Entries<T>&soft, &hard, &magnetic;  // currents, prescribed E, and what is added to H
  const T* waves;                            // (steps, number)
  int64_t number;
  History<T> history;
  std::vector<Run> runs[2] = {};  // of E and H: rows of a plane that all components have
  std::vector<Band> bands = {};

  // Where layers, poles and the history begin and end along an axis.
  std::vector<bool> cuts(Side s, int axis) const {
    std::vector<bool> out(m.n[axis] + 1);
    for (int64_t j = 1; m.layer[s][axis] && j < m.n[axis]; ++j)
      out[j] = (m.at[s][axis][j] < 0) != (m.at[s][axis][j - 1] < 0);
    if (s == H) return out;
    out[history.box.from[axis]] = out[history.box.to[axis]] = true;
    for (const Pole<T>& pole : m.poles) out[pole.from[axis]] = out[pole.to[axis]] = true;
    return out;
  }

  void cut() {
    const int64_t planes = std::max<int64_t>(m.n[0] - 1, 1);
    const auto e = cuts(E, 0), h = cuts(H, 0);
    for (int64_t i = 0; i < planes; ++i)
      if (m.flat && i > 1 && !e[i] && !h[i] && i - bands.back().first < m.most) ++bands.back().last;
      else bands.push_back({i, i + 1});
    for (Side s : {E, H}) {
      const auto begins = cuts(s, 1);
      for (int64_t j = s == E; !m.flat && j < m.n[1] - 1; ++j)
        if (runs[s].empty() || begins[j]) runs[s].push_back({j, j + 1});
        else ++runs[s].back().last;
    }
  }

  template <class F>
  void each_run(Side s, const Band& band, const F& f) const {
    if (m.flat) f(Run{0, band.last - band.first});
    for (const Run& x : runs[s]) f(x);
  }

  bool whole_rows() const { return history.box.from[2] == 0 && history.box.to[2] == m.n[2]; }

  void h_band(int64_t step, int64_t shot, const Band& band, T* cur) const {
    const int64_t i = band.first;
    each_run(H, band, [&](const Run& x) { m.template update<H>(shot, i, x.first, x.last, nullptr); });
    if (!m.flat) {
      const int64_t j = m.n[1] - 1;  // of H1 alone
      int64_t k0, k1;
      m.range(H, 1, 2, k0, k1);
      m.template curl<H>(1, shot, i, j, k0, k1, cur);
      m.advance(H, 1, shot, i * m.stride[0] + j * m.stride[1], k0, k1, cur);
      m.template ends<H>(1, shot, i, j, j + 1);
    }
    const T* wave = waves + step * number;
    for (int64_t x = magnetic.first[shot * m.planes + i]; x < magnetic.first[shot * m.planes + band.last]; ++x)
      m.f[H][magnetic.component[x] - 3][shot * m.cells + magnetic.place[x]] += magnetic.amount[x] * wave[magnetic.wave[x]];
  }

  // Where the history of a row begins, from its first place in the box.
  int64_t kept(int64_t step, int64_t shot, int64_t i, int64_t j) const {
    return (step * m.shots + shot) * history.box.cells() + history.box.row(i, j);
  }

  // Component p of a row, with poles.
  void e_row(int64_t step, int64_t shot, int64_t i, int64_t j, int p, T* cur) const {
    const int64_t row = i * m.stride[0] + j * m.stride[1], place = shot * m.cells + row;
    const Box& box = history.box;
    int64_t k0, k1;
    m.range(E, p, 2, k0, k1);
    m.template curl<E>(p, shot, i, j, k0, k1, cur);
    for (const Pole<T>& pole : m.poles)
      if (pole.gain[p] && pole.has(i, j)) {
        const int64_t at = pole.row(i, j) - pole.from[2], by = shot * pole.cells() + at;
        T* __restrict y = pole.j[p] + by;
        T* __restrict q = pole.p[p] + by;
        const T* __restrict gain = pole.gain[p] + at;
        const T* __restrict x = m.f[E][p] + place;
        const int64_t from = std::max(k0, pole.from[2]), to = std::min(k1, pole.to[2]);
#pragma omp simd
        for (int64_t k = from; k < to; ++k) {
          y[k] = pole.keep * y[k] + gain[k] * x[k] - pole.spring * q[k];
          q[k] += pole.dt * y[k];
          cur[k] -= y[k];
        }
      }
    T* stored = nullptr;
    if (history.curl[p] && box.has(i, j)) {
      const int64_t to = kept(step, shot, i, j), length = box.to[2] - box.from[2];
      stored = history.curl[p] + to;
      std::copy_n(cur + box.from[2], length, stored);
      if (history.before[p]) std::copy_n(m.f[E][p] + place + box.from[2], length, history.before[p] + to);
    }
    m.advance(E, p, shot, row, k0, k1, cur);
    m.template ends<E>(p, shot, i, j, j + 1, stored, box.from[2], box.to[2]);
  }

  // Rows without poles, with a history: of whole rows in place, else by way of `cur`.
  void e_rows(int64_t step, int64_t shot, int64_t i, const Run& x, T* cur) const {
    const int64_t from = history.box.from[2], length = history.box.to[2] - from;
    T* stored[3];
    for (int p = 0; p < 3; ++p) {
      stored[p] = whole_rows() ? history.curl[p] + kept(step, shot, i, x.first) : cur + p * m.most * m.n[2];
      const T* before = m.f[E][p] + shot * m.cells + i * m.stride[0] + from;
      for (int64_t j = x.first; history.before[p] && j < x.last; ++j)
        std::copy_n(before + j * m.n[2], length, history.before[p] + kept(step, shot, i, j));
    }
    m.template update<E>(shot, i, x.first, x.last, stored);
    if (whole_rows()) return;
    for (int p = 0; p < 3; ++p)
      for (int64_t j = x.first; history.curl[p] && j < x.last; ++j)
        std::copy_n(stored[p] + (j - x.first) * m.n[2] + from, length, history.curl[p] + kept(step, shot, i, j));
  }

  void e_band(int64_t step, int64_t shot, const Band& band, T* cur) const {
    const int64_t i = band.first;
    const bool wall = i == m.wall[0] || i == m.wall[1];  // tangential E is zero
    for (int64_t j = m.flat ? 0 : 1; wall && m.f[E][0] && (j == 0 || j < m.n[1] - 1); ++j) e_row(step, shot, i, j, 0, cur);
    if (!wall && !m.flat) e_row(step, shot, i, 0, 1, cur);
    if (!wall) each_run(E, band, [&](const Run& x) {
      const bool poles = std::any_of(m.poles.begin(), m.poles.end(), [&](const Pole<T>& y) { return y.has(i, x.first); });
      if (poles) {
        for (int64_t j = x.first; j < x.last; ++j)
          for (int p = 0; p < 3; ++p)
            if (m.f[E][p]) e_row(step, shot, m.flat ? i + j : i, m.flat ? 0 : j, p, cur);
      } else if (history.box.has(i, x.first)) e_rows(step, shot, i, x, cur);
      else m.template update<E>(shot, i, x.first, x.last, nullptr);
    });
    const T* wave = waves + step * number;
    for (int64_t x = soft.first[shot * m.planes + i]; x < soft.first[shot * m.planes + band.last]; ++x) {
      const int64_t p = soft.component[x], place = soft.place[x];
      const T current = soft.amount[x] * wave[soft.wave[x]];
      m.f[E][p][shot * m.cells + place] += (m.b[E][p] ? m.b[E][p][place] : m.scalar[E][p]) * current;
      const int64_t at = place / m.stride[0], j = place / m.stride[1] % m.n[1], k = place % m.n[2];
      if (history.curl[p] && history.box.has(at, j) && k >= history.box.from[2] && k < history.box.to[2])
        history.curl[p][(step * m.shots + shot) * history.box.cells() + history.box.row(at, j) + k - history.box.from[2]]
            += current;
    }
    for (int64_t x = hard.first[shot * m.planes + i]; x < hard.first[shot * m.planes + band.last]; ++x)
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
  f.cut();
  const int64_t bands = f.bands.size();
  const Team team(m.shots, bands, m.cells);
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(8, CACHE * bands / m.bytes - 2));
  const int64_t turns = (steps + most * team.threads - 1) / (most * team.threads);  // of each thread
  const int64_t depth = std::max<int64_t>(1, (steps + turns * team.threads - 1) / (turns * team.threads));
  std::vector<Progress> done(team.threads);
  team.run([&](int64_t me) {
    const FlushSubnormal flush;
    std::vector<T> scratch(3 * m.most * m.n[2]);
    T* cur = scratch.data();
    // Steps first to first + depth follow each other at a band's distance, so that bands stay in the cache.
    const auto sweep = [&](int64_t shot, int64_t end, int64_t first, const auto& before, const auto& after) {
      const int64_t last = std::min(first + depth, steps);
      for (int64_t front = 0; front < bands + last - first - 1; ++front) {
        before(front);
        for (int64_t step = first; step < last; ++step) {
          const int64_t at = front - (step - first);
          if (at < 0 || at >= bands) continue;
          const Band& band = f.bands[at];
          for (int64_t x = shot; x < end; ++x) {
            f.h_band(step, x, band, cur), f.e_band(step, x, band, cur);
            reader.read(m, step, start, x, band.first, band.last);
          }
          if (step == last - 1) after(step * bands + at + 1);
        }
      }
    };
    if (team.by_shot) {
      for (int64_t shot = me; shot < m.shots; shot += team.threads)
        for (int64_t first = 0; first < steps; first += depth) sweep(shot, shot + 1, first, [](int64_t) {}, [](int64_t) {});
      return;
    }
    // Threads take turns: the steps of one follow those of the thread before.
    const Progress& other = done[(me + team.threads - 1) % team.threads];
    for (int64_t first = me * depth; first < steps; first += team.threads * depth)
      sweep(0, m.shots, first,
            [&](int64_t front) { if (first) other.wait((first - 1) * bands + std::min(front + 2, bands)); },
            [&](int64_t count) { done[me].set(count); });
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
