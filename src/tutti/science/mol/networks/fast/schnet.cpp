// SchNet's energies and forces with tabulated filters (tables.py), and a backward pass by hand.
//
// A filter W(d) fc(d) is a cubic Hermite spline: at knots its values and slopes, for each interaction (knots, 2, M). So
// the gradient by a distance is one number per pair, and no product over pairs is left. Blocks of whole molecules are
// computed by one thread each, while their features stay in its cache; threads share a molecule that is large.
//
// Rows of features have N columns, messages M, the readout H, all padded with zeros to multiples of PANEL: ssp(0) = 0.

namespace {
namespace schnet {

constexpr int64_t BLOCK = 96;   // atoms that a block has at least, if there are more molecules

// pre += bias; out = ln(1 + e^pre) - ln 2. Then pre = 1 / (1 + e^-pre), the slope.
void shifted_softplus(T* pre, const T* bias, T* out, int64_t rows, int64_t n) {
  const Vec zero(T(0)), one(T(1)), ln2(T(0.6931471805599453));
  each_row(rows, [&](int64_t r) {
    for (int64_t c = 0; c < n; c += WIDTH) {
      T* p = pre + r * n + c;
      const Vec x = Vec::loadu(p) + Vec::loadu(bias + c);
      const Vec small = (zero - x.abs()).exp(), whole = one / (one + small);  // e^-|x|, 1 / (1 + e^-|x|)
      (at::vec::maximum(x, zero) + small.log1p() - ln2).store(out + r * n + c);
      Vec::blendv(whole, one - whole, x < zero).store(p);
    }
  });
}

struct Weights {
  const T* embedding;  // (species, N)
  const T* first;      // (species, M): the embedding after the first interaction's inward layer
  const T* tables;     // (interactions, knots, 2, M)
  // Layers of each interaction in panels (vectors.h): inward N -> M, one M -> N, two N -> N; and their transposes.
  const T *inward, *inward_back, *one, *one_bias, *one_back, *two, *two_bias, *two_back;
  const T *half, *half_bias, *half_back, *last;  // readout N -> H, (H)
  T last_bias;
  int64_t interactions, knots, n, m, h;
  double cutoff;
};

struct Problem : Graph {
  const Weights& w;
  double *energies, *forces, *virials;  // of atoms; (atoms, 3); (molecules, 3, 3)
  int64_t counted;  // atoms that have energies, the first ones

  // messages += W(d) o features of the other atom, for both atoms of some pairs.
  void send(const Pair* first, const Pair* last, const T* table, const T* y, T* messages) const {
    const int64_t m = w.m;
    for (const Pair* p = first; p < last; ++p) {
      const T* at = table + p->knot * 2 * m;
      const Vec a(p->value[0]), b(p->value[1]), c(p->value[2]), d(p->value[3]);
      const T *yi = y + p->i * m, *yj = y + p->j * m;
      T *mi = messages + p->i * m, *mj = messages + p->j * m;
      for (int64_t f = 0; f < m; f += WIDTH) {
        const Vec low = fmadd(b, Vec::loadu(at + m + f), a * Vec::loadu(at + f));
        const Vec filter = fmadd(d, Vec::loadu(at + 3 * m + f), fmadd(c, Vec::loadu(at + 2 * m + f), low));
        fmadd(filter, Vec::loadu(yj + f), Vec::loadu(mi + f)).store(mi + f);
        fmadd(filter, Vec::loadu(yi + f), Vec::loadu(mj + f)).store(mj + f);
      }
    }
  }

  // The transpose of `send`: from dE/d messages to dE/d features, if those are wanted, and dE/d distance.
  void send_back(const Pair* first, const Pair* last, const T* table, const T* y, const T* dm, T* dy,
                 double* slope) const {
    const int64_t m = w.m;
    for (const Pair* p = first; p < last; ++p, ++slope) {
      const T* at = table + p->knot * 2 * m;
      const Vec a(p->value[0]), b(p->value[1]), c(p->value[2]), d(p->value[3]);
      const Vec a1(p->slope[0]), b1(p->slope[1]), d1(p->slope[3]);
      const T *yi = y + p->i * m, *yj = y + p->j * m, *gi = dm + p->i * m, *gj = dm + p->j * m;
      Vec sum(T(0));
      for (int64_t f = 0; f < m; f += WIDTH) {
        const Vec t0 = Vec::loadu(at + f), t1 = Vec::loadu(at + m + f), t2 = Vec::loadu(at + 2 * m + f),
                  t3 = Vec::loadu(at + 3 * m + f), vi = Vec::loadu(gi + f), vj = Vec::loadu(gj + f);
        const Vec steep = fmadd(d1, t3, fmadd(b1, t1, a1 * (t0 - t2)));
        sum = fmadd(steep, fmadd(vi, Vec::loadu(yj + f), vj * Vec::loadu(yi + f)), sum);
        if (dy) {
          const Vec filter = fmadd(d, t3, fmadd(c, t2, fmadd(b, t1, a * t0)));
          T *di = dy + p->i * m + f, *dj = dy + p->j * m + f;
          fmadd(filter, vj, Vec::loadu(di)).store(di);
          fmadd(filter, vi, Vec::loadu(dj)).store(dj);
        }
      }
      *slope += total(sum);
    }
  }

  void run(const Block& b) const {
    const int64_t n = w.n, m = w.m, h = w.h, rows = b.atoms, size = w.interactions;
    const std::vector<Pair> all = pairs(b, w.knots, w.cutoff);
    std::vector<T> x(rows * n), sent(rows * m), wide(rows * n), hidden(rows * std::max(n, h)), out(rows * h);
    std::vector<T> y(size * rows * m), bends(size * rows * n);  // of each interaction; slopes of the softplus
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t kind = species[b.atom + r];
      std::copy_n(w.embedding + kind * n, n, &x[r * n]);
      std::copy_n(w.first + kind * m, m, &y[r * m]);
    }
    for (int64_t l = 0; l < size; ++l) {
      T *features = &y[l * rows * m], *bend = &bends[l * rows * n];
      const T* table = w.tables + l * w.knots * 2 * m;
      if (l) product(x.data(), w.inward + l * m * n, features, rows, m, n, nullptr, false);
      shared(rows, m, all.size(), sent, [&](int64_t from, int64_t to, T* messages) {
        send(&all[from], &all[to], table, features, messages);
      });
      product(sent.data(), w.one + l * n * m, bend, rows, n, m, nullptr, false);
      shifted_softplus(bend, w.one_bias + l * n, hidden.data(), rows, n);
      product(hidden.data(), w.two + l * n * n, x.data(), rows, n, n, w.two_bias + l * n, true);
    }
    product(x.data(), w.half, hidden.data(), rows, h, n, nullptr, false);
    shifted_softplus(hidden.data(), w.half_bias, out.data(), rows, h);
    for (int64_t r = 0; r < rows; ++r) {
      if (b.atom + r >= counted) {  // an atom of the surroundings
        std::fill_n(&hidden[r * h], h, T(0));
        continue;
      }
      double sum = w.last_bias;
      for (int64_t c = 0; c < h; ++c) sum += double(out[r * h + c]) * w.last[c], hidden[r * h + c] *= w.last[c];
      energies[b.atom + r] = sum;
    }
    std::vector<double> slope(all.size());
    std::vector<T>& dx = x;  // dE/d x
    std::vector<T> back(rows * m);
    product(hidden.data(), w.half_back, dx.data(), rows, n, h, nullptr, false);
    for (int64_t l = size - 1; l >= 0; --l) {
      const T *features = &y[l * rows * m], *table = w.tables + l * w.knots * 2 * m;
      product(dx.data(), w.two_back + l * n * n, wide.data(), rows, n, n, nullptr, false);
      multiply(wide.data(), &bends[l * rows * n], rows * n);
      product(wide.data(), w.one_back + l * n * m, sent.data(), rows, m, n, nullptr, false);
      shared(rows, m, all.size(), back, [&](int64_t from, int64_t to, T* dy) {
        send_back(&all[from], &all[to], table, features, sent.data(), l ? dy : nullptr, &slope[from]);
      });
      if (l) product(back.data(), w.inward_back + l * m * n, dx.data(), rows, n, m, nullptr, true);
    }
    for (size_t k = 0; k < all.size(); ++k) {
      const Pair& p = all[k];
      double* tensor = virials ? virials + 9 * molecule[b.atom + p.i] : nullptr;
      for (int c = 0; c < 3; ++c) {
        const double g = slope[k] * p.unit[c];
        forces[3 * (b.atom + p.i) + c] += g, forces[3 * (b.atom + p.j) + c] -= g;
        for (int d = 0; tensor && d < 3; ++d) tensor[3 * d + c] -= p.unit[d] * p.length * g;
      }
    }
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> tabulated(
    const at::Tensor& positions, const at::Tensor& species, const at::Tensor& molecule, const at::Tensor& i,
    const at::Tensor& j, const std::optional<at::Tensor>& offsets, int64_t count, at::TensorList weights,
    double last_bias, double cutoff, bool half, bool virial, int64_t counted) {
  const int64_t atoms = positions.size(0), edges = i.size(0);
  const at::Tensor &embedding = weights[0], &first = weights[1], &tables = weights[2], &last = weights[14];
  const auto at = [&](int64_t k) { return weights[k].const_data_ptr<T>(); };
  const Weights w{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12), at(13),
                  at(14), T(last_bias), tables.size(0), tables.size(1), embedding.size(1), first.size(1), last.size(0),
                  cutoff};
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
  library.def(NAMED("schnet_tabulated", REAL)
              "(Tensor positions, Tensor species, Tensor molecule, Tensor i, Tensor j, Tensor? offsets, int count, "
              "Tensor[] weights, float last_bias, float cutoff, bool half, bool virial, int counted) "
              "-> (Tensor, Tensor, Tensor)",
              tabulated);
}

}  // namespace schnet
}  // namespace
