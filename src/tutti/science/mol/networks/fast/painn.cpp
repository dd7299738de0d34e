// PaiNN's energies and forces with tabulated filters (tables.py), and a backward pass by hand.
//
// Atoms have scalars s (N) and vectors v (3, N). A message from j to i, with (a, b, c) = context(s_j) o W(d) and the
// unit vector u from i to j: s_i += a, v_i += b u + c v_j. Then vectors mix linearly, (L, R) = U v, and (a, c, b) =
// mix(s, |L|): s += a + b <L, R>, v += c R. The message's gradient by the vector between atoms has a part along u, from
// the filters, and one across, from u itself.
//
// Rows have N columns, or three or two chunks of them, the readout H, all padded with zeros to multiples of PANEL.

namespace {
namespace painn {

constexpr int64_t BLOCK = 48;  // atoms that a block has at least, if there are more molecules
constexpr double SMALL = 1e-8;  // added to |L|^2: painn.py

// pre += bias; out = pre / (1 + e^-pre). Then pre = the slope of that.
void silu(T* pre, const T* bias, T* out, int64_t rows, int64_t n) {
  const Vec zero(T(0)), one(T(1));
  each_row(rows, [&](int64_t r) {
    for (int64_t c = 0; c < n; c += WIDTH) {
      T* p = pre + r * n + c;
      const Vec x = Vec::loadu(p) + Vec::loadu(bias + c), part = one / (one + (zero - x).exp());
      (x * part).store(out + r * n + c);
      (part * fmadd(x, one - part, one)).store(p);
    }
  });
}

struct Weights {
  const T* embedding;  // (species, N)
  const T* first;      // (species, 3 N): the context of the first interaction
  const T* tables;     // (interactions, knots, 2, 3 N)
  // Layers of each interaction in panels (panels.h), and their transposes: the context N -> N -> 3 N, U N -> 2 N, the
  // mix 2 N -> N -> 3 N.
  const T *one, *one_bias, *one_back, *two, *two_bias, *two_back, *vectors, *vectors_back;
  const T *in, *in_bias, *in_back, *out, *out_bias, *out_back;
  const T *half, *half_bias, *half_back, *last;  // readout N -> H, (H)
  T last_bias;
  int64_t interactions, knots, n, h;
  double cutoff;
};

// What the backward pass needs of an interaction.
struct Layer {
  std::vector<T> context, context_slope;  // (rows, 3 N), (rows, N)
  std::vector<T> v;                       // before the message (rows, 3, N)
  std::vector<T> mixed;                   // L, R (rows, 3, 2 N)
  std::vector<T> joined;                  // s and |L| (rows, 2 N)
  std::vector<T> mix, mix_slope;          // a, c, b (rows, 3 N); (rows, N)
  std::vector<T> dot;                     // <L, R> (rows, N)
};

// Filters and slopes of three chunks at columns f.
struct Filters {
  const T* at;
  int64_t n;
  Vec value[4], slope[4];

  Filters(const Pair& p, const T* table, int64_t n) : at(table + p.knot * 6 * n), n(n) {
    for (int k = 0; k < 4; ++k) value[k] = Vec(p.value[k]), slope[k] = Vec(p.slope[k]);
  }
  Vec with(const Vec (&weight)[4], int chunk, int64_t f) const {
    const T* t = at + chunk * n + f;
    Vec sum = weight[0] * Vec::loadu(t);
    for (int k = 1; k < 4; ++k) sum = fmadd(weight[k], Vec::loadu(t + k * 3 * n), sum);
    return sum;
  }
};

struct Problem : Graph {
  const Weights& w;
  double *energies, *forces, *virials;  // of atoms; (atoms, 3); (molecules, 3, 3)
  int64_t counted;  // atoms that have energies, the first ones

  // sums (rows, 4 N) += messages to s and v, for both atoms of some pairs. v: null if all are 0.
  void send(const Pair* first, const Pair* last, const T* table, const T* context, const T* v, T* sums) const {
    const int64_t n = w.n;
    for (const Pair* p = first; p < last; ++p) {
      const Filters filters(*p, table, n);
      const Vec unit[3] = {Vec(T(p->unit[0])), Vec(T(p->unit[1])), Vec(T(p->unit[2]))};
      const T *ci = context + p->i * 3 * n, *cj = context + p->j * 3 * n;
      T *si = sums + p->i * 4 * n, *sj = sums + p->j * 4 * n;
      for (int64_t f = 0; f < n; f += WIDTH) {
        const Vec a = filters.with(filters.value, 0, f), b = filters.with(filters.value, 1, f);
        fmadd(a, Vec::loadu(cj + f), Vec::loadu(si + f)).store(si + f);
        fmadd(a, Vec::loadu(ci + f), Vec::loadu(sj + f)).store(sj + f);
        const Vec bi = b * Vec::loadu(cj + n + f), bj = b * Vec::loadu(ci + n + f);
        if (!v) {
          for (int x = 0; x < 3; ++x) {
            T *ti = si + (x + 1) * n + f, *tj = sj + (x + 1) * n + f;
            fmadd(bi, unit[x], Vec::loadu(ti)).store(ti);
            (Vec::loadu(tj) - bj * unit[x]).store(tj);
          }
          continue;
        }
        const Vec c = filters.with(filters.value, 2, f);
        const Vec toi = c * Vec::loadu(cj + 2 * n + f), toj = c * Vec::loadu(ci + 2 * n + f);
        for (int x = 0; x < 3; ++x) {
          T *ti = si + (x + 1) * n + f, *tj = sj + (x + 1) * n + f;
          const Vec vi = Vec::loadu(v + (p->i * 3 + x) * n + f), vj = Vec::loadu(v + (p->j * 3 + x) * n + f);
          fmadd(toi, vj, fmadd(bi, unit[x], Vec::loadu(ti))).store(ti);
          fmadd(toj, vi, Vec::loadu(tj) - bj * unit[x]).store(tj);
        }
      }
    }
  }

  // The transpose of `send`: from ds (rows, N) and dv (rows, 3, N) to sums (rows, 6 N) += dE/d context and dE/dv, if v
  // is not null, and slopes (pairs, 4) += dE/dd and dE/du.
  void send_back(const Pair* first, const Pair* last, const T* table, const T* context, const T* v, const T* ds,
                 const T* dv, T* sums, double* slopes) const {
    const int64_t n = w.n;
    const Vec zero(T(0));
    for (const Pair* p = first; p < last; ++p, slopes += 4) {
      const Filters filters(*p, table, n);
      const Vec unit[3] = {Vec(T(p->unit[0])), Vec(T(p->unit[1])), Vec(T(p->unit[2]))};
      Vec along = zero, turn[3] = {zero, zero, zero};
      // from: the atom that sends; to: the one that receives, towards which the unit vector has this sign
      const auto back = [&](int64_t to, int64_t from, bool minus, int64_t f, const Vec (&value)[3],
                            const Vec (&steep)[3]) {
        const T *c = context + from * 3 * n + f, *g = dv + to * 3 * n + f;
        const Vec ga = Vec::loadu(ds + to * n + f), ca = Vec::loadu(c), cb = Vec::loadu(c + n);
        const Vec gx[3] = {Vec::loadu(g), Vec::loadu(g + n), Vec::loadu(g + 2 * n)};
        Vec gb = fmadd(gx[2], unit[2], fmadd(gx[1], unit[1], gx[0] * unit[0]));
        Vec weight = value[1] * cb;
        if (minus) gb = zero - gb, weight = zero - weight;
        for (int x = 0; x < 3; ++x) turn[x] = fmadd(weight, gx[x], turn[x]);
        along = fmadd(steep[0], ga * ca, fmadd(steep[1], gb * cb, along));
        if (!v) return;
        const T* old = v + from * 3 * n + f;
        const Vec gc = fmadd(gx[2], Vec::loadu(old + 2 * n), fmadd(gx[1], Vec::loadu(old + n), gx[0] * Vec::loadu(old)));
        const Vec cc = Vec::loadu(c + 2 * n), through = value[2] * cc;
        along = fmadd(steep[2], gc * cc, along);
        T* sum = sums + from * 6 * n + f;
        fmadd(value[0], ga, Vec::loadu(sum)).store(sum);
        fmadd(value[1], gb, Vec::loadu(sum + n)).store(sum + n);
        fmadd(value[2], gc, Vec::loadu(sum + 2 * n)).store(sum + 2 * n);
        for (int x = 0; x < 3; ++x) {
          T* into = sum + (3 + x) * n;
          fmadd(through, gx[x], Vec::loadu(into)).store(into);
        }
      };
      for (int64_t f = 0; f < n; f += WIDTH) {
        Vec value[3] = {zero, zero, zero}, steep[3] = {zero, zero, zero};
        for (int k = 0; k < (v ? 3 : 2); ++k)
          value[k] = filters.with(filters.value, k, f), steep[k] = filters.with(filters.slope, k, f);
        back(p->i, p->j, false, f, value, steep);
        back(p->j, p->i, true, f, value, steep);
      }
      slopes[0] += total(along);
      for (int x = 0; x < 3; ++x) slopes[x + 1] += total(turn[x]);
    }
  }

  // s += a + b <L, R>, v += c R; keeps |L| and <L, R>.
  void mix(Layer& layer, std::vector<T>& s, std::vector<T>& v, int64_t rows, std::vector<T>& hidden, int64_t l) const {
    const int64_t n = w.n;
    layer.mixed.resize(rows * 6 * n), layer.joined.resize(rows * 2 * n), layer.dot.resize(rows * n);
    layer.mix.resize(rows * 3 * n), layer.mix_slope.resize(rows * n);
    product(v.data(), w.vectors + l * 2 * n * n, layer.mixed.data(), 3 * rows, 2 * n, n, nullptr, false);
    each_row(rows, [&](int64_t r) {
      for (int64_t f = 0; f < n; f += WIDTH) {
        Vec square{T(SMALL)}, dot{T(0)};
        for (int x = 0; x < 3; ++x) {
          const T* at = &layer.mixed[(3 * r + x) * 2 * n + f];
          const Vec left = Vec::loadu(at);
          square = fmadd(left, left, square), dot = fmadd(left, Vec::loadu(at + n), dot);
        }
        Vec::loadu(&s[r * n + f]).store(&layer.joined[r * 2 * n + f]);
        square.sqrt().store(&layer.joined[r * 2 * n + n + f]);
        dot.store(&layer.dot[r * n + f]);
      }
    });
    product(layer.joined.data(), w.in + l * 2 * n * n, layer.mix_slope.data(), rows, n, 2 * n, nullptr, false);
    silu(layer.mix_slope.data(), w.in_bias + l * n, hidden.data(), rows, n);
    product(hidden.data(), w.out + l * 3 * n * n, layer.mix.data(), rows, 3 * n, n, w.out_bias + l * 3 * n, false);
    each_row(rows, [&](int64_t r) {
      for (int64_t f = 0; f < n; f += WIDTH) {
        const T* m = &layer.mix[r * 3 * n + f];
        T* to = &s[r * n + f];
        fmadd(Vec::loadu(m + 2 * n), Vec::loadu(&layer.dot[r * n + f]), Vec::loadu(to) + Vec::loadu(m)).store(to);
        for (int x = 0; x < 3; ++x) {
          T* along = &v[(3 * r + x) * n + f];
          fmadd(Vec::loadu(m + n), Vec::loadu(&layer.mixed[(3 * r + x) * 2 * n + n + f]), Vec::loadu(along)).store(along);
        }
      }
    });
  }

  // The transpose of `mix`, in place: ds (rows, N) and dv (rows, 3, N).
  void mix_back(Layer& layer, std::vector<T>& ds, std::vector<T>& dv, int64_t rows, std::vector<T>& hidden, int64_t l) const {
    const int64_t n = w.n;
    std::vector<T> of_mix(rows * 3 * n), of_joined(rows * 2 * n);
    each_row(rows, [&](int64_t r) {
      for (int64_t f = 0; f < n; f += WIDTH) {
        const Vec g = Vec::loadu(&ds[r * n + f]);
        Vec of_c(T(0));
        for (int x = 0; x < 3; ++x)
          of_c = fmadd(Vec::loadu(&dv[(3 * r + x) * n + f]), Vec::loadu(&layer.mixed[(3 * r + x) * 2 * n + n + f]), of_c);
        T* to = &of_mix[r * 3 * n + f];
        g.store(to), of_c.store(to + n), (g * Vec::loadu(&layer.dot[r * n + f])).store(to + 2 * n);
      }
    });
    product(of_mix.data(), w.out_back + l * 3 * n * n, hidden.data(), rows, n, 3 * n, nullptr, false);
    multiply(hidden.data(), layer.mix_slope.data(), rows * n);
    product(hidden.data(), w.in_back + l * 2 * n * n, of_joined.data(), rows, 2 * n, n, nullptr, false);
    each_row(rows, [&](int64_t r) {
      for (int64_t f = 0; f < n; f += WIDTH) {
        const T *m = &layer.mix[r * 3 * n + f], *joined = &of_joined[r * 2 * n + f];
        T* g = &ds[r * n + f];
        const Vec c = Vec::loadu(m + n), by_dot = Vec::loadu(g) * Vec::loadu(m + 2 * n);
        const Vec by_norm = Vec::loadu(joined + n) / Vec::loadu(&layer.joined[r * 2 * n + n + f]);
        for (int x = 0; x < 3; ++x) {
          T* at = &layer.mixed[(3 * r + x) * 2 * n + f];
          const Vec left = Vec::loadu(at), right = Vec::loadu(at + n);
          fmadd(by_dot, right, by_norm * left).store(at);
          fmadd(by_dot, left, c * Vec::loadu(&dv[(3 * r + x) * n + f])).store(at + n);
        }
        (Vec::loadu(g) + Vec::loadu(joined)).store(g);
      }
    });
    product(layer.mixed.data(), w.vectors_back + l * 2 * n * n, dv.data(), 3 * rows, n, 2 * n, nullptr, true);
  }

  void run(const Block& b) const {
    const int64_t n = w.n, h = w.h, rows = b.atoms, size = w.interactions;
    const std::vector<Pair> all = pairs(b, w.knots, w.cutoff);
    std::vector<T> s(rows * n), v(rows * 3 * n), hidden(rows * std::max(n, h)), read(rows * h), sums(rows * 4 * n);
    std::vector<Layer> layers(size);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(w.embedding + species[b.atom + r] * n, n, &s[r * n]);
    for (int64_t l = 0; l < size; ++l) {
      Layer& layer = layers[l];
      const T* table = w.tables + l * w.knots * 6 * n;
      layer.context.resize(rows * 3 * n), layer.context_slope.resize(l ? rows * n : 0);
      if (l) {
        product(s.data(), w.one + l * n * n, layer.context_slope.data(), rows, n, n, nullptr, false);
        silu(layer.context_slope.data(), w.one_bias + l * n, hidden.data(), rows, n);
        product(hidden.data(), w.two + l * 3 * n * n, layer.context.data(), rows, 3 * n, n, w.two_bias + l * 3 * n, false);
        layer.v = v;
      } else {
        for (int64_t r = 0; r < rows; ++r)
          std::copy_n(w.first + species[b.atom + r] * 3 * n, 3 * n, &layer.context[r * 3 * n]);
      }
      shared(rows, 4 * n, all.size(), sums, [&](int64_t from, int64_t to, T* into) {
        send(&all[from], &all[to], table, layer.context.data(), l ? layer.v.data() : nullptr, into);
      });
      each_row(rows, [&](int64_t r) {
        add(&s[r * n], &sums[r * 4 * n], n);
        add(&v[r * 3 * n], &sums[r * 4 * n + n], 3 * n);
      });
      mix(layer, s, v, rows, hidden, l);
    }
    product(s.data(), w.half, hidden.data(), rows, h, n, nullptr, false);
    silu(hidden.data(), w.half_bias, read.data(), rows, h);
    for (int64_t r = 0; r < rows; ++r) {
      if (b.atom + r >= counted) {  // an atom of the surroundings
        std::fill_n(&hidden[r * h], h, T(0));
        continue;
      }
      double sum = w.last_bias;
      for (int64_t c = 0; c < h; ++c) sum += double(read[r * h + c]) * w.last[c], hidden[r * h + c] *= w.last[c];
      energies[b.atom + r] = sum;
    }
    std::vector<double> slopes(4 * all.size());
    std::vector<T>&ds = s, &dv = v;
    product(hidden.data(), w.half_back, ds.data(), rows, n, h, nullptr, false);
    std::fill(dv.begin(), dv.end(), T(0));
    sums.resize(rows * 6 * n);
    std::vector<T> of_context(size > 1 ? rows * 3 * n : 0);
    for (int64_t l = size - 1; l >= 0; --l) {
      Layer& layer = layers[l];
      const T* table = w.tables + l * w.knots * 6 * n;
      mix_back(layer, ds, dv, rows, hidden, l);
      shared(rows, 6 * n, all.size(), sums, [&](int64_t from, int64_t to, T* into) {
        send_back(&all[from], &all[to], table, layer.context.data(), l ? layer.v.data() : nullptr, ds.data(), dv.data(),
                  into, &slopes[4 * from]);
      });
      if (!l) break;
      each_row(rows, [&](int64_t r) {
        std::copy_n(&sums[r * 6 * n], 3 * n, &of_context[r * 3 * n]);
        add(&dv[r * 3 * n], &sums[r * 6 * n + 3 * n], 3 * n);
      });
      product(of_context.data(), w.two_back + l * 3 * n * n, hidden.data(), rows, n, 3 * n, nullptr, false);
      multiply(hidden.data(), layer.context_slope.data(), rows * n);
      product(hidden.data(), w.one_back + l * n * n, ds.data(), rows, n, n, nullptr, true);
    }
    for (size_t k = 0; k < all.size(); ++k) collect(all[k], &slopes[4 * k], b.atom);
  }

  // Forces and virial of a pair from dE/dd and dE/du: u turns by (1 - u u) / d.
  void collect(const Pair& p, const double* slope, int64_t atom) const {
    double across = 0, *tensor = virials ? virials + 9 * molecule[atom + p.i] : nullptr;
    for (int c = 0; c < 3; ++c) across += slope[c + 1] * p.unit[c];
    const double inverse = p.length > 0 ? 1 / p.length : 0;
    for (int c = 0; c < 3; ++c) {
      const double g = slope[0] * p.unit[c] + (slope[c + 1] - across * p.unit[c]) * inverse;
      forces[3 * (atom + p.i) + c] += g, forces[3 * (atom + p.j) + c] -= g;
      for (int d = 0; tensor && d < 3; ++d) tensor[3 * d + c] -= p.unit[d] * p.length * g;
    }
  }

  static void add(T* to, const T* from, int64_t count) {
    for (int64_t c = 0; c < count; c += WIDTH) (Vec::loadu(to + c) + Vec::loadu(from + c)).store(to + c);
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> tabulated(
    const at::Tensor& positions, const at::Tensor& species, const at::Tensor& molecule, const at::Tensor& i,
    const at::Tensor& j, const std::optional<at::Tensor>& offsets, int64_t count, at::TensorList weights,
    double last_bias, double cutoff, bool half, bool virial, int64_t counted) {
  const int64_t atoms = positions.size(0), edges = i.size(0);
  const at::Tensor &embedding = weights[0], &tables = weights[2], &last = weights[20];
  const auto at = [&](int64_t k) { return weights[k].const_data_ptr<T>(); };
  const Weights w{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12), at(13),
                  at(14), at(15), at(16), at(17), at(18), at(19), at(20), T(last_bias), tables.size(0), tables.size(1),
                  embedding.size(1), last.size(0), cutoff};
  const at::Tensor energies = at::zeros({atoms}, positions.options());
  const at::Tensor forces = at::zeros({atoms, 3}, positions.options());
  const at::Tensor virials = at::zeros({virial ? count : 0, 3, 3}, positions.options());
  const Problem problem{{positions.const_data_ptr<double>(), offsets ? offsets->const_data_ptr<double>() : nullptr,
                         species.const_data_ptr<int64_t>(), molecule.const_data_ptr<int64_t>(),
                         i.const_data_ptr<int64_t>(), j.const_data_ptr<int64_t>(), half},
                        w, energies.data_ptr<double>(), forces.data_ptr<double>(),
                        virial ? virials.data_ptr<double>() : nullptr, counted};
  each_block(problem.blocks(atoms, edges, BLOCK), [&](const Block& b) { problem.run(b); });
  return {energies, forces, virials};
}

TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def(NAMED("painn_tabulated", REAL)
              "(Tensor positions, Tensor species, Tensor molecule, Tensor i, Tensor j, Tensor? offsets, int count, "
              "Tensor[] weights, float last_bias, float cutoff, bool half, bool virial, int counted) "
              "-> (Tensor, Tensor, Tensor)",
              tabulated);
}

}  // namespace painn
}  // namespace
