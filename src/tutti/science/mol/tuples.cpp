// Terms of listed tuples of atoms: bonds, angles, torsions, pairs with parameters of their own.

namespace {

struct Tuples {  // as in terms/tuples.py
  int64_t kind, count;
  const int64_t* atoms;  // (count, size)
  const double* p[6];    // parameters (count) each
};

// In the order of KINDS in terms/tuples.py.
enum { BOND, ANGLE, TORSION, IMPROPER, RYCKAERT_BELLEMANS, SPECIAL_PAIR, ERF };

using Vector = std::array<double, 3>;
inline Vector cross(const Vector& a, const Vector& b) { return {a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]}; }
inline double dot(const Vector& a, const Vector& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }
inline Vector scaled(const Vector& a, double s) { return {a[0] * s, a[1] * s, a[2] * s}; }

struct Replica {
  const double* x;
  double *forces, *virial;
  Frame frame;
  double certain;  // a difference shorter than this, squared, is that of nearest images

  Replica(const double* x, const double* cell, int periodic, double* forces, double* virial)
      : x(x), forces(forces), virial(virial), frame(cell, periodic), certain(HUGE_VAL) {
    for (int k = 0; k < 3; ++k)
      if (frame.repeats[k]) certain = std::min(certain, frame.width[k] * frame.width[k] / 4);
  }

  Vector difference(int64_t i, int64_t j) const {  // from i to the nearest image of j
    Vector d = {x[3 * j] - x[3 * i], x[3 * j + 1] - x[3 * i + 1], x[3 * j + 2] - x[3 * i + 2]};
    if (dot(d, d) <= certain) return d;
    int64_t n[3];
    nearest(frame, x + 3 * i, x + 3 * j, n);
    for (int k = 0; k < 3; ++k)
      for (int e = 0; e < 3; ++e) d[e] += n[k] * frame.h[k][e];
    return d;
  }

  void push(int64_t i, const Vector& f, const Vector& from) const {  // from: where the atom is, seen from one of the tuple
    for (int d = 0; d < 3; ++d) forces[3 * i + d] += f[d];
    for (int a = 0; virial && a < 3; ++a)
      for (int b = 0; b < 3; ++b) virial[3 * a + b] += from[a] * f[b];
  }

  void pair(int64_t i, int64_t j, const Vector& d, double slope_over_r) const {
    push(j, scaled(d, -slope_over_r), d);
    push(i, scaled(d, slope_over_r), {0, 0, 0});
  }

  void torsion(const int64_t* atoms, const Vector* b, double slope) const {  // slope: dE / d phi
    const Vector m = cross(b[0], b[1]), n = cross(b[1], b[2]);
    const double m2 = dot(m, m), n2 = dot(n, n), b2 = dot(b[1], b[1]), length = std::sqrt(b2);
    if (m2 < 1e-20 * dot(b[0], b[0]) * b2 || n2 < 1e-20 * dot(b[2], b[2]) * b2) return;  // three in a line
    const Vector first = scaled(m, slope * length / m2), last = scaled(n, -slope * length / n2);
    const double s = dot(b[0], b[1]) / b2, t = dot(b[1], b[2]) / b2;
    Vector second, third;
    for (int d = 0; d < 3; ++d) {
      second[d] = -first[d] * (1 + s) + last[d] * t;
      third[d] = -(first[d] + second[d] + last[d]);
    }
    push(atoms[0], first, scaled(b[0], -1));
    push(atoms[1], second, {0, 0, 0});
    push(atoms[2], third, b[1]);
    push(atoms[3], last, {b[1][0] + b[2][0], b[1][1] + b[2][1], b[1][2] + b[2][2]});
  }
};

inline double turn(double x) { return x - 2 * M_PI * std::nearbyint(x / (2 * M_PI)); }

void add(const Tuples& t, const Replica& r, double* energies) {
  const double* const* p = t.p;
  double total = 0, other = 0;
  const int size = t.kind == ANGLE ? 3 : t.kind >= TORSION && t.kind <= RYCKAERT_BELLEMANS ? 4 : 2;
  for (int64_t k = 0; k < t.count; ++k) {
    const int64_t* atoms = t.atoms + size * k;
    if (size == 2) {
      const Vector d = r.difference(atoms[0], atoms[1]);
      const double r2 = dot(d, d);
      if (t.kind == ERF) {  // -qq erf(a r) / r
        const double qq = p[0][k], a = p[1][k], x2 = a * a * r2, edge = 2 * a / std::sqrt(M_PI);
        if (x2 < 1e-8) {
          total -= qq * edge * (1 - x2 / 3);
          r.pair(atoms[0], atoms[1], d, qq * edge * a * a * 2 / 3);
        } else {
          const double length = std::sqrt(r2), u = std::erf(a * length) / length;
          total -= qq * u;
          r.pair(atoms[0], atoms[1], d, qq * (u - edge * std::exp(-x2)) / r2);
        }
      } else if (t.kind == BOND) {
        const double length = std::sqrt(r2), x = length - p[0][k];
        total += 0.5 * p[1][k] * x * x;
        r.pair(atoms[0], atoms[1], d, length > 0 ? p[1][k] * x / length : 0);
      } else if (t.kind == SPECIAL_PAIR) {
        const double s2 = p[0][k] * p[0][k] / r2, s6 = s2 * s2 * s2, u = 4 * p[1][k] * (s6 * s6 - s6), c = p[2][k] / std::sqrt(r2);
        total += u, other += c;
        r.pair(atoms[0], atoms[1], d, (24 * p[1][k] * (s6 - 2 * s6 * s6) - c) / r2);
      } else {
        total = NAN;  // a kind without a formula
      }
    } else if (size == 3) {
      const Vector a = r.difference(atoms[1], atoms[0]), c = r.difference(atoms[1], atoms[2]), n = cross(a, c);
      const double n1 = std::sqrt(dot(n, n)), x = std::atan2(n1, dot(a, c)) - p[0][k], slope = p[1][k] * x;
      total += 0.5 * slope * x;
      if (n1 < 1e-12 * std::sqrt(dot(a, a) * dot(c, c))) continue;  // straight
      const Vector f = scaled(cross(a, n), -slope / (dot(a, a) * n1)), g = scaled(cross(c, n), slope / (dot(c, c) * n1));
      r.push(atoms[0], f, a);
      r.push(atoms[2], g, c);
      r.push(atoms[1], {-f[0] - g[0], -f[1] - g[1], -f[2] - g[2]}, {0, 0, 0});
    } else {
      const Vector b[3] = {r.difference(atoms[0], atoms[1]), r.difference(atoms[1], atoms[2]), r.difference(atoms[2], atoms[3])};
      const Vector m = cross(b[0], b[1]), n = cross(b[1], b[2]);
      const double phi = std::atan2(std::sqrt(dot(b[1], b[1])) * dot(b[0], n), dot(m, n));
      double slope = NAN;
      if (t.kind == TORSION) {
        const double x = p[0][k] * phi - p[1][k];
        total += p[2][k] * (1 + std::cos(x));
        slope = -p[2][k] * p[0][k] * std::sin(x);
      } else if (t.kind == IMPROPER) {
        const double x = turn(phi - p[0][k]);
        slope = p[1][k] * x;
        total += 0.5 * slope * x;
      } else if (t.kind == RYCKAERT_BELLEMANS) {
        const double x = -std::cos(phi);
        double u = 0, du = 0;
        for (int n = 5; n >= 0; --n) du = du * x + u, u = u * x + p[n][k];
        total += u;
        slope = du * std::sin(phi);
      } else {
        total = NAN;
      }
      r.torsion(atoms, b, slope);
    }
  }
  energies[0] += total, energies[1] += other;
}

}  // namespace

// Add to forces (R, N, 3), virial (R, 3, 3) if there is one, and energies (R, groups, 2): the second of a group is the
// Coulomb energy of special pairs.
extern "C" void tuples_add(int64_t groups, const Tuples* const* tuples, int64_t replicas, int64_t atoms, int64_t periodic,
                           const double* positions, const double* cell, double* forces, double* energies, double* virial) {
  for (int64_t r = 0; r < replicas; ++r) {
    const Replica replica(positions + 3 * atoms * r, cell ? cell + 9 * r : nullptr, int(periodic), forces + 3 * atoms * r, virial ? virial + 9 * r : nullptr);
    for (int64_t g = 0; g < groups; ++g) add(*tuples[g], replica, energies + 2 * (r * groups + g));
  }
}
