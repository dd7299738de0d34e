// The time loop: one sweep over the bands updates H and then E of a band.

namespace {

template <class T>
struct Forward {
  const Model<T>& m;
  const Entries<T>&soft, &hard, &magnetic;  // currents, prescribed E, and what is added to H
  const T* waves;                            // (steps, number)
  int64_t number;
  const History<T>& history;
  const Bands<T>& bands;

  bool whole_rows() const { return history.box.from[2] == 0 && history.box.to[2] == m.n[2]; }

  void h_band(int64_t step, int64_t shot, const Band& band) const {
    const int64_t i = band.first;
    bands.each(H, band, [&](const Run& x) { m.template update<H>(shot, i, x.first, x.last, nullptr); });
    if (!m.flat) m.template update<H>(shot, i, m.n[1] - 1, m.n[1], nullptr, 1);
    const T* wave = waves + step * number;
    for (int64_t x = magnetic.first[shot * m.planes + i]; x < magnetic.first[shot * m.planes + band.last]; ++x)
      m.f[H][magnetic.component[x] - 3][shot * m.cells + magnetic.place[x]] += magnetic.amount[x] * wave[magnetic.wave[x]];
  }

  // J and P of the poles at a row of component p, before it is advanced; or after that, their current.
  void poles(int64_t shot, int64_t i, int64_t j, int p, bool after, T* stored) const {
    const int64_t row = i * m.stride[0] + j * m.stride[1];
    T* __restrict x = m.f[E][p] + shot * m.cells + row;
    for (const Pole<T>& pole : m.poles) {
      if (!pole.gain[p] || !pole.has(i, j)) continue;
      const int64_t at = pole.row(i, j) - pole.from[2], by = shot * pole.cells() + at;
      T *__restrict y = pole.j[p] + by, *__restrict q = pole.p[p] + by;
      const int64_t from = std::max(m.begin(p), pole.from[2]), to = std::min(m.n[2] - 1, pole.to[2]);
      if (!after) {
        const T* __restrict gain = pole.gain[p] + at;
#pragma omp simd
        for (int64_t k = from; k < to; ++k) {
          y[k] = pole.keep * y[k] + gain[k] * x[k] - pole.spring * q[k];
          q[k] += pole.dt * y[k];
        }
        continue;
      }
      for (int64_t k = from; k < to; ++k) x[k] -= (m.b[E][p] ? m.b[E][p][row + k] : m.scalar[E][p]) * y[k];
      for (int64_t k = from; stored && k < to; ++k) stored[k] -= y[k];
    }
  }

  // Rows of all components, or of `only` one. The history of whole rows is written in place, else by way of `cur`.
  void e_rows(int64_t step, int64_t shot, int64_t i, const Run& x, T* cur, int only = -1) const {
    const auto has = [&](const auto& box) { return box.has(m.flat ? i + x.first : i, m.flat ? 0 : x.first); };
    const bool polar = std::any_of(m.poles.begin(), m.poles.end(), has), here = has(history.box);
    const int64_t from = history.box.from[2], length = history.box.to[2] - from;
    const auto each = [&](const auto& f) {
      for (int p = 0; p < 3; ++p)
        for (int64_t j = x.first; m.f[E][p] && (only < 0 || only == p) && j < x.last; ++j)
          f(p, m.flat ? i + j : i, m.flat ? 0 : j, (j - x.first) * m.n[2]);
    };
    T* stored[3];
    for (int p = 0; p < 3; ++p)
      stored[p] = here && whole_rows() ? history.curl[p] + history.row(step, shot, i, x.first) : cur + p * m.most * m.n[2];
    if (here && (history.before[0] || history.before[1])) each([&](int p, int64_t i, int64_t j, int64_t) {
      std::copy_n(m.f[E][p] + shot * m.cells + i * m.stride[0] + j * m.n[2] + from, length, history.before[p] + history.row(step, shot, i, j));
    });
    if (polar) each([&](int p, int64_t i, int64_t j, int64_t) { poles(shot, i, j, p, false, nullptr); });
    m.template update<E>(shot, i, x.first, x.last, here || only >= 0 ? stored : nullptr, only);
    if (polar) each([&](int p, int64_t i, int64_t j, int64_t at) { poles(shot, i, j, p, true, here ? stored[p] + at : nullptr); });
    if (here && !whole_rows()) each([&](int p, int64_t i, int64_t j, int64_t at) {
      std::copy_n(stored[p] + at + from, length, history.curl[p] + history.row(step, shot, i, j));
    });
  }

  void e_band(int64_t step, int64_t shot, const Band& band, T* cur) const {
    const int64_t i = band.first;
    const bool wall = i == m.wall[0] || i == m.wall[1];  // tangential E is zero
    if (!wall && !m.flat) e_rows(step, shot, i, {0, 1}, cur, 1);
    if (!wall || m.f[E][0]) bands.each(E, band, [&](const Run& x) { e_rows(step, shot, i, x, cur, wall ? 0 : -1); });
    const T* wave = waves + step * number;
    for (int64_t x = soft.first[shot * m.planes + i]; x < soft.first[shot * m.planes + band.last]; ++x) {
      const int64_t p = soft.component[x], place = soft.place[x];
      const T current = soft.amount[x] * wave[soft.wave[x]];
      m.f[E][p][shot * m.cells + place] += (m.b[E][p] ? m.b[E][p][place] : m.scalar[E][p]) * current;
      const int64_t at = place / m.stride[0], j = place / m.stride[1] % m.n[1], k = place % m.n[2];
      if (history.curl[p] && history.box.has(at, j) && k >= history.box.from[2] && k < history.box.to[2])
        history.curl[p][history.row(step, shot, at, j) + k - history.box.from[2]] += current;
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

// Advance fields in place by `steps`. See kernels.py.
template <class T>
void forward_loop(Tensors fields, Tensors coefficients, Tensors lines, Tensors pole, Ints ints,
                  at::ArrayRef<double> reals, Tensors sources, const at::Tensor& waves, Tensors read, Tensors results,
                  Tensors phases, Ints every, int64_t start, int64_t steps, Tensors history, Ints box) {
  const Model<T> m(fields, coefficients, lines, pole, ints, reals);
  const Entries<T> soft(sources.slice(0, 5)), hard(sources.slice(5, 5)), magnetic(sources.slice(10, 5));
  const Reader<T> reader(read, results, phases, every);
  const History<T> past(m.shots, history, box);
  const Bands<T> bands(m, past.box);
  const Forward<T> f{m, soft, hard, magnetic, data<T>(waves), waves.size(1), past, bands};
  march(m, bands.count(), steps, [&](int64_t) {
    return [&, scratch = std::vector<T>(3 * m.most * m.n[2])](int64_t shot, int64_t step, int64_t at) mutable {
      const Band& band = bands.all[at];
      f.h_band(step, shot, band), f.e_band(step, shot, band, scratch.data());
      reader.read(m, step, start, shot, band.first, band.last);
    };
  });
}

}  // namespace
