// Energies and forces of pairs in one pass over the rows of neighbor lists: Lennard-Jones u = a x^2 - b x, x = r^-6, and
// Coulomb k q q f(r), each within its cutoff. Forces on ghosts are added to those of their atoms at the end, and the
// virial is the sum of x (x) F over packed atoms, ghosts too.

namespace {

struct Pairwise {  // as in terms/nonbonded.py
  int64_t types, lj, coulomb;  // modes below
  double lj_cutoff, coulomb_cutoff, start, quadratic, constant, alpha, factor;
  const double *a, *b, *shift, *slope;  // (T, T)
  const int64_t* inert;                 // (T), types without Lennard-Jones interactions
  const int64_t* type;                  // (N)
  const double* charge;                 // (N)
};

constexpr int64_t PAIRS_PER_THREAD = 40000;  // fewer are faster on one thread

enum { NONE, CUT, FORCE_SHIFT, SWITCH };  // u - shift; u - shift - (r - rc) slope; u S(r)
enum { POLYNOMIAL = 1, EWALD };           // 1/r + quadratic r^2 - constant; erfc(alpha r) / r

struct Sums {
  V lj, coulomb;
};

// Pairs of atom i: forces f (packed, 4) and energies are added to. types: of packed atoms.
template <int LJ, int COULOMB, bool ONE>
inline void row(const Pairwise& p, const List& list, const int32_t* types, int64_t i, double* f, Sums& energies) {
  const V lj_cut2 = splat(p.lj_cutoff * p.lj_cutoff), coulomb_cut2 = splat(p.coulomb_cutoff * p.coulomb_cutoff);
  V a = splat(0), b = a, shift = a, slope = a;
  if constexpr (ONE && LJ != NONE) a = splat(p.a[0]), b = splat(p.b[0]), shift = splat(p.shift[0]), slope = splat(p.slope[0]);
  const double* own = list.x.data + 4 * i;
  const V x = splat(own[0]), y = splat(own[1]), z = splat(own[2]), q = splat(own[3] * p.factor);
  V fx = splat(0), fy = fx, fz = fx;
  const int64_t line = ONE || LJ == NONE ? 0 : types[i] * p.types;
  const int32_t* j = list.row.data + list.first[i];
  for (const int32_t* end = list.row.data + list.first[i + 1]; j < end; j += LANES) {
    const Four other = load_rows(list.x.data, j);
    const V dx = other.x - x, dy = other.y - y, dz = other.z - z;
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
        alignas(32) int32_t of[LANES];
        look_up(types, j, of);
        a = gather(p.a + line, of), b = gather(p.b + line, of);
        if constexpr (LJ != SWITCH) shift = gather(p.shift + line, of);
        if constexpr (LJ == FORCE_SHIFT) slope = gather(p.slope + line, of);
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
      energies.lj += where(near, u);
      g += where(near, du);
    }
    if constexpr (COULOMB != NONE) {
      const Mask near = r2 < coulomb_cut2;
      const V qq = q * other.w;
      if constexpr (COULOMB == POLYNOMIAL) {
        energies.coulomb += where(near, qq * (fma(splat(p.quadratic), r2, inverse) - p.constant));
        g += where(near, qq * fma(-inverse2, inverse, splat(2 * p.quadratic)));
      } else {
        const V w = r * p.alpha, w2 = w * w;
        const Mask finite = near & (w < splat(6.5));  // erfc(6.5) = 4e-20
        const V decay = exponential(-where(finite, w2));
        const V u = qq * decay * scaled_erfc(where(finite, w)) * inverse;
        energies.coulomb += where(finite, u);
        g -= where(finite, fma(qq * decay, splat(2 * p.alpha / std::sqrt(M_PI)), u) * inverse2);
      }
    }
    const V gx = g * dx, gy = g * dy, gz = g * dz;
    fx += gx, fy += gy, fz += gz;
    subtract_from_rows(f, j, gx, gy, gz);
  }
  f[4 * i] += sum(fx), f[4 * i + 1] += sum(fy), f[4 * i + 2] += sum(fz);
}

template <int LJ, int COULOMB, bool ONE>
void rows(const Pairwise& p, const List& list, const int32_t* types, int64_t from, int64_t to, double* f, double* energies) {
  Sums sums = {splat(0), splat(0)};
  for (int64_t i = from; i < to; ++i) {
    if (LJ == NONE || ONE || !p.inert[types[i]])
      row<LJ, COULOMB, ONE>(p, list, types, i, f, sums);
    else if constexpr (COULOMB != NONE)
      row<NONE, COULOMB, true>(p, list, types, i, f, sums);
  }
  energies[0] += sum(sums.lj), energies[1] += sum(sums.coulomb);
}

using Rows = void (*)(const Pairwise&, const List&, const int32_t*, int64_t, int64_t, double*, double*);

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

void pack(const Pairwise& p, List& list, std::vector<int32_t>& types) {
  const int64_t n = list.packed();
  if (p.lj && p.types > 1) {
    types.resize(n + 1);
    for (int64_t k = 0; k < n; ++k) types[k] = int32_t(p.type[list.origin[k]]);
    types[n] = 0;
  }
  for (int64_t k = 0; p.coulomb && k < n; ++k) list.x[4 * k + 3] = p.charge[list.origin[k]];
}

// Pairs of one replica; energies[0] of Lennard-Jones, [1] of Coulomb.
void pairs_of(const Pairwise& p, Rows rows, List& list, const double* positions, const double* cell, double* forces, double* energies,
              double* virial, int threads) {
  static thread_local std::vector<int32_t> types;
  static thread_local std::vector<Aligned<double>> others;  // forces of threads beside the first
  const int64_t n = list.packed(), atoms = list.atoms, length = list.first[atoms];
  place(list, positions, cell);
  pack(p, list, types);
  double* f = list.f.data;
  std::fill_n(f, 4 * n + 4, 0.0);
  threads = int(std::clamp<int64_t>(length / PAIRS_PER_THREAD, 1, threads));
  if (threads == 1) {
    rows(p, list, types.data(), 0, atoms, f, energies);
  } else {
    others.resize(threads - 1);
    for (auto& x : others) x.resize(4 * n + 4);
    std::vector<double> sums(8 * threads, 0.0);
    const int32_t* shared = types.data();
    auto* own = others.data();
#pragma omp parallel num_threads(threads)
    {
      const int t = omp_get_thread_num();
      double* mine = t ? own[t - 1].data : f;
      if (t) std::fill_n(mine, 4 * n + 4, 0.0);
      const auto row = [&](int64_t x) {  // rows that hold equal numbers of pairs
        return std::lower_bound(list.first.begin(), list.first.end() - 1, length * x / threads) - list.first.begin();
      };
      rows(p, list, shared, t ? row(t) : 0, t + 1 < threads ? row(t + 1) : atoms, mine, &sums[8 * t]);
    }
    for (int t = 0; t < threads; ++t) energies[0] += sums[8 * t], energies[1] += sums[8 * t + 1];
    for (int t = 1; t < threads; ++t)
      for (int64_t k = 0; k < 4 * n; ++k) f[k] += own[t - 1][k];
  }
  for (int64_t k = 0; k < n; ++k)
    for (int d = 0; d < 3; ++d) forces[3 * int64_t(list.origin[k]) + d] += f[4 * k + d];
  for (int64_t k = 0; virial && k < n; ++k)
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) virial[3 * a + b] += list.x[4 * k + a] * f[4 * k + b];
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
  int64_t pairs = 0;
  for (const List& list : all->lists) pairs += list.pairs;
  if (R > 1 && threads > 1 && pairs > 2 * PAIRS_PER_THREAD) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t r = 0; r < R; ++r) one(r, 1);
  } else {
    for (int64_t r = 0; r < R; ++r) one(r, int(threads));
  }
}
