// Energies and forces of pairs in one pass over the rows of neighbor lists: Lennard-Jones u = a x^2 - b x, x = r^-6, and
// Coulomb k q q f(r), each within its cutoff. Forces on ghosts are added to those of their atoms at the end, and the
// virial is the sum of x (x) F over packed atoms, ghosts too.

namespace {

struct Pairwise {  // as in terms/nonbonded.py
  int64_t types, lj, coulomb;  // modes below
  double lj_cutoff, coulomb_cutoff, start, quadratic, constant, alpha, factor;
  const double *a, *b, *shift, *slope;  // (T, T)
  const int64_t* type;                  // (N)
  const double* charge;                 // (N)
};

enum { NONE, CUT, FORCE_SHIFT, SWITCH };  // u - shift; u - shift - (r - rc) slope; u S(r)
enum { POLYNOMIAL = 1, EWALD };           // 1/r + quadratic r^2 - constant; erfc(alpha r) / r

struct Packed {  // what a list's atoms are, in its order
  std::vector<int32_t> type;
  Aligned<double> charge;
};

template <int LJ, int COULOMB, bool ONE>
void rows(const Pairwise& p, const List& list, const Packed& packed, int64_t from, int64_t to, double* const* f, double* energies) {
  const double *X = list.x[0].data, *Y = list.x[1].data, *Z = list.x[2].data;
  const V lj_cut2 = splat(p.lj_cutoff * p.lj_cutoff), coulomb_cut2 = splat(p.coulomb_cutoff * p.coulomb_cutoff);
  V lj_energy = splat(0), coulomb_energy = splat(0);
  V a = splat(0), b = a, shift = a, slope = a;
  if (ONE && LJ) a = splat(p.a[0]), b = splat(p.b[0]), shift = splat(p.shift[0]), slope = splat(p.slope[0]);
  for (int64_t i = from; i < to; ++i) {
    const V x = splat(X[i]), y = splat(Y[i]), z = splat(Z[i]);
    V fx = splat(0), fy = fx, fz = fx, q = fx;
    if constexpr (COULOMB != NONE) q = splat(packed.charge[i] * p.factor);
    const int64_t line = ONE ? 0 : packed.type[i] * p.types;
    const int32_t* j = list.row.data + list.first[i];
    for (const int32_t* end = list.row.data + list.first[i + 1]; j < end; j += LANES) {
      const V dx = gather(X, j) - x, dy = gather(Y, j) - y, dz = gather(Z, j) - z;
      const V r2 = fma(dz, dz, fma(dy, dy, dx * dx));
      V inverse2, inverse, r, g = splat(0);  // g: slope of the energy over r
      if constexpr (LJ >= FORCE_SHIFT || COULOMB != NONE) {
        inverse = reciprocal_root(r2), inverse2 = inverse * inverse, r = r2 * inverse;
      } else {
        inverse2 = reciprocal(r2);
      }
      if constexpr (LJ != NONE) {
        const Mask near = r2 < lj_cut2;
        if constexpr (!ONE) {
          alignas(32) int32_t types[LANES];
          for (int k = 0; k < LANES; ++k) types[k] = packed.type[j[k]];
          a = gather(p.a + line, types), b = gather(p.b + line, types);
          if constexpr (LJ != SWITCH) shift = gather(p.shift + line, types);
          if constexpr (LJ == FORCE_SHIFT) slope = gather(p.slope + line, types);
        }
        const V x6 = inverse2 * inverse2 * inverse2, bx = b * x6, ax = a * x6 * x6;
        V u = ax - bx, du = fma(bx, splat(6), -12 * ax) * inverse2;
        if constexpr (LJ == CUT) u -= shift;
        if constexpr (LJ == FORCE_SHIFT) {
          u -= fma(r - p.lj_cutoff, slope, shift);
          du -= slope * inverse;
        }
        if constexpr (LJ == SWITCH) {
          const double width = 1 / (p.lj_cutoff - p.start);
          V t = (r - p.start) * width;
          t = where(t > splat(0), t);
          const V s = 1 - t * t * t * fma(t, fma(t, splat(6), splat(-15)), splat(10));
          const V ds = -30 * width * t * t * (1 - t) * (1 - t);
          du = fma(u * ds, inverse, du * s);
          u *= s;
        }
        lj_energy += where(near, u);
        g += where(near, du);
      }
      if constexpr (COULOMB != NONE) {
        const Mask near = r2 < coulomb_cut2;
        const V qq = q * gather(packed.charge.data, j);
        if constexpr (COULOMB == POLYNOMIAL) {
          coulomb_energy += where(near, qq * (fma(splat(p.quadratic), r2, inverse) - p.constant));
          g += where(near, qq * fma(-inverse2, inverse, splat(2 * p.quadratic)));
        } else {
          const V w = r * p.alpha, w2 = w * w;
          const Mask finite = near & (w < splat(6.5));  // erfc(6.5) = 4e-20
          const V decay = exponential(-where(finite, w2));
          const V u = qq * decay * scaled_erfc(where(finite, w)) * inverse;
          coulomb_energy += where(finite, u);
          g -= where(finite, fma(qq * decay, splat(2 * p.alpha / std::sqrt(M_PI)), u) * inverse2);
        }
      }
      const V gx = g * dx, gy = g * dy, gz = g * dz;
      fx += gx, fy += gy, fz += gz;
      scatter_subtract(f[0], j, gx), scatter_subtract(f[1], j, gy), scatter_subtract(f[2], j, gz);
    }
    f[0][i] += sum(fx), f[1][i] += sum(fy), f[2][i] += sum(fz);
  }
  energies[0] += sum(lj_energy), energies[1] += sum(coulomb_energy);
}

using Rows = void (*)(const Pairwise&, const List&, const Packed&, int64_t, int64_t, double* const*, double*);

template <int LJ, int COULOMB>
Rows choose(bool one) { return one || LJ == NONE ? rows<LJ, COULOMB, true> : rows<LJ, COULOMB, false>; }

template <int LJ>
Rows choose(int64_t coulomb, bool one) {
  return coulomb == EWALD ? choose<LJ, EWALD>(one) : coulomb ? choose<LJ, POLYNOMIAL>(one) : choose<LJ, NONE>(one);
}

Rows choose(const Pairwise& p) {
  const bool one = p.types == 1;
  return p.lj == CUT ? choose<CUT>(p.coulomb, one) : p.lj == FORCE_SHIFT ? choose<FORCE_SHIFT>(p.coulomb, one)
       : p.lj == SWITCH ? choose<SWITCH>(p.coulomb, one) : choose<NONE>(p.coulomb, one);
}

void pack(const Pairwise& p, const List& list, Packed& packed) {
  const int64_t n = list.packed();
  if (p.lj && p.types > 1) {
    packed.type.resize(n + 1);
    for (int64_t k = 0; k < n; ++k) packed.type[k] = int32_t(p.type[list.origin[k]]);
    packed.type[n] = 0;
  }
  if (p.coulomb) {
    packed.charge.resize(n + 1);
    for (int64_t k = 0; k < n; ++k) packed.charge[k] = p.charge[list.origin[k]];
    packed.charge[n] = 0;
  }
}

// Pairs of one replica; energies[0] of Lennard-Jones, [1] of Coulomb.
void pairs_of(const Pairwise& p, Rows rows, List& list, const double* positions, const double* cell, double* forces, double* energies,
              double* virial, int threads) {
  static thread_local Packed packed;
  static thread_local std::vector<Aligned<double>> others;  // forces of threads beside the first
  const int64_t n = list.packed(), atoms = list.atoms;
  place(list, positions, cell);
  pack(p, list, packed);
  for (int d = 0; d < 3; ++d) std::fill_n(list.f[d].data, n + 1, 0.0);
  if (threads == 1) {
    double* f[3] = {list.f[0].data, list.f[1].data, list.f[2].data};
    rows(p, list, packed, 0, atoms, f, energies);
  } else {
    others.resize(3 * (threads - 1));
    for (auto& x : others) x.resize(n + 1);
    std::vector<double> sums(8 * threads, 0.0);
    const Packed& shared = packed;
    auto* own = others.data();
#pragma omp parallel num_threads(threads)
    {
      const int t = omp_get_thread_num();
      double* f[3];
      for (int d = 0; d < 3; ++d) {
        f[d] = t ? own[3 * (t - 1) + d].data : list.f[d].data;
        if (t) std::fill_n(f[d], n + 1, 0.0);
      }
      const int64_t length = list.first[atoms];  // rows that hold equal numbers of pairs
      const auto row = [&](int64_t x) { return std::lower_bound(list.first.begin(), list.first.end() - 1, length * x / threads) - list.first.begin(); };
      rows(p, list, shared, t ? row(t) : 0, t + 1 < threads ? row(t + 1) : atoms, f, &sums[8 * t]);
    }
    for (int t = 0; t < threads; ++t) energies[0] += sums[8 * t], energies[1] += sums[8 * t + 1];
    for (int d = 0; d < 3; ++d)
      for (int t = 1; t < threads; ++t)
        for (int64_t k = 0; k < n; ++k) list.f[d][k] += own[3 * (t - 1) + d][k];
  }
  for (int64_t k = 0; k < n; ++k)
    for (int d = 0; d < 3; ++d) forces[3 * int64_t(list.origin[k]) + d] += list.f[d][k];
  for (int a = 0; virial && a < 3; ++a)
    for (int b = 0; b < 3; ++b)
      for (int64_t k = 0; k < n; ++k) virial[3 * a + b] += list.x[a][k] * list.f[b][k];
}

}  // namespace

// Add to forces (R, N, 3), energies (2, R) of Lennard-Jones and Coulomb, and virial (R, 3, 3) if there is one.
extern "C" void pairwise_add(const Pairwise* p, Neighbors* all, const double* positions, const double* cell, double* forces,
                             double* energies, double* virial, int64_t threads) {
  const int64_t R = all->replicas, N = all->atoms;
  const Rows rows = choose(*p);
  const auto one = [&](int64_t r, int threads) {
    double e[2] = {0, 0};
    pairs_of(*p, rows, all->lists[r], positions + 3 * N * r, cell ? cell + 9 * r : nullptr, forces + 3 * N * r, e, virial ? virial + 9 * r : nullptr, threads);
    energies[r] += e[0], energies[R + r] += e[1];
  };
  if (R > 1 && threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t r = 0; r < R; ++r) one(r, 1);
  } else {
    for (int64_t r = 0; r < R; ++r) one(r, int(threads));
  }
}
