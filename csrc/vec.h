// One vector type per instruction set, all with the same small interface: `width` fp32 lanes, load and store of
// fp32, bf16 and fp16, and + - * / sqrt. `Scalar` (width 1) is there in every build, for the tails.
//
// Narrowing rounds to nearest, ties to even, subnormals kept. NaN: bf16 becomes 0x7FC0 (as c10::BFloat16 does; the
// vectorized paths of torch give other NaNs), fp16 keeps sign and leading payload bits and becomes quiet (as F16C).
//
// The file is compiled once per instruction set, with -DZERO_ISA=<name>; everything lives in a namespace of that
// name, and no inline function of the standard library is used (cpu_kernels.h says why).
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "adam_math.h"  // ZERO_INLINE

#ifndef ZERO_ISA
#error "compile with -DZERO_ISA=scalar, avx2 or avx512"
#endif

namespace zero {
namespace ZERO_ISA {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

ZERO_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
ZERO_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

ZERO_INLINE float widen(BF16 h) { return float_of(static_cast<uint32_t>(h.bits) << 16); }

ZERO_INLINE float widen(F16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t exponent = (h.bits >> 10) & 31u;
  const uint32_t mantissa = h.bits & 0x3FFu;
  if (exponent == 31u) {  // inf, or NaN made quiet
    return float_of(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x00400000u : 0u));
  }
  if (exponent == 0u) {  // zero or subnormal: a small integer times 2^-24, exact
    return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  }
  return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

ZERO_INLINE BF16 narrow_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;  // a carry into the exponent is right, up to inf
  return BF16{static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}

ZERO_INLINE F16 narrow_f16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7FFFFFFFu;
  uint32_t h;
  if (a > 0x7F800000u) {
    h = 0x7E00u | ((a >> 13) & 0x3FFu);
  } else if (a >= 0x477FF000u) {  // 65520, half way above the largest fp16, and all above
    h = 0x7C00u;
  } else if (a >= 0x38800000u) {  // normal: 2^-14 and above
    h = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  } else {  // subnormal: the last place of numbers in [0.5, 1) is 2^-24, so the addition itself rounds
    h = bits_of(float_of(a) + 0.5f) - 0x3F000000u;
  }
  return F16{static_cast<uint16_t>(sign | h)};
}

struct Scalar {
  static constexpr int width = 1;
  float x;

  static ZERO_INLINE Scalar all(float s) { return {s}; }
  static ZERO_INLINE Scalar load(const float* p) { return {*p}; }
  static ZERO_INLINE Scalar load(const BF16* p) { return {widen(*p)}; }
  static ZERO_INLINE Scalar load(const F16* p) { return {widen(*p)}; }
  ZERO_INLINE void store(float* p) const { *p = x; }
  ZERO_INLINE void store(BF16* p) const { *p = narrow_bf16(x); }
  ZERO_INLINE void store(F16* p) const { *p = narrow_f16(x); }
};

ZERO_INLINE Scalar operator+(Scalar a, Scalar b) { return {a.x + b.x}; }
ZERO_INLINE Scalar operator-(Scalar a, Scalar b) { return {a.x - b.x}; }
ZERO_INLINE Scalar operator*(Scalar a, Scalar b) { return {a.x * b.x}; }
ZERO_INLINE Scalar operator/(Scalar a, Scalar b) { return {a.x / b.x}; }
ZERO_INLINE Scalar sqrt(Scalar a) { return {__builtin_sqrtf(a.x)}; }

#if defined(__AVX512F__)

struct Vector {
  static constexpr int width = 16;
  __m512 x;

  static ZERO_INLINE Vector all(float s) { return {_mm512_set1_ps(s)}; }
  static ZERO_INLINE Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static ZERO_INLINE Vector load(const BF16* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
  static ZERO_INLINE Vector load(const F16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  ZERO_INLINE void store(float* p) const { _mm512_storeu_ps(p, x); }
  ZERO_INLINE void store(BF16* p) const {
    // By integers: the instruction of AVX512-BF16 flushes subnormals to zero.
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i h = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    h = _mm512_srli_epi32(h, 16);
    h = _mm512_mask_mov_epi32(h, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(h));
  }
  ZERO_INLINE void store(F16* p) const {
    const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
  }
};

ZERO_INLINE Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.x, b.x)}; }
ZERO_INLINE Vector sqrt(Vector a) { return {_mm512_sqrt_ps(a.x)}; }

#elif defined(__AVX2__)

struct Vector {
  static constexpr int width = 8;
  __m256 x;

  static ZERO_INLINE Vector all(float s) { return {_mm256_set1_ps(s)}; }
  static ZERO_INLINE Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static ZERO_INLINE Vector load(const BF16* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
  }
  static ZERO_INLINE Vector load(const F16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  ZERO_INLINE void store(float* p) const { _mm256_storeu_ps(p, x); }
  ZERO_INLINE void store(BF16* p) const {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i h = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    h = _mm256_srli_epi32(h, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    h = _mm256_blendv_epi8(h, _mm256_set1_epi32(0x7FC0), nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  ZERO_INLINE void store(F16* p) const {
    const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
  }
};

ZERO_INLINE Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.x, b.x)}; }
ZERO_INLINE Vector sqrt(Vector a) { return {_mm256_sqrt_ps(a.x)}; }

#else

using Vector = Scalar;

#endif

// Sixteen fp64 sums of squares; element j of each sixteen goes to lane j. The square of an fp32 number is exact in
// fp64, so that fused or not gives the same bits.
struct SquareLanes {
#if defined(__AVX512F__)
  __m512d lane[2];

  ZERO_INLINE void clear() { lane[0] = lane[1] = _mm512_setzero_pd(); }
  template <class T>
  ZERO_INLINE void add16(const T* p) {
    const __m512 x = Vector::load(p).x;
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    lane[0] = _mm512_fmadd_pd(low, low, lane[0]);
    lane[1] = _mm512_fmadd_pd(high, high, lane[1]);
  }
  ZERO_INLINE void store(double* out) const {
    _mm512_storeu_pd(out, lane[0]);
    _mm512_storeu_pd(out + 8, lane[1]);
  }
#elif defined(__AVX2__)
  __m256d lane[4];

  ZERO_INLINE void clear() { lane[0] = lane[1] = lane[2] = lane[3] = _mm256_setzero_pd(); }
  template <class T>
  ZERO_INLINE void add16(const T* p) {
    add8(Vector::load(p).x, lane[0], lane[1]);
    add8(Vector::load(p + 8).x, lane[2], lane[3]);
  }
  static ZERO_INLINE void add8(__m256 x, __m256d& low_sum, __m256d& high_sum) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    low_sum = _mm256_fmadd_pd(low, low, low_sum);
    high_sum = _mm256_fmadd_pd(high, high, high_sum);
  }
  ZERO_INLINE void store(double* out) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, lane[i]);
  }
#else
  double lane[16];

  ZERO_INLINE void clear() {
    for (int i = 0; i < 16; ++i) lane[i] = 0.0;
  }
  template <class T>
  ZERO_INLINE void add16(const T* p) {
    for (int i = 0; i < 16; ++i) {
      const double x = Scalar::load(p + i).x;
      lane[i] += x * x;
    }
  }
  ZERO_INLINE void store(double* out) const {
    for (int i = 0; i < 16; ++i) out[i] = lane[i];
  }
#endif
};

}  // namespace ZERO_ISA
}  // namespace zero
