// Pairs of a batch of molecules, and sums over them that threads share.

namespace {

constexpr int64_t LARGE = 256;  // atoms of a block that threads share

// Two atoms within the cutoff: the vector between them, and where the filters are in their tables.
struct Pair {
  int64_t i, j, knot;
  T value[4], slope[4];  // weights of value and slope at both knots, for W and for dW/dd
  double unit[3], length;
};

struct Block {
  int64_t atom, atoms, edge, edges;
};

struct Graph {
  const double* positions;
  const double* offsets;  // (edges, 3) or null
  const int64_t *species, *molecule, *i, *j;
  bool half;  // edges lead one way only

  std::vector<Pair> pairs(const Block& b, int64_t knots, double cutoff) const {
    std::vector<Pair> found;
    found.reserve(half ? b.edges : b.edges / 2 + 1);
    const double per_length = (knots - 1) / cutoff, square = cutoff * cutoff;
    for (int64_t e = b.edge; e < b.edge + b.edges; ++e) {
      if (!half && i[e] > j[e]) continue;
      double v[3], sum = 0;
      for (int c = 0; c < 3; ++c) {
        v[c] = positions[3 * j[e] + c] - positions[3 * i[e] + c] + (offsets ? offsets[3 * e + c] : 0.0);
        sum += v[c] * v[c];
      }
      if (!(sum < square)) continue;
      if (!half && i[e] == j[e] && (v[0] < 0 || (v[0] == 0 && (v[1] < 0 || (v[1] == 0 && v[2] < 0))))) continue;
      Pair p;
      p.i = i[e] - b.atom, p.j = j[e] - b.atom, p.length = std::sqrt(sum);
      const double x = p.length * per_length, inverse = p.length > 0 ? 1 / p.length : 0;
      p.knot = std::min<int64_t>(x, knots - 2);
      const double t = x - p.knot, s = 1 - t;
      p.value[0] = (1 + 2 * t) * s * s, p.value[1] = t * s * s, p.value[2] = t * t * (3 - 2 * t), p.value[3] = -t * t * s;
      p.slope[0] = -6 * t * s * per_length, p.slope[1] = s * (1 - 3 * t) * per_length;
      p.slope[2] = -p.slope[0], p.slope[3] = t * (3 * t - 2) * per_length;
      for (int c = 0; c < 3; ++c) p.unit[c] = v[c] * inverse;
      found.push_back(p);
    }
    return found;
  }

  // Blocks of whole molecules, of `least` atoms or more. One block if edges are not in the order of molecules.
  std::vector<Block> blocks(int64_t atoms, int64_t edges, int64_t least) const {
    std::vector<Block> found;
    int64_t atom = 0, edge = 0;
    while (atom < atoms) {
      int64_t end = std::min(atoms, atom + least);
      while (end < atoms && molecule[end] == molecule[end - 1]) ++end;
      int64_t last = edge;
      while (last < edges && i[last] >= atom && i[last] < end) ++last;
      found.push_back({atom, end - atom, edge, last - edge});
      atom = end, edge = last;
    }
    if (edge < edges) return {{0, atoms, 0, edges}};
    return found;
  }
};

// sums (rows, m) = what `add(from, to, sums)` adds up for ranges of pairs. Threads have sums of their own.
template <class F>
void shared(int64_t rows, int64_t m, int64_t count, std::vector<T>& sums, const F& add) {
  const int64_t threads = rows < LARGE || at::in_parallel_region() ? 1 : at::get_num_threads();
  std::fill(sums.begin(), sums.end(), T(0));
  if (threads == 1) return add(0, count, sums.data());
  std::vector<T> more((threads - 1) * rows * m);
  at::parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t)
      add(count * t / threads, count * (t + 1) / threads, t ? &more[(t - 1) * rows * m] : sums.data());
  });
  each_row(rows, [&](int64_t r) {
    for (int64_t t = 1; t < threads; ++t)
      for (int64_t c = r * m; c < (r + 1) * m; c += WIDTH)
        (Vec::loadu(&sums[c]) + Vec::loadu(&more[(t - 1) * rows * m + c])).store(&sums[c]);
  });
}

// run(block) for all: each by one thread if there are several, else by all together.
template <class F>
void each_block(const std::vector<Block>& blocks, const F& run) {
  if (blocks.size() == 1) return run(blocks[0]);
  at::parallel_for(0, blocks.size(), 1, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) run(blocks[b]);
  });
}

}  // namespace
