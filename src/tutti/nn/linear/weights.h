// Weights of linear layers as they are stored, and their numbers as floats or BFloat16.

#include <limits>

namespace {

constexpr int64_t PIECE = 1024;  // numbers of a row of W that are copied or converted at once
constexpr int64_t NEAR = 512 << 10;  // bytes of x that stay in a core's cache

enum Kind { SAME, INT8, INT4, INT3, INT2, CODES, FLOAT8 };

// Bytes of 64 packed numbers: see `codes`.
constexpr int64_t packed_bytes(Kind kind) { return kind == INT4 ? 32 : kind == INT3 ? 24 : 16; }

struct Weight {
  const void* data;      // (n, k) of the type of x, of int8 or of float8; (n, bytes) of packed numbers
  Kind kind;
  int64_t size, stride;  // bytes of an element; elements between rows
  const float* scales;   // (n) of int8, (n, groups) of packed numbers and of float8
  const uint8_t* zeros;  // (n, groups) of packed numbers, or null
  int64_t group, groups, bits;  // bits: of CODES

  template <class T>
  const T* row(int64_t i) const { return static_cast<const T*>(data) + i * stride; }

  // 16 of n rows from row i on; the last one stands for those that there are not.
  template <class T>
  void rows_from(int64_t i, int64_t n, const T** rows) const {
    for (int64_t j = 0; j < 16; ++j) rows[j] = row<T>(std::min(i + j, n - 1));
  }

  bool packed() const { return kind >= INT4; }
  int64_t bytes() const {  // of 64 numbers
    return kind == CODES ? 8 * bits : kind == FLOAT8 ? 64 : packed() ? packed_bytes(kind) : 64 * size;
  }
  int zero(int64_t at) const {
    return zeros ? zeros[at] : kind == CODES ? 1 << (bits - 1) : kind == INT4 ? 8 : kind == INT3 ? 4 : 2;
  }

  const char* at(int64_t i, int64_t k) const {
    return static_cast<const char*>(data) + i * stride * size + k * bytes() / 64;
  }
};

template <class T>
struct Problem {
  const T* x;
  int64_t stride;  // elements between rows of x
  Weight w;
  const T* bias;
  T* out;
  int64_t m, n, k;
  int64_t first = 0;  // row among those of all problems
};

// int8, without its scale
void widen(const int8_t* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = x[i];
}

// Packed numbers i to i + 31 of a row, of which i is a multiple of 32: of each 64, int4 has the first 32 in the low
// halves of 32 bytes; int2 has number 16 j + b in bits 2 j and 2 j + 1 of byte b; int3 has the low bits as int2, and
// then the high bit of number i in bit i of 8 bytes.
template <Kind KIND>
void codes(const uint8_t* block, int64_t i, uint8_t* q) {
  if (KIND == INT4)
    for (int64_t j = 0; j < 32; ++j) q[j] = (block[j] >> (i % 64 ? 4 : 0)) & 15;
  else
    for (int64_t j = 0; j < 32; ++j) {
      const int64_t at = i % 64 + j;
      q[j] = (block[at % 16] >> (at / 16 * 2)) & 3;
      if (KIND == INT3) q[j] |= ((block[16 + at / 8] >> (at % 8)) & 1) << 2;
    }
}

template <Kind KIND>
void widen_packed(const Weight& w, int64_t row, int64_t begin, int64_t count, float* y) {
  const uint8_t* x = w.row<uint8_t>(row);
  uint8_t q[32];
  for (int64_t i = begin; i < begin + count; i += 32) {
    const int64_t at = row * w.groups + i / w.group;
    const float scale = w.scales[at], zero = w.zero(at);
    codes<KIND>(x + i / 64 * packed_bytes(KIND), i, q);
    for (int64_t j = 0; j < 32; ++j) y[i - begin + j] = scale * (float(q[j]) - zero);
  }
}

#if X86_512
WITH_BFLOAT16 void widen(const int8_t* x, int64_t count, BFloat16* y) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(x + i))));
    const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(x + i + 16))));
    _mm512_storeu_si512(y + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  for (; i < count; ++i) y[i] = float(x[i]);
}

// 64 packed numbers as bytes.
template <Kind KIND>
inline __m512i codes(const uint8_t* block) {
  if (KIND == INT4) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)block));
    const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15));
  }
  const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)block));
  const __m512i shifts = _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0);
  const __m512i low = _mm512_and_si512(_mm512_srlv_epi64(four, shifts), _mm512_set1_epi8(3));
  if (KIND == INT2) return low;
  __mmask64 high;
  std::memcpy(&high, block + 16, sizeof high);
  return _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(4));
}

// By a table of the numbers of a group.
template <Kind KIND>
WITH_BFLOAT16 void widen_packed(const Weight& w, int64_t row, int64_t begin, int64_t count, BFloat16* y) {
  const uint8_t* x = w.row<uint8_t>(row);
  const __m512 steps = _mm512_cvtepi32_ps(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  __m512i table = _mm512_setzero_si512();
  for (int64_t i = begin, known = -1; i < begin + count; i += 64) {
    const __m512i q = codes<KIND>(x + i / 64 * packed_bytes(KIND));
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = row * w.groups + (i + 32 * half) / w.group;
      if (at != known) {
        const __m512 zero = _mm512_set1_ps(w.zero(at));
        const __m512 values = _mm512_mul_ps(_mm512_set1_ps(w.scales[at]), _mm512_sub_ps(steps, zero));
        table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
        known = at;
      }
      const __m512i index = _mm512_cvtepu8_epi16(half ? _mm512_extracti64x4_epi64(q, 1) : _mm512_castsi512_si256(q));
      _mm512_storeu_si512(y + i - begin + 32 * half, _mm512_permutexvar_epi16(index, table));
    }
  }
}
#endif

// Eight codes of a stream of bits, from the lowest bits of the first byte on. left: bytes of the stream from x on.
inline void eight_codes(const uint8_t* x, int64_t bits, int64_t left, uint8_t* q) {
  uint64_t joined = 0;
  if (left >= 8)
    std::memcpy(&joined, x, 8);
  else
    std::memcpy(&joined, x, std::min(bits, left));
  const uint64_t one = (1 << bits) - 1;
#if X86_512
  const __m512i shifts = _mm512_mullo_epi64(_mm512_set1_epi64(bits), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  const __m512i found = _mm512_and_si512(_mm512_srlv_epi64(_mm512_set1_epi64(joined), shifts), _mm512_set1_epi64(one));
  _mm_storel_epi64((__m128i*)q, _mm512_cvtepi64_epi8(found));
#else
  for (int64_t j = 0; j < 8; ++j) q[j] = (joined >> (bits * j)) & one;
#endif
}

// Numbers of float8 (e4m3), without their scales, by the bits of a float, whose exponent is 120 larger.
inline float of_float8(uint8_t x) {
  const uint32_t bits = uint32_t(x & 128) << 24 | uint32_t(x & 127) << 20;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return (x & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : y * 0x1p120f;
}

inline void rounded(const float* x, int64_t count, float* y) { std::copy(x, x + count, y); }
inline void rounded(const float* x, int64_t count, BFloat16* y) {
  int64_t i = 0;
  for (; i + 2 * N <= count; i += 2 * N)
    at::vec::convert_from_float<BFloat16>(Floats::loadu(x + i), Floats::loadu(x + i + N)).store(y + i);
  for (; i < count; ++i) y[i] = x[i];
}

// CODES and FLOAT8, in groups of any size, at most PIECE of them.
template <class C>
void widen_groups(const Weight& w, int64_t row, int64_t begin, int64_t count, C* y) {
  const uint8_t* x = w.row<uint8_t>(row);
  uint8_t q[PIECE + 8];
  float wide[PIECE];
  if (w.kind == CODES && w.bits < 8)
    for (int64_t i = 0; i < count; i += 8) {
      const int64_t at = (begin + i) / 8 * w.bits;
      eight_codes(x + at, w.bits, w.stride - at, q + i);
    }
  else
    std::memcpy(q, x + begin, count);
  for (int64_t i = 0, end; i < count; i = end) {
    const int64_t g = (begin + i) / w.group, at = row * w.groups + g;
    end = std::min(count, (g + 1) * w.group - begin);
    const float scale = w.scales[at], zero = w.zero(at);
    int64_t j = i;
#if X86_512
    for (; w.kind == CODES && j + 16 <= end; j += 16) {
      const __m512 found = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(q + j))));
      _mm512_storeu_ps(wide + j, _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_sub_ps(found, _mm512_set1_ps(zero))));
    }
#endif
    for (; j < end; ++j) wide[j] = scale * (w.kind == FLOAT8 ? of_float8(q[j]) : float(q[j]) - zero);
  }
  rounded(wide, count, y);
}

template <class C>
void widen_packed(const Weight& w, int64_t row, int64_t begin, int64_t count, C* y) {
  if (w.kind >= CODES)
    for (int64_t i = 0; i < count; i += PIECE)
      widen_groups(w, row, begin + i, std::min(PIECE, count - i), y + i);
  else if (w.kind == INT4)
    widen_packed<INT4>(w, row, begin, count, y);
  else if (w.kind == INT3)
    widen_packed<INT3>(w, row, begin, count, y);
  else
    widen_packed<INT2>(w, row, begin, count, y);
}

// BFloat16 as floats, without shuffles where that is faster: of each 32 numbers the 16 at even places come first, and
// zeros follow the last one, so that there are `whole(count)`.
inline int64_t whole(int64_t count) { return (count + 31) / 32 * 32; }
inline void split(const BFloat16* x, int64_t count, float* y) {
#if X86_512
  for (int64_t i = 0; i < count; i += 32) {
    const __mmask32 here = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
    const __m512i both = _mm512_maskz_loadu_epi16(here, x + i);
    _mm512_storeu_si512(y + i, _mm512_slli_epi32(both, 16));
    _mm512_storeu_si512(y + i + 16, _mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
  }
#else
  widen(x, count, y);
#endif
}

// Numbers `begin` to `begin + count` of a row of W as C: in `copy` or, if they are of that type and `copy` is null,
// where they are stored.
template <class C, class T>
const C* numbers(const Weight& w, int64_t row, int64_t begin, int64_t count, C* copy) {
  if (w.kind == INT8)
    widen(w.row<int8_t>(row) + begin, count, copy);
  else if (w.packed())
    widen_packed(w, row, begin, count, copy);
  else if constexpr (!std::is_same_v<C, T>)
    split(w.row<T>(row) + begin, count, copy);
  else if (copy)
    std::copy(w.row<T>(row) + begin, w.row<T>(row) + begin + count, copy);
  else
    return w.row<T>(row) + begin;
  return copy;
}

#if X86_512
// 16 numbers, or those of a mask.
inline __m512 load(const float* x, __mmask16 here) { return _mm512_maskz_loadu_ps(here, x); }
inline __m512 load(const BFloat16* x, __mmask16 here) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, x)), 16));
}
inline void store(float* to, __mmask16 here, __m512 x) { _mm512_mask_storeu_ps(to, here, x); }
inline void store(BFloat16* to, __mmask16 here, __m512 x) {  // also without instructions for BFloat16
  const Halves halves = at::vec::convert_from_float<BFloat16>(Floats(x), Floats(x));
  _mm256_mask_storeu_epi16(to, here, _mm512_castsi512_si256(__m512i(halves)));
}

// The sums of up to 16 products of a row, as numbers of the result from `column` on.
template <class T>
inline __m512 finished(const Problem<T>& p, int64_t column, __mmask16 here, __m512 sums) {
  if (p.w.kind == INT8) sums = _mm512_mul_ps(sums, load(p.w.scales + column, here));
  return p.bias ? _mm512_add_ps(sums, load(p.bias + column, here)) : sums;
}
#endif

}  // namespace
