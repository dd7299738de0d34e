// What the compiled operators share (compiled.py puts it before each source): vectors of float32 and BFloat16, and the
// instructions of the processor.

#include <ATen/Parallel.h>
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

namespace {

using c10::BFloat16;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;
using Optional = std::optional<at::Tensor>;

constexpr int64_t N = Floats::size();

#if X86_512
[[maybe_unused]] bool multiplies_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
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

// With rows that are contiguous each.
[[maybe_unused]] at::Tensor in_rows(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace
