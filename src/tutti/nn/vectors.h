// What the compiled operators share (compiled.py puts it before each source): vectors of float32 and BFloat16, and the
// instructions of the processor.

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#if defined(CPU_CAPABILITY_AVX512) && defined(__x86_64__) && !defined(TUTTI_GENERIC)
#include <immintrin.h>
#define X86_512 1
#define WITH_BFLOAT16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define WITH_INT8 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#else
#define X86_512 0
#define WITH_BFLOAT16
#endif

#ifndef NAMESPACE
#define NAMESPACE tutti_compiled
#endif

#include "threads.h"

namespace {

using c10::BFloat16;
using tutti_threads::for_parts;
using tutti_threads::take_parts;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;
using Optional = std::optional<at::Tensor>;

constexpr int64_t N = Floats::size();

#if X86_512
#ifdef TUTTI_WITHOUT_BFLOAT16
[[maybe_unused]] bool multiplies_bfloat16() { return false; }
#else
[[maybe_unused]] bool multiplies_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
#endif
[[maybe_unused]] bool multiplies_int8() { return __builtin_cpu_supports("avx512vnni"); }
#else
[[maybe_unused]] bool multiplies_bfloat16() { return false; }
[[maybe_unused]] bool multiplies_int8() { return false; }
#endif

// The sum and the greatest number of a vector.
[[maybe_unused]] float sum(const Floats& x) {
  return at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return p + q; }, x);
}

[[maybe_unused]] float greatest(const Floats& x) {
  return at::vec::vec_reduce_all<float>([](Floats& p, Floats& q) { return at::vec::maximum(p, q); }, x);
}

// `count` numbers as float32.
[[maybe_unused]] void widen(const BFloat16* x, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + Halves::size() <= count; i += Halves::size()) {
    auto [a, b] = at::vec::convert_to_float(Halves::loadu(x + i));
    a.store(y + i);
    b.store(y + i + N);
  }
  for (; i < count; ++i) y[i] = x[i];
}

[[maybe_unused]] void widen(const float* x, int64_t count, float* y) { std::copy(x, x + count, y); }

#if X86_512
// 16 rows of 4 QUARTERS numbers of 4 bytes become as many columns. row: where row i begins. A quarter of a register is
// loaded at a time: shuffles are scarcer than loads.
template <int QUARTERS = 4, class F>
[[maybe_unused]] inline __attribute__((always_inline)) void transpose_16(F row, __m512i* columns) {
  const auto quarter = [&](int i, int q) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(i)) + q);
  };
  __m512i a[4 * QUARTERS];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int q = 0; q < QUARTERS; ++q) {
      __m512i x = _mm512_castsi128_si512(quarter(i, q));
      x = _mm512_inserti32x4(x, quarter(i + 4, q), 1);
      x = _mm512_inserti32x4(x, quarter(i + 8, q), 2);
      a[4 * q + i] = _mm512_inserti32x4(x, quarter(i + 12, q), 3);
    }
#pragma GCC unroll 4
  for (int q = 0; q < 4 * QUARTERS; q += 4) {
    const __m512i low = _mm512_unpacklo_epi32(a[q], a[q + 1]), high = _mm512_unpackhi_epi32(a[q], a[q + 1]);
    const __m512i next_low = _mm512_unpacklo_epi32(a[q + 2], a[q + 3]);
    const __m512i next_high = _mm512_unpackhi_epi32(a[q + 2], a[q + 3]);
    columns[q] = _mm512_unpacklo_epi64(low, next_low), columns[q + 1] = _mm512_unpackhi_epi64(low, next_low);
    columns[q + 2] = _mm512_unpacklo_epi64(high, next_high), columns[q + 3] = _mm512_unpackhi_epi64(high, next_high);
  }
}
#endif

// With rows that are contiguous each.
[[maybe_unused]] at::Tensor in_rows(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace
