// Particle mesh Ewald: charges to the grid by B-splines of order P, and forces from the grid's potential.

namespace {

// M_P(w + j) and its derivative, j = 0 .. P - 1, of the cardinal B-spline (Essmann et al. 1995, equation 4.1).
template <int P>
void spline(double w, double* m, double* slope) {
  m[0] = w, m[1] = 1 - w;  // M_2(w), M_2(w + 1)
  for (int n = 3; n <= P; ++n) {
    if (n == P) {
      slope[0] = m[0];
      for (int j = 1; j < P - 1; ++j) slope[j] = m[j] - m[j - 1];
      slope[P - 1] = -m[P - 2];
    }
    const double f = 1.0 / (n - 1);
    m[n - 1] = f * (1 - w) * m[n - 2];
    for (int j = n - 2; j > 0; --j) m[j] = f * ((w + j) * m[j] + (n - w - j) * m[j - 1]);
    m[0] = f * w * m[0];
  }
}

template <int P>
struct Place {  // where an atom is on the grid
  double m[3][P], slope[3][P];
  int64_t at[3][P];

  Place(const double* x, const double* inverse, const int64_t* grid) {
    for (int k = 0; k < 3; ++k) {
      double s = x[0] * inverse[k] + x[1] * inverse[3 + k] + x[2] * inverse[6 + k];
      s = (s - std::floor(s)) * grid[k];
      int64_t base = int64_t(s);
      spline<P>(s - base, m[k], slope[k]);
      for (int j = 0; j < P; ++j) {
        int64_t n = (base - j) % grid[k];
        at[k][j] = n < 0 ? n + grid[k] : n;
      }
    }
  }
};

template <int P>
void spread(int64_t atoms, const double* x, const double* inverse, const double* charge, const int64_t* grid, double* out) {
  std::fill_n(out, grid[0] * grid[1] * grid[2], 0.0);
  for (int64_t i = 0; i < atoms; ++i) {
    if (charge[i] == 0) continue;
    const Place<P> p(x + 3 * i, inverse, grid);
    for (int a = 0; a < P; ++a)
      for (int b = 0; b < P; ++b) {
        const double q = charge[i] * p.m[0][a] * p.m[1][b];
        double* line = out + (p.at[0][a] * grid[1] + p.at[1][b]) * grid[2];
        for (int c = 0; c < P; ++c) line[p.at[2][c]] += q * p.m[2][c];
      }
  }
}

template <int P>
void collect(int64_t atoms, const double* x, const double* inverse, const double* charge, const int64_t* grid, const double* potential,
             double* forces, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < atoms; ++i) {
    if (charge[i] == 0) continue;
    const Place<P> p(x + 3 * i, inverse, grid);
    double g[3] = {0, 0, 0};
    for (int a = 0; a < P; ++a)
      for (int b = 0; b < P; ++b) {
        const double* line = potential + (p.at[0][a] * grid[1] + p.at[1][b]) * grid[2];
        double v = 0, d = 0;
        for (int c = 0; c < P; ++c) v += line[p.at[2][c]] * p.m[2][c], d += line[p.at[2][c]] * p.slope[2][c];
        g[0] += p.slope[0][a] * p.m[1][b] * v, g[1] += p.m[0][a] * p.slope[1][b] * v, g[2] += p.m[0][a] * p.m[1][b] * d;
      }
    for (int d = 0; d < 3; ++d)
      for (int k = 0; k < 3; ++k) forces[3 * i + d] -= charge[i] * grid[k] * g[k] * inverse[3 * d + k];
  }
}

template <class F>
void with_order(int64_t order, F f) {
  switch (order) {
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    case 8: return f(std::integral_constant<int, 8>());
  }
}

}  // namespace

// Charges on the grid `out` (R, K0, K1, K2). inverse (R, 3, 3): of the cell.
extern "C" void pme_spread(int64_t order, int64_t replicas, int64_t atoms, const double* positions, const double* inverse,
                           const double* charge, const int64_t* grid, double* out, int64_t threads) {
  with_order(order, [&](auto p) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && replicas > 1)
    for (int64_t r = 0; r < replicas; ++r)
      spread<p()>(atoms, positions + 3 * atoms * r, inverse + 9 * r, charge, grid, out + grid[0] * grid[1] * grid[2] * r);
  });
}

// Add to forces (R, N, 3) from the derivative of the energy with respect to what is on the grid.
extern "C" void pme_collect(int64_t order, int64_t replicas, int64_t atoms, const double* positions, const double* inverse,
                            const double* charge, const int64_t* grid, const double* potential, double* forces, int64_t threads) {
  with_order(order, [&](auto p) {
    for (int64_t r = 0; r < replicas; ++r)
      collect<p()>(atoms, positions + 3 * atoms * r, inverse + 9 * r, charge, grid, potential + grid[0] * grid[1] * grid[2] * r,
                   forces + 3 * atoms * r, int(threads));
  });
}
