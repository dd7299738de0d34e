// Drawing tokens from logits (sample.py), a row at a time: exponentials, their histogram by magnitude, and the draw.
//
// A cut is a number e and a place i. It keeps the numbers greater than e, and those equal to e up to place i. It is
// found in the histogram: only the numbers of the bucket that it falls into are sorted. Threads share the rows.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "threads.h"

namespace {

using Floats = at::vec::Vectorized<float>;

constexpr int64_t N = Floats::size();
constexpr int SHIFT = 20, BUCKETS = 1 << (31 - SHIFT);  // by exponent and three binary digits

int bucket_of(float e) {
  uint32_t bits;
  std::memcpy(&bits, &e, sizeof bits);
  return bits >> SHIFT;
}

struct Cut {
  float e;
  int64_t place;

  bool keeps(float x, int64_t i) const { return x > e || (x == e && i <= place); }
};

struct Row {
  const float* logits;
  int64_t count;
  std::vector<float> e;
  std::array<int64_t, BUCKETS> counts;
  std::array<double, BUCKETS> masses;
  std::vector<Cut> sorted;

  explicit Row(int64_t count) : count(count), e(count) {}

  // The greatest logit and its first place; NaN if there is one.
  std::pair<float, int64_t> greatest() const {
    Floats top(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + N <= count; i += N) top = at::vec::maximum(top, Floats::loadu(logits + i));
    float most = at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return at::vec::maximum(p, q); }, top);
    for (; i < count && !std::isnan(most); ++i) most = std::isnan(logits[i]) ? logits[i] : std::max(most, logits[i]);
    return {most, std::find(logits, logits + count, most) - logits};
  }

  void exponentials(float most, float temperature) {
    for (int64_t i = 0; i < count; i += N) {
      const int64_t now = std::min(N, count - i);
      ((Floats::loadu(logits + i, now) - Floats(most)) / Floats(temperature)).exp().store(&e[i], now);
    }
  }

  void histogram() {
    counts.fill(0);
    masses.fill(0);
    for (int64_t i = 0; i < count; ++i) {
      const int b = bucket_of(e[i]);
      ++counts[b];
      masses[b] += e[i];
    }
  }

  // The cut after which `number` numbers are kept, or their mass is at least `mass`; and the mass that it keeps.
  std::pair<Cut, double> cut(int64_t number, double mass) {
    int64_t kept = 0;
    double total = 0;
    for (int b = BUCKETS - 1; b >= 0; --b) {
      if (!counts[b]) continue;
      if (kept + counts[b] < number && total + masses[b] < mass) {
        kept += counts[b];
        total += masses[b];
        continue;
      }
      sorted.clear();
      for (int64_t i = 0; i < count; ++i)
        if (bucket_of(e[i]) == b) sorted.push_back({e[i], i});
      std::sort(sorted.begin(), sorted.end(),
                [](const Cut& x, const Cut& y) { return x.e > y.e || (x.e == y.e && x.place < y.place); });
      for (const Cut& last : sorted) {
        total += last.e;
        if (++kept >= number || total >= mass) return {last, total};
      }
    }
    return {{0.f, count}, total};
  }

  int64_t draw(const Cut& last, float least, double uniform) const {
    double total = 0;
    const auto keeps = [&](int64_t i) { return e[i] > 0.f && e[i] >= least && last.keeps(e[i], i); };
    for (int64_t i = 0; i < count; ++i)
      if (keeps(i)) total += e[i];
    const double wanted = uniform * total;
    int64_t found = 0;
    total = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!keeps(i)) continue;
      found = i;
      if ((total += e[i]) > wanted) break;
    }
    return found;
  }

  int64_t sample(float temperature, int64_t top_k, double top_p, float min_p, double uniform) {
    const auto [most, first] = greatest();
    if (!(most > -std::numeric_limits<float>::infinity())) return -1;
    if (temperature < std::numeric_limits<float>::min() || std::isinf(most)) return first;
    exponentials(most, temperature);
    constexpr double all = std::numeric_limits<double>::infinity();
    Cut last{0.f, count};
    const bool few = top_k > 0 && top_k < count;
    if (few || top_p < 1) histogram();
    double mass = 0;
    if (few) {
      std::tie(last, mass) = cut(top_k, all);
    } else if (top_p < 1) {
      for (double m : masses) mass += m;
    }
    if (top_p < 1) last = cut(count + 1, top_p * mass).first;
    return draw(last, min_p, uniform);
  }
};

}  // namespace

// logits: (rows, count), rows `stride` apart; the other operands: one number for each row.
extern "C" void sample(const float* logits, int64_t rows, int64_t count, int64_t stride, const float* temperature,
                       const int64_t* top_k, const float* top_p, const float* min_p, const float* uniform,
                       int64_t* out) {
  tutti_threads::for_parts(rows, 1, [&](int64_t r, int64_t end) {
    Row row(count);
    for (; r < end; ++r) {
      row.logits = logits + r * stride;
      out[r] = row.sample(temperature[r], top_k[r], top_p[r], min_p[r], uniform[r]);
    }
  });
}
