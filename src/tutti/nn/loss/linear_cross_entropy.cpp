// What a linear layer's cross-entropy makes of its logits between two products (linear_cross_entropy.py), in float32, a
// row at a time, which stays in a cache meanwhile. Threads share the rows.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

using c10::BFloat16;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;

constexpr int64_t STEP = 2 * Floats::size();
constexpr int64_t SUMMED = 128 * STEP;  // numbers after which a sum goes on in float64
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Pair {
  Floats a, b;
};

Pair load(const float* x) { return {Floats::loadu(x), Floats::loadu(x + Floats::size())}; }

Pair load(const BFloat16* x) {
  auto [a, b] = at::vec::convert_to_float(Halves::loadu(x));
  return {a, b};
}

void store(const Pair& y, float* x) {
  y.a.store(x);
  y.b.store(x + Floats::size());
}

void store(const Pair& y, BFloat16* x) { at::vec::convert_from_float<BFloat16>(y.a, y.b).store(x); }

// Call f with `count` numbers, STEP at a time, the last filled up with minus infinity.
template <class T, class F>
void over(const T* x, int64_t count, F f) {
  int64_t i = 0;
  for (; i + STEP <= count; i += STEP) f(load(x + i));
  if (i == count) return;
  T rest[STEP];
  std::fill(std::copy(x + i, x + count, rest), rest + STEP, T(NOTHING));
  f(load(rest));
}

float sum(const Floats& x) {
  return at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return p + q; }, x);
}

// log(sum(exp(x)))
template <class T>
double log_sum(const T* x, int64_t count) {
  Pair most{Floats(NOTHING), Floats(NOTHING)};
  over(x, count, [&](Pair y) { most = {at::vec::maximum(most.a, y.a), at::vec::maximum(most.b, y.b)}; });
  const float top = at::vec::vec_reduce_all<float>(
      [](Floats& p, Floats& q) { return at::vec::maximum(p, q); }, at::vec::maximum(most.a, most.b));
  if (std::isinf(top)) return top;
  double total = 0;
  for (int64_t i = 0; i < count; i += SUMMED) {
    Pair part{Floats(0.f), Floats(0.f)};
    over(x + i, std::min(SUMMED, count - i), [&](Pair y) {
      part = {part.a + (y.a - Floats(top)).exp(), part.b + (y.b - Floats(top)).exp()};
    });
    total += sum(part.a + part.b);
  }
  return top + std::log(total);
}

template <class T>
void reduce_row(const T* x, int64_t count, int64_t column, bool here, float& lse, float& picked) {
  const double before = lse, own = log_sum(x, count), top = std::max(before, own);
  lse = std::isinf(top) ? top : top + std::log(std::exp(before - top) + std::exp(own - top));
  if (std::isnan(own)) lse = own;  // the greater of two is never that
  if (here) picked = x[column];
}

template <class T>
void differentiate_row(T* x, int64_t count, int64_t column, float lse, float slope, float of_label) {
  const auto made = [&](Pair y) {
    return Pair{(y.a - Floats(lse)).exp() * Floats(slope), (y.b - Floats(lse)).exp() * Floats(slope)};
  };
  const float label = std::exp(float(x[column]) - lse) * slope + of_label;
  int64_t i = 0;
  for (; i + STEP <= count; i += STEP) store(made(load(x + i)), x + i);
  if (i < count) {
    T rest[STEP];
    std::fill(std::copy(x + i, x + count, rest), rest + STEP, T(NOTHING));
    store(made(load(rest)), rest);
    std::copy(rest, rest + count - i, x + i);
  }
  x[column] = label;
}

template <class F>
void rows_of(int64_t rows, int64_t columns, F f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(columns, 1)), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) f(i);
  });
}

}  // namespace

// Add the logits of (rows, columns), of BFloat16 (half) or float, rows `stride` apart, to lse, and to picked those of
// labels. column: of each row's label; here: whether it is among these.
extern "C" void reduce(void* logits, int64_t half, int64_t rows, int64_t columns, int64_t stride,
                       const int64_t* column, const bool* here, float* lse, float* picked) {
  rows_of(rows, columns, [&](int64_t i) {
    if (half)
      reduce_row(static_cast<BFloat16*>(logits) + i * stride, columns, column[i], here[i], lse[i], picked[i]);
    else
      reduce_row(static_cast<float*>(logits) + i * stride, columns, column[i], here[i], lse[i], picked[i]);
  });
}

// Gradients of these logits, in their place. of_lse, of_picked: those of lse and picked, so many numbers apart.
extern "C" void differentiate(void* logits, int64_t half, int64_t rows, int64_t columns, int64_t stride,
                              const int64_t* column, const bool* here, const float* lse, const float* of_lse,
                              int64_t apart, const float* of_picked, int64_t beside) {
  rows_of(rows, columns, [&](int64_t i) {
    const float slope = of_lse[i * apart], of_label = here[i] ? of_picked[i * beside] : 0.f;
    if (half)
      differentiate_row(static_cast<BFloat16*>(logits) + i * stride, columns, column[i], lse[i], slope, of_label);
    else
      differentiate_row(static_cast<float*>(logits) + i * stride, columns, column[i], lse[i], slope, of_label);
  });
}
