// What integrators need beside forces: normal random numbers by counters, and distances that are held.

namespace {

// Philox4x32-10 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3).
inline void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
    std::memcpy(c, next, sizeof next);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

inline double uniform(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }  // in (0, 1)

struct Held {  // distances between atoms, in clusters that share no atom
  int64_t clusters;
  const int64_t *start, *first, *second;  // (clusters + 1), (C), (C)
  const int64_t *atom_start, *atom;       // (clusters + 1) and the atoms of each
  const double *length, *inverse_mass;    // (C), (N)
};

constexpr int SMALL = 12;  // constraints that are solved for at once

// Solve a x = b for n unknowns by elimination with pivots; a is overwritten. Returns whether it is regular.
bool solve(double a[SMALL][SMALL], double* b, int n) {
  for (int k = 0; k < n; ++k) {
    int pivot = k;
    for (int r = k + 1; r < n; ++r)
      if (std::abs(a[r][k]) > std::abs(a[pivot][k])) pivot = r;
    if (!(std::abs(a[pivot][k]) > 0)) return false;
    if (pivot != k) std::swap(a[pivot], a[k]), std::swap(b[pivot], b[k]);
    for (int r = k + 1; r < n; ++r) {
      const double f = a[r][k] / a[k][k];
      for (int c = k; c < n; ++c) a[r][c] -= f * a[k][c];
      b[r] -= f * b[k];
    }
  }
  for (int k = n - 1; k >= 0; --k) {
    for (int c = k + 1; c < n; ++c) b[k] -= a[k][c] * b[c];
    b[k] /= a[k][k];
  }
  return true;
}

struct Cluster {
  const Held& h;
  const int64_t begin;
  const int n;

  // d(first) and d(second) of a constraint's multiplier, along `along`.
  void push(double* x, int k, double multiplier, const double* along) const {
    const int64_t i = h.first[begin + k], j = h.second[begin + k];
    for (int d = 0; d < 3; ++d) {
      x[3 * i + d] -= h.inverse_mass[i] * multiplier * along[d];
      x[3 * j + d] += h.inverse_mass[j] * multiplier * along[d];
    }
  }

  void difference(const double* x, int k, double* d) const {
    const int64_t i = h.first[begin + k], j = h.second[begin + k];
    for (int e = 0; e < 3; ++e) d[e] = x[3 * j + e] - x[3 * i + e];
  }

  // How the multiplier of l moves the difference of k, as a factor of l's direction.
  double coupling(int k, int l) const {
    const int64_t i = h.first[begin + k], j = h.second[begin + k], p = h.first[begin + l], q = h.second[begin + l];
    double sum = 0;
    if (j == q) sum += h.inverse_mass[j];
    if (j == p) sum -= h.inverse_mass[j];
    if (i == q) sum -= h.inverse_mass[i];
    if (i == p) sum += h.inverse_mass[i];
    return sum;
  }
};

double dot3(const double* a, const double* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

// Move x, which was unconstrained, along the directions of `old` until all lengths are right. Newton's method for small
// clusters (for rigid water the solution of SETTLE, Miyamoto and Kollman 1992), SHAKE (Ryckaert et al. 1977) for others.
bool hold_positions(const Cluster& c, const double* old, double* x, double tolerance, int64_t most, double* along) {
  for (int k = 0; k < c.n; ++k) c.difference(old, k, along + 3 * k);
  for (int64_t trial = 0; trial < most; ++trial) {
    double worst = 0, now[3];
    if (c.n <= SMALL) {
      double a[SMALL][SMALL], b[SMALL];
      for (int k = 0; k < c.n; ++k) {
        const double l2 = c.h.length[c.begin + k] * c.h.length[c.begin + k];
        c.difference(x, k, now);
        b[k] = (l2 - dot3(now, now)) / 2;
        worst = std::max(worst, std::abs(b[k]) / l2);
        for (int l = 0; l < c.n; ++l) a[k][l] = c.coupling(k, l) * dot3(now, along + 3 * l);
      }
      if (worst < tolerance) return true;
      if (!(worst < 1e6) || !solve(a, b, c.n)) return false;
      for (int k = 0; k < c.n; ++k) c.push(x, k, b[k], along + 3 * k);
    } else {
      for (int k = 0; k < c.n; ++k) {
        const double l2 = c.h.length[c.begin + k] * c.h.length[c.begin + k];
        c.difference(x, k, now);
        const double wrong = (l2 - dot3(now, now)) / 2, slope = c.coupling(k, k) * dot3(now, along + 3 * k);
        worst = std::max(worst, std::abs(wrong) / l2);
        if (!(worst < 1e6) || !(std::abs(slope) > 0)) return false;
        c.push(x, k, wrong / slope, along + 3 * k);
      }
      if (worst < tolerance) return true;
    }
  }
  return false;
}

// Remove from v what would change the lengths at x (RATTLE, Andersen 1983).
bool hold_velocities(const Cluster& c, const double* x, double* v, double tolerance, int64_t most, double* along) {
  for (int k = 0; k < c.n; ++k) c.difference(x, k, along + 3 * k);
  double now[3];
  if (c.n <= SMALL) {
    double a[SMALL][SMALL], b[SMALL];
    for (int k = 0; k < c.n; ++k) {
      c.difference(v, k, now);
      b[k] = -dot3(now, along + 3 * k);
      for (int l = 0; l < c.n; ++l) a[k][l] = c.coupling(k, l) * dot3(along + 3 * k, along + 3 * l);
    }
    if (!solve(a, b, c.n)) return false;
    for (int k = 0; k < c.n; ++k) c.push(v, k, b[k], along + 3 * k);
    return true;
  }
  for (int64_t trial = 0; trial < most; ++trial) {
    double worst = 0;
    for (int k = 0; k < c.n; ++k) {
      c.difference(v, k, now);
      const double l2 = dot3(along + 3 * k, along + 3 * k), wrong = -dot3(now, along + 3 * k);
      worst = std::max(worst, std::abs(wrong) / l2);
      c.push(v, k, wrong / (c.coupling(k, k) * l2), along + 3 * k);
    }
    if (worst < tolerance) return true;
    if (!(worst < HUGE_VAL)) return false;
  }
  return false;
}

}  // namespace

// out (replicas, atoms, 3): normal numbers that depend on seed, stream, step, replica and the atom's number alone.
extern "C" void normal_numbers(uint64_t seed, uint64_t stream, uint64_t step, int64_t first_replica, int64_t replicas,
                               int64_t atoms, const int64_t* numbers, double* out) {
  for (int64_t r = 0; r < replicas; ++r)
    for (int64_t n = 0; n < atoms; ++n) {
      const uint64_t atom = numbers ? numbers[n] : n;
      uint32_t c[4] = {uint32_t(step), uint32_t(step >> 32) ^ uint32_t(stream << 24), uint32_t(first_replica + r), uint32_t(atom)};
      philox(c, uint32_t(seed), uint32_t(seed >> 32));
      const double radius = std::sqrt(-2 * std::log(uniform(c[0]))), angle = 2 * M_PI * uniform(c[1]);
      double* o = out + 3 * (r * atoms + n);
      o[0] = radius * std::cos(angle), o[1] = radius * std::sin(angle);
      o[2] = std::sqrt(-2 * std::log(uniform(c[2]))) * std::cos(2 * M_PI * uniform(c[3]));
    }
}

// Hold the lengths of x (replicas, atoms, 3) along the directions of `old`, and add what that moved over `interval` to v if
// it is given; or, for `velocities`, hold them for the velocities x at the positions `old`. Returns -1, or
// replica * clusters + cluster of the first whose lengths cannot be held.
extern "C" int64_t constrain(const Held* h, int64_t velocities, int64_t replicas, int64_t atoms, const double* old, double* x,
                             double* v, double interval, double tolerance, int64_t most) {
  std::vector<double> along, before;
  for (int64_t r = 0; r < replicas; ++r) {
    const double* o = old + 3 * atoms * r;
    double *y = x + 3 * atoms * r, *w = v ? v + 3 * atoms * r : nullptr;
    for (int64_t k = 0; k < h->clusters; ++k) {
      const Cluster c{*h, h->start[k], int(h->start[k + 1] - h->start[k])};
      const int64_t *mine = h->atom + h->atom_start[k], count = h->atom_start[k + 1] - h->atom_start[k];
      along.resize(3 * c.n), before.resize(3 * count);
      for (int64_t a = 0; w && a < count; ++a) std::memcpy(&before[3 * a], y + 3 * mine[a], 3 * sizeof(double));
      if (!(velocities ? hold_velocities : hold_positions)(c, o, y, tolerance, most, along.data())) return r * h->clusters + k;
      for (int64_t a = 0; w && a < count; ++a)
        for (int d = 0; d < 3; ++d) w[3 * mine[a] + d] += (y[3 * mine[a] + d] - before[3 * a + d]) / interval;
    }
  }
  return -1;
}

// Half a step dt of chains of thermostats, one for each replica (Martyna et al. 1996). twice: (R) twice the kinetic
// energy; position, velocity, inertia: (R, length); scale: (R), by what velocities are to be multiplied.
extern "C" void chain_half_step(int64_t replicas, int64_t length, double dt, double degrees, const double* kt, const double* twice,
                                const double* inertia, double* position, double* velocity, double* scale) {
  const double w = 1 / (4 - std::cbrt(4.0)), weights[5] = {w, w, 1 - 4 * w, w, w};  // Suzuki and Yoshida, order 4
  for (int64_t r = 0; r < replicas; ++r) {
    const double* q = inertia + r * length;
    double *v = velocity + r * length, *x = position + r * length, total = 1, k2 = twice[r];
    for (double weight : weights) {
      const double h = weight * dt / 2;
      auto push = [&](int64_t k) {  // half of h, damped by the next thermostat
        const double force = k == 0 ? (k2 - degrees * kt[r]) / q[0] : (q[k - 1] * v[k - 1] * v[k - 1] - kt[r]) / q[k];
        const double damping = k + 1 == length ? 1 : std::exp(-h / 4 * v[k + 1]);
        v[k] = (v[k] * damping + h / 2 * force) * damping;
      };
      for (int64_t k = length - 1; k >= 0; --k) push(k);
      const double factor = std::exp(-h * v[0]);
      total *= factor, k2 *= factor * factor;
      for (int64_t k = 0; k < length; ++k) x[k] += h * v[k];
      for (int64_t k = 0; k < length; ++k) push(k);
    }
    scale[r] = total;
  }
}

// A flag in memory that processes share gets the number of a message, after the message is there.
extern "C" void mailbox_post(int64_t* flag, int64_t number) { __atomic_store_n(flag, number, __ATOMIC_RELEASE); }

// Wait until all flags have at least this number. Returns -1, or one that has it not after giving way so many times.
extern "C" int64_t mailbox_wait(int64_t* const* flags, int64_t count, int64_t number, int64_t yields) {
  for (int64_t k = 0; k < count; ++k)
    for (int64_t tries = 0; __atomic_load_n(flags[k], __ATOMIC_ACQUIRE) < number; ++tries)
      if (tries > 1000) {
        if (tries > 1000 + yields) return k;
        sched_yield();
      }
  return -1;
}
