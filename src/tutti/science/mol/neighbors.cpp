// Verlet lists by cell lists. Atoms are folded into a reduced cell and sorted by bin; images of them within reach
// ("ghosts") follow, so that a pair is two indices of packed positions and no kernel knows of periodicity. Each pair
// stands in one row (half lists): of two atoms in the cell the later one, of an atom and a ghost those ghosts whose
// shift is lexicographically positive.

namespace {

struct Frame {  // a cell whose rows are short, with unit vectors in place of those that do not repeat
  double h[3][3], inverse[3][3], width[3];
  int64_t steps[3][3];  // h = steps @ cell
  bool repeats[3], orthogonal;

  static double dot(const double* a, const double* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }
  static void cross(const double* a, const double* b, double* c) {
    for (int k = 0; k < 3; ++k) c[k] = a[(k + 1) % 3] * b[(k + 2) % 3] - a[(k + 2) % 3] * b[(k + 1) % 3];
  }

  Frame(const double* cell, int periodic) {
    int rows[3], n = 0;
    for (int k = 0; k < 3; ++k) {
      repeats[k] = cell && (periodic >> k & 1);
      if (repeats[k]) rows[n++] = k;
      for (int d = 0; d < 3; ++d) h[k][d] = repeats[k] ? cell[3 * k + d] : k == d, steps[k][d] = k == d;
    }
    for (bool changed = n > 1; changed;) {
      changed = false;
      for (int x = 0; x < n; ++x)
        for (int y = 0; y < n; ++y) {
          if (x == y) continue;
          double *a = h[rows[x]], *b = h[rows[y]];
          const double m = std::nearbyint(dot(a, b) / dot(b, b));
          if (m == 0) continue;
          double c[3] = {a[0] - m * b[0], a[1] - m * b[1], a[2] - m * b[2]};
          if (!(dot(c, c) < dot(a, a) * (1 - 1e-12))) continue;  // nor what is not finite
          std::copy_n(c, 3, a);
          for (int d = 0; d < 3; ++d) steps[rows[x]][d] -= int64_t(m) * steps[rows[y]][d];
          changed = true;
        }
    }
    if (n == 1 || n == 2) complete(rows, n);
    double volume, normal[3][3];
    for (int k = 0; k < 3; ++k) cross(h[(k + 1) % 3], h[(k + 2) % 3], normal[k]);
    volume = dot(h[0], normal[0]);
    orthogonal = true;
    for (int k = 0; k < 3; ++k) {
      width[k] = std::fabs(volume) / std::sqrt(dot(normal[k], normal[k]));
      for (int d = 0; d < 3; ++d) inverse[d][k] = normal[k][d] / volume;
      orthogonal &= std::fabs(dot(h[k], h[(k + 1) % 3])) < 1e-12 * std::sqrt(dot(h[k], h[k]) * dot(h[(k + 1) % 3], h[(k + 1) % 3]));
    }
  }

  bool spans() const {  // whether the vectors are independent, and finite
    double volume = 1;
    for (int k = 0; k < 3; ++k) volume *= std::sqrt(dot(h[k], h[k]));
    const double width = std::min({width_ratio(0), width_ratio(1), width_ratio(2)});
    return std::isfinite(volume) && volume > 0 && width > 1e-9;
  }
  double width_ratio(int k) const { return width[k] / std::sqrt(dot(h[k], h[k])); }

  void complete(const int* rows, int n) {  // unit vectors orthogonal to the rows that repeat
    bool free[3] = {true, true, true};
    for (int x = 0; x < n; ++x) free[rows[x]] = false;
    int others[2], m = 0;
    for (int k = 0; k < 3; ++k)
      if (free[k]) others[m++] = k;
    double u[3];
    if (n == 2) {
      cross(h[rows[0]], h[rows[1]], u);
    } else {
      double axis[3] = {0, 0, 0};
      int least = 0;
      for (int d = 1; d < 3; ++d)
        if (std::fabs(h[rows[0]][d]) < std::fabs(h[rows[0]][least])) least = d;
      axis[least] = 1;
      cross(h[rows[0]], axis, u);
    }
    const double length = std::sqrt(dot(u, u));
    for (int d = 0; d < 3; ++d) h[others[0]][d] = u[d] / length;
    if (n == 1) {
      cross(h[rows[0]], h[others[0]], u);
      const double length = std::sqrt(dot(u, u));
      for (int d = 0; d < 3; ++d) h[others[1]][d] = u[d] / length;
    }
  }

  void fractional(const double* x, double* s) const {
    for (int k = 0; k < 3; ++k) s[k] = x[0] * inverse[0][k] + x[1] * inverse[1][k] + x[2] * inverse[2][k];
  }
};

using Shift = std::array<int32_t, 3>;

struct Excluded {
  int32_t other;
  Shift shift;  // of the image that is left out
};

struct List {  // of one replica
  int64_t atoms = 0, ghosts = 0, pairs = 0;
  std::vector<double> start;         // positions at the build (N, 3)
  double cell[9];                    // then
  std::vector<int32_t> origin;       // of each packed atom, its index
  std::vector<Shift> shift;          // and the lattice vectors added to its position
  std::vector<double> offset;        // the same in space (packed, 3)
  Aligned<double> x;                 // packed (x, y, z, w) for kernels; one more atom, far away, fills up rows
  Aligned<double> f;                 // forces on packed atoms, (x, y, z, 0)
  std::vector<int64_t> first;        // of each row, a multiple of the lanes
  std::vector<int32_t> count;        // its pairs
  Aligned<int32_t> row;              // second atoms, packed
  int64_t capacity = 0;
  bool built = false;

  int64_t packed() const { return atoms + ghosts; }
};

// Candidates for the neighbours of the atoms of a bin: copies of their positions, and their packed indices.
struct Candidates {
  std::vector<double> x, y, z;
  std::vector<int32_t> index;
  int64_t count = 0;

  void reserve(int64_t n) {
    if (int64_t(index.size()) >= n + 2 * LANES) return;
    for (auto* v : {&x, &y, &z}) v->resize(2 * n + 2 * LANES);
    index.resize(2 * n + 2 * LANES);
  }

  void append(const std::vector<double>* packed, int64_t from, int64_t to) {  // which may be read LANES beyond their end
    if (from >= to) return;
    reserve(count + to - from);
    for (int64_t j = from, k = count; j < to; j += LANES, k += LANES) {
      std::memcpy(&x[k], &packed[0][j], LANES * sizeof(double));
      std::memcpy(&y[k], &packed[1][j], LANES * sizeof(double));
      std::memcpy(&z[k], &packed[2][j], LANES * sizeof(double));
      for (int d = 0; d < LANES; ++d) index[k + d] = int32_t(j + d);
    }
    count += to - from;
  }

  // Those from number `from` on that are near a point, written to `out`, which has room for all and LANES more.
  int64_t within(int64_t from, double px, double py, double pz, double r2, int32_t* out) const {
    int64_t found = 0;
#ifdef WIDE
    const __m512d vx = _mm512_set1_pd(px), vy = _mm512_set1_pd(py), vz = _mm512_set1_pd(pz), limit = _mm512_set1_pd(r2);
    for (int64_t j = from; j < count; j += LANES) {
      const __mmask8 valid = count - j >= LANES ? 0xff : __mmask8((1u << (count - j)) - 1);
      const __m512d dx = _mm512_sub_pd(_mm512_loadu_pd(&x[j]), vx);
      const __m512d dy = _mm512_sub_pd(_mm512_loadu_pd(&y[j]), vy);
      const __m512d dz = _mm512_sub_pd(_mm512_loadu_pd(&z[j]), vz);
      const __m512d d2 = _mm512_fmadd_pd(dz, dz, _mm512_fmadd_pd(dy, dy, _mm512_mul_pd(dx, dx)));
      const __mmask8 near = _mm512_mask_cmp_pd_mask(valid, d2, limit, _CMP_LT_OQ);
      const __m512i numbers = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(&index[j])));
      const __m512i packed = _mm512_maskz_compress_epi32(near, numbers);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + found), _mm512_castsi512_si256(packed));
      found += __builtin_popcount(near);
    }
#else
    for (int64_t j = from; j < count; ++j) {
      const double dx = x[j] - px, dy = y[j] - py, dz = z[j] - pz;
      out[found] = index[j];
      found += dx * dx + dy * dy + dz * dz < r2;
    }
#endif
    return found;
  }
};

struct Ghost {
  int32_t origin;
  std::array<int64_t, 3> n;
  double s[3];
};

struct Scratch {  // of one build, whose memory the next one uses
  std::vector<double> s, packed[3];  // fractional coordinates; packed positions by component
  std::vector<std::array<int64_t, 3>> fold;
  std::vector<Ghost> ghosts;
  std::vector<int32_t> of_atom, of_ghost;     // bins
  std::vector<int64_t> locals, others, next;  // where the atoms of a bin begin
  std::vector<int32_t> found;
  Candidates near;
};

struct Neighbors {
  double cutoff, skin;
  int periodic;
  int64_t replicas, atoms, excluded = 0;
  std::vector<List> lists;
  std::vector<int64_t> exclusion_first;
  std::vector<int32_t> exclusion_other;
  int64_t owned = -1;           // atoms that this process owns, the first ones; the others are copies of atoms of others
  std::vector<int64_t> number;  // of each atom among those of all processes
  Scratch scratch;

  double range() const { return cutoff + skin; }
};

// The image of b that is nearest to a, as lattice vectors of the frame added to b.
void nearest(const Frame& frame, const double* a, const double* b, int64_t* best) {
  double d[3] = {b[0] - a[0], b[1] - a[1], b[2] - a[2]}, s[3], shortest = HUGE_VAL;
  frame.fractional(d, s);
  int64_t n[3], reach[3];
  for (int k = 0; k < 3; ++k) n[k] = frame.repeats[k] ? -int64_t(std::nearbyint(s[k])) : 0, reach[k] = frame.repeats[k];
  {  // shorter than half of all widths: there is none nearer
    double r2 = 0, width = HUGE_VAL;
    for (int k = 0; k < 3; ++k) {
      const double r = d[k] + n[0] * frame.h[0][k] + n[1] * frame.h[1][k] + n[2] * frame.h[2][k];
      r2 += r * r;
      if (frame.repeats[k]) width = std::min(width, frame.width[k]);
    }
    if (4 * r2 < width * width) return void(std::copy_n(n, 3, best));
  }
  for (int64_t x = n[0] - reach[0]; x <= n[0] + reach[0]; ++x)
    for (int64_t y = n[1] - reach[1]; y <= n[1] + reach[1]; ++y)
      for (int64_t z = n[2] - reach[2]; z <= n[2] + reach[2]; ++z) {
        double r2 = 0;
        for (int k = 0; k < 3; ++k) {
          const double r = d[k] + x * frame.h[0][k] + y * frame.h[1][k] + z * frame.h[2][k];
          r2 += r * r;
        }
        if (r2 < shortest * (1 - 1e-12)) shortest = r2, best[0] = x, best[1] = y, best[2] = z;
      }
}

Shift in_cell(const Frame& frame, const int64_t* n) {  // lattice vectors of the frame as those of the cell
  Shift s;
  for (int d = 0; d < 3; ++d) s[d] = int32_t(n[0] * frame.steps[0][d] + n[1] * frame.steps[1][d] + n[2] * frame.steps[2][d]);
  return s;
}

void place(List& list, const double* positions, const double* cell) {  // packed positions from those of now
  const int64_t n = list.packed();
  double* x = list.x.data;
  const double* offset = list.offset.data();
  const int32_t* origin = list.origin.data();
  if (cell && std::memcmp(cell, list.cell, sizeof list.cell)) {  // the cell has changed a little since the build
    for (int64_t k = 0; k < n; ++k)
      for (int d = 0; d < 3; ++d) {
        const Shift& s = list.shift[k];
        x[4 * k + d] = positions[3 * origin[k] + d] + s[0] * cell[d] + s[1] * cell[3 + d] + s[2] * cell[6 + d];
      }
    return;
  }
  for (int64_t k = 0; k < n; ++k) {
    const double *p = positions + 3 * int64_t(origin[k]), *a = offset + 3 * k;
    x[4 * k] = p[0] + a[0], x[4 * k + 1] = p[1] + a[1], x[4 * k + 2] = p[2] + a[2];
  }
}

struct Row {  // of bins along the last axis, near another one: how far apart, and how far it reaches
  int64_t apart[2], reach;
};

struct Bins {
  int64_t n[3], reach[3];
  double low[3], size[3], width[3];  // in fractional coordinates, and the distance between faces

  Bins(const Frame& frame, const double* from, const double* to, double range, int64_t atoms) {
    for (int k = 0; k < 3; ++k) {
      low[k] = from[k], size[k] = to[k] - from[k];
      n[k] = std::clamp<int64_t>(int64_t(std::min(size[k] * frame.width[k] / (range * 0.5000001), 1e6)), 1, 1000000);
    }
    while (n[0] * n[1] * n[2] > 4 * atoms + 64) {
      int64_t& most = *std::max_element(n, n + 3);
      most = (most + 1) / 2;
    }
    for (int k = 0; k < 3; ++k) {
      size[k] = size[k] / n[k];
      width[k] = size[k] * frame.width[k];
      const double bins = width[k] > 0 ? range / width[k] * (1 + 1e-9) : HUGE_VAL;
      reach[k] = bins < n[k] ? int64_t(bins) + 1 : n[k];
    }
  }
  int64_t total() const { return n[0] * n[1] * n[2]; }
  int64_t along(int k, double s) const {
    return size[k] > 0 ? std::clamp<int64_t>(int64_t((s - low[k]) / size[k]), 0, n[k] - 1) : 0;
  }
  std::vector<Row> stencil(const Frame& frame, double range) const {  // rows that hold bins within the range of a bin
    std::vector<Row> rows;
    const auto gap = [&](int k, int64_t apart) { return std::max<int64_t>(std::abs(apart) - 1, 0) * width[k] * (1 - 1e-9); };
    for (int64_t a = -reach[0]; a <= reach[0]; ++a)
      for (int64_t b = -reach[1]; b <= reach[1]; ++b) {
        const double x = gap(0, a), y = gap(1, b), left = range * range - x * x - y * y;
        if (x >= range || y >= range || (frame.orthogonal && left <= 0)) continue;
        int64_t far = reach[2];
        if (frame.orthogonal && width[2] > 0) far = std::min(far, int64_t(std::min(std::sqrt(left) / width[2] * (1 + 1e-9), 1e9)) + 1);
        rows.push_back({{a, b}, far});
      }
    return rows;
  }
  int64_t of(const double* s) const { return (along(0, s[0]) * n[1] + along(1, s[1])) * n[2] + along(2, s[2]); }
};

// Leave out pairs of atom `i` that are excluded; returns how many stay.
int64_t keep_allowed(const List& list, int64_t i, const std::vector<std::vector<Excluded>>& excluded, int32_t* row, int64_t count) {
  const auto& out = excluded[list.origin[i]];
  if (out.empty()) return count;
  int64_t kept = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int32_t j = row[k];
    bool allowed = true;
    for (const Excluded& e : out) {
      if (e.other != list.origin[j]) continue;
      bool same = true;  // shift of j seen from i
      for (int d = 0; d < 3; ++d) same &= e.shift[d] == list.shift[j][d] - list.shift[i][d];
      allowed &= !same;
    }
    if (allowed) row[kept++] = j;
  }
  return kept;
}

// Leave out pairs of copies, and those of an owned atom and a copy that the process which owns the copy computes: it
// holds the same two numbers the other way round, so that one of the two takes the pair. Returns how many stay.
int64_t keep_divided(const Neighbors& all, const List& list, int64_t i, int32_t* row, int64_t count) {
  const int64_t a = list.origin[i];
  int64_t kept = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t b = list.origin[row[k]], own = std::min(a, b), other = std::max(a, b);  // owned atoms come first
    if (own >= all.owned) continue;
    const int64_t m = all.number[own], n = all.number[other];
    if (other < all.owned || ((m + n) % 2 ? m > n : m < n)) row[kept++] = row[k];
  }
  return kept;
}

// Excluded pairs of the positions at this build: each atom's partners and their nearest images.
std::vector<std::vector<Excluded>> exclusions(const Neighbors& all, const Frame& frame, const double* positions) {
  std::vector<std::vector<Excluded>> out(all.excluded ? all.atoms : 0);
  for (int64_t i = 0; all.excluded && i < all.atoms; ++i)
    for (int64_t e = all.exclusion_first[i]; e < all.exclusion_first[i + 1]; ++e) {
      const int32_t j = all.exclusion_other[e];
      int64_t n[3] = {0, 0, 0};
      const bool forward = i < j;  // both directions take the same of two images that are equally near
      nearest(frame, positions + 3 * (forward ? i : j), positions + 3 * (forward ? j : i), n);
      Shift s = in_cell(frame, n);
      if (!forward) s = {-s[0], -s[1], -s[2]};
      out[i].push_back({j, s});
    }
  return out;
}

void build(Neighbors& all, List& list, const double* positions, const double* cell) {
  const int64_t atoms = all.atoms;
  const double range = all.range();
  const Frame frame(cell, all.periodic);
  list.start.assign(positions, positions + 3 * atoms);
  if (cell) std::copy_n(cell, 9, list.cell);
  list.atoms = atoms, list.built = true;

  auto& [s, packed, fold, ghosts, of_atom, of_ghost, locals, others, next, found, near] = all.scratch;
  s.resize(3 * atoms), fold.resize(atoms);
  double from[3] = {HUGE_VAL, HUGE_VAL, HUGE_VAL}, to[3] = {-HUGE_VAL, -HUGE_VAL, -HUGE_VAL};
  for (int64_t i = 0; i < atoms; ++i) {
    frame.fractional(positions + 3 * i, &s[3 * i]);
    for (int k = 0; k < 3; ++k) {
      fold[i][k] = frame.repeats[k] ? int64_t(std::floor(s[3 * i + k])) : 0;
      s[3 * i + k] -= fold[i][k];
      from[k] = std::min(from[k], s[3 * i + k]), to[k] = std::max(to[k], s[3 * i + k]);
    }
  }
  for (int k = 0; k < 3; ++k) {  // images farther than the range from all atoms have no neighbours
    const double reach = frame.repeats[k] ? range / frame.width[k] * (1 + 1e-9) : 0;
    from[k] -= reach, to[k] += reach;
  }
  ghosts.clear();
  for (int64_t i = 0; i < atoms; ++i) {
    int64_t low[3], high[3];
    for (int k = 0; k < 3; ++k) {
      low[k] = frame.repeats[k] ? int64_t(std::ceil(from[k] - s[3 * i + k])) : 0;
      high[k] = frame.repeats[k] ? int64_t(std::floor(to[k] - s[3 * i + k])) : 0;
    }
    for (int64_t a = 0; a <= high[0]; ++a)
      for (int64_t b = a ? low[1] : 0; b <= high[1]; ++b)
        for (int64_t c = a || b ? low[2] : 1; c <= high[2]; ++c)
          ghosts.push_back({int32_t(i), {a, b, c}, {s[3 * i] + a, s[3 * i + 1] + b, s[3 * i + 2] + c}});
  }
  list.ghosts = int64_t(ghosts.size());
  const int64_t n = list.packed();

  const Bins bins(frame, from, to, range, n);
  of_atom.resize(atoms), of_ghost.resize(ghosts.size());
  locals.assign(bins.total() + 1, 0), others.assign(bins.total() + 1, 0);
  for (int64_t i = 0; i < atoms; ++i) ++locals[(of_atom[i] = int32_t(bins.of(&s[3 * i]))) + 1];
  for (size_t g = 0; g < ghosts.size(); ++g) ++others[(of_ghost[g] = int32_t(bins.of(ghosts[g].s))) + 1];
  others[0] = atoms;
  for (int64_t b = 0; b < bins.total(); ++b) locals[b + 1] += locals[b], others[b + 1] += others[b];

  list.origin.resize(n), list.shift.resize(n), list.offset.resize(3 * n);
  const auto put = [&](int64_t k, int64_t i, const std::array<int64_t, 3>& image) {
    const int64_t m[3] = {image[0] - fold[i][0], image[1] - fold[i][1], image[2] - fold[i][2]};
    list.origin[k] = int32_t(i);
    list.shift[k] = in_cell(frame, m);
    for (int d = 0; d < 3; ++d) {
      list.offset[3 * k + d] = 0;
      for (int e = 0; cell && e < 3; ++e) list.offset[3 * k + d] += list.shift[k][e] * cell[3 * e + d];
    }
  };
  next.assign(locals.begin(), locals.end() - 1);
  for (int64_t i = 0; i < atoms; ++i) put(next[of_atom[i]]++, i, {0, 0, 0});
  next.assign(others.begin(), others.end() - 1);
  for (size_t g = 0; g < ghosts.size(); ++g) put(next[of_ghost[g]]++, ghosts[g].origin, ghosts[g].n);
  list.x.resize(4 * n + 4), list.f.resize(4 * n + 4);
  std::fill_n(list.x.data, 4 * n + 4, 0.0);
  for (int d = 0; d < 3; ++d) list.x[4 * n + d] = 1e60;
  place(list, positions, cell);
  for (int d = 0; d < 3; ++d) {
    packed[d].resize(n + LANES);
    for (int64_t k = 0; k < n; ++k) packed[d][k] = list.x[4 * k + d];
  }

  const auto excluded = exclusions(all, frame, positions);
  list.first.resize(atoms + 1), list.count.resize(atoms);
  int64_t length = 0;
  list.pairs = 0;
  const std::vector<Row> stencil = bins.stencil(frame, range);
  for (int64_t b = 0; b < bins.total(); ++b) {
    if (locals[b] == locals[b + 1]) continue;
    const int64_t at[3] = {b / (bins.n[1] * bins.n[2]), b / bins.n[2] % bins.n[1], b % bins.n[2]};
    near.count = 0;
    near.append(packed, locals[b], locals[b - at[2] + std::min(at[2] + bins.reach[2], bins.n[2] - 1) + 1]);  // first those of this bin
    for (const Row& row : stencil) {
      const int64_t c0 = at[0] + row.apart[0], c1 = at[1] + row.apart[1];
      if (c0 < 0 || c0 >= bins.n[0] || c1 < 0 || c1 >= bins.n[1]) continue;
      const int64_t line = (c0 * bins.n[1] + c1) * bins.n[2];
      const int64_t from = line + std::max<int64_t>(at[2] - row.reach, 0), to = line + std::min(at[2] + row.reach, bins.n[2] - 1) + 1;
      if (line > b) near.append(packed, locals[from], locals[to]);  // later atoms only
      near.append(packed, others[from], others[to]);
    }
    if (int64_t(found.size()) < near.count + LANES) found.resize(2 * near.count + LANES);
    for (int64_t i = locals[b]; i < locals[b + 1]; ++i) {
      int64_t count = near.within(i - locals[b] + 1, packed[0][i], packed[1][i], packed[2][i], range * range, found.data());
      if (all.excluded) count = keep_allowed(list, i, excluded, found.data(), count);
      if (all.owned >= 0) count = keep_divided(all, list, i, found.data(), count);
      const int64_t whole = (count + LANES - 1) / LANES * LANES;
      if (length + whole > list.capacity) {
        const Aligned<int32_t> before = std::move(list.row);
        list.capacity = std::max(length + whole, list.capacity + list.capacity / 2 + 1024);
        list.row = {};
        list.row.resize(list.capacity);
        if (length) std::copy_n(before.data, length, list.row.data);
      }
      list.first[i] = length, list.count[i] = int32_t(count);
      std::copy_n(found.data(), count, list.row.data + length);
      std::fill_n(list.row.data + length + count, whole - count, int32_t(n));
      length += whole, list.pairs += count;
    }
  }
  list.first[atoms] = length;
}

// Whether pairs within the cutoff may be missing: with F the change of the cell since the build and u what an atom has
// moved besides it, |r| >= (1 - |F - 1|) |r0| - |u_i| - |u_j|, and r0 of a missing pair is at least cutoff + skin.
struct Motion {  // |u_i| of the two atoms that moved farthest, and what their sum must not exceed
  double most, next, limit;
};

Motion motion(const Neighbors& all, const List& list, const double* positions, const double* cell) {
  double limit = all.skin, F[3][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}};
  if (cell && all.periodic && std::memcmp(cell, list.cell, sizeof list.cell)) {
    double norm = 0;
    const Frame before(list.cell, all.periodic);
    Frame now(cell, all.periodic);
    for (int k = 0; k < 3; ++k)  // the same combinations of lattice vectors as before
      for (int d = 0; before.repeats[k] && d < 3; ++d)
        now.h[k][d] = before.steps[k][0] * cell[d] + before.steps[k][1] * cell[3 + d] + before.steps[k][2] * cell[6 + d];
    for (int a = 0; a < 3; ++a)
      for (int d = 0; d < 3; ++d) {
        F[a][d] = before.inverse[a][0] * now.h[0][d] + before.inverse[a][1] * now.h[1][d] + before.inverse[a][2] * now.h[2][d];
        norm += (F[a][d] - (a == d)) * (F[a][d] - (a == d));
      }
    limit = (1 - std::sqrt(norm)) * all.range() - all.cutoff;
  }
  double most = 0, next = 0;  // squares of the two longest displacements
  for (int64_t i = 0; i < (all.owned < 0 ? all.atoms : all.owned); ++i) {
    const double* x = &list.start[3 * i];
    double u2 = 0;
    for (int d = 0; d < 3; ++d) {
      const double u = positions[3 * i + d] - (x[0] * F[0][d] + x[1] * F[1][d] + x[2] * F[2][d]);
      u2 += u * u;
    }
    if (u2 > next) {
      if (u2 > most) next = most, most = u2;
      else next = u2;
    }
  }
  return {std::sqrt(most), std::sqrt(next), limit};
}

bool outdated(const Neighbors& all, const List& list, const double* positions, const double* cell) {
  if (!list.built) return true;
  const Motion m = motion(all, list, positions, cell);
  return !(m.most + m.next <= m.limit);
}

}  // namespace

extern "C" Neighbors* neighbors_new(double cutoff, double skin, int64_t periodic, int64_t replicas, int64_t atoms,
                                    int64_t excluded, const int64_t* i, const int64_t* j) {
  auto* all = new Neighbors{cutoff, skin, int(periodic), replicas, atoms, excluded, {}, {}, {}, -1, {}, {}};
  all->lists.resize(replicas);
  all->exclusion_first.assign(atoms + 1, 0);
  all->exclusion_other.resize(2 * excluded);
  for (int64_t e = 0; e < excluded; ++e) ++all->exclusion_first[i[e] + 1], ++all->exclusion_first[j[e] + 1];
  for (int64_t k = 0; k < atoms; ++k) all->exclusion_first[k + 1] += all->exclusion_first[k];
  std::vector<int64_t> next(all->exclusion_first);
  for (int64_t e = 0; e < excluded; ++e)
    all->exclusion_other[next[i[e]]++] = int32_t(j[e]), all->exclusion_other[next[j[e]]++] = int32_t(i[e]);
  return all;
}

// Let the first `owned` atoms be those of this process, and the others copies of atoms that other processes own. number
// (N): of each atom among those of all processes.
extern "C" void neighbors_divide(Neighbors* all, int64_t owned, const int64_t* number) {
  all->owned = owned;
  all->number.assign(number, number + all->atoms);
}

// The two longest ways of atoms since the build, and what their sum must not exceed.
extern "C" void neighbors_motion(const Neighbors* all, const double* positions, const double* cell, double* out) {
  const Motion m = motion(*all, all->lists[0], positions, cell);
  out[0] = m.most, out[1] = m.next, out[2] = m.limit;
}

extern "C" void neighbors_delete(Neighbors* all) { delete all; }

// Build the lists that are outdated, or all of them. Returns how many were built, -1 - k if number k of the positions is
// not finite, and -1 - 3 R N if a cell is degenerate.
extern "C" int64_t neighbors_update(Neighbors* all, const double* positions, const double* cell, int64_t force) {
  int64_t built = 0;
  for (int64_t r = 0; r < all->replicas; ++r) {
    const double *x = positions + 3 * r * all->atoms, *h = cell ? cell + 9 * r : nullptr;
    double bad = 0;  // 0 times a number that is not finite is none
    for (int64_t k = 0; k < 3 * all->atoms; ++k) bad += 0 * x[k];
    if (bad != 0)
      for (int64_t k = 0; k < 3 * all->atoms; ++k)
        if (!std::isfinite(x[k])) return -1 - (3 * r * all->atoms + k);
    if (!force && !outdated(*all, all->lists[r], x, h)) continue;
    if (h && all->periodic && !Frame(h, all->periodic).spans()) return -1 - 3 * all->replicas * all->atoms;
    build(*all, all->lists[r], x, h);
    ++built;
  }
  return built;
}

extern "C" int64_t neighbors_count(const Neighbors* all) {
  int64_t n = 0;
  for (const List& list : all->lists) n += list.pairs;
  return n;
}

// All pairs, half of them. shift (n, 3): lattice vectors to add to the position of j.
extern "C" void neighbors_copy(const Neighbors* all, int64_t* replica, int64_t* i, int64_t* j, int64_t* shift) {
  int64_t n = 0;
  for (int64_t r = 0; r < all->replicas; ++r) {
    const List& list = all->lists[r];
    for (int64_t a = 0; a < list.atoms; ++a)
      for (int32_t e = 0; e < list.count[a]; ++e, ++n) {
        const int32_t b = list.row[list.first[a] + e];
        replica[n] = r, i[n] = list.origin[a], j[n] = list.origin[b];
        for (int d = 0; d < 3; ++d) shift[3 * n + d] = list.shift[b][d] - list.shift[a][d];
      }
  }
}
