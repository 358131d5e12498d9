// Eight lanes: AVX2 with F16C. The interface is that of Scalar (scalar.h).
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace zero {
namespace ZERO_ISA {

struct VectorBits {
  __m256i x;

  static ZERO_INLINE VectorBits all(uint32_t s) { return {_mm256_set1_epi32(static_cast<int>(s))}; }
  static ZERO_INLINE VectorBits lanes() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static ZERO_INLINE VectorBits load(const uint16_t* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static ZERO_INLINE VectorBits load(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  // Both stores: all lanes hold a value that fits (packus saturates others).
  ZERO_INLINE void store(uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed());
  }
  ZERO_INLINE void store(uint8_t* p) const {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(packed(), packed()));
  }
  ZERO_INLINE __m128i packed() const {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  ZERO_INLINE uint32_t largest() const {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  }
};

ZERO_INLINE VectorBits operator+(VectorBits a, VectorBits b) { return {_mm256_add_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits operator-(VectorBits a, VectorBits b) { return {_mm256_sub_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits operator*(VectorBits a, VectorBits b) { return {_mm256_mullo_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits operator&(VectorBits a, VectorBits b) { return {_mm256_and_si256(a.x, b.x)}; }
ZERO_INLINE VectorBits operator|(VectorBits a, VectorBits b) { return {_mm256_or_si256(a.x, b.x)}; }
ZERO_INLINE VectorBits operator^(VectorBits a, VectorBits b) { return {_mm256_xor_si256(a.x, b.x)}; }
ZERO_INLINE VectorBits operator<<(VectorBits a, int n) {
  return {_mm256_slli_epi32(a.x, n)};
}
ZERO_INLINE VectorBits operator>>(VectorBits a, int n) {
  return {_mm256_srli_epi32(a.x, n)};
}
ZERO_INLINE VectorBits shift_right_signed(VectorBits a, int n) {
  return {_mm256_srai_epi32(a.x, n)};
}
ZERO_INLINE VectorBits select_greater(VectorBits a, VectorBits b, VectorBits yes, VectorBits no) {
  return {_mm256_blendv_epi8(no.x, yes.x, _mm256_cmpgt_epi32(a.x, b.x))};
}
ZERO_INLINE VectorBits keep_where_positive(VectorBits test, VectorBits value) {
  return {_mm256_and_si256(_mm256_cmpgt_epi32(test.x, _mm256_setzero_si256()), value.x)};
}
ZERO_INLINE VectorBits max_signed(VectorBits a, VectorBits b) { return {_mm256_max_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits min_signed(VectorBits a, VectorBits b) { return {_mm256_min_epi32(a.x, b.x)}; }

struct Vector {
  using Bits = VectorBits;
  static constexpr int width = 8;
  __m256 x;

  static ZERO_INLINE Vector all(float s) { return {_mm256_set1_ps(s)}; }
  static ZERO_INLINE Vector of(Bits bits) { return {_mm256_castsi256_ps(bits.x)}; }
  static ZERO_INLINE Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static ZERO_INLINE Vector load(const BF16* p) { return of(Bits::load(&p->bits) << 16); }
  static ZERO_INLINE Vector load(const F16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  ZERO_INLINE void store(float* p) const { _mm256_storeu_ps(p, x); }
  ZERO_INLINE void store(BF16* p) const;
  ZERO_INLINE void store(F16* p) const {
    const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
  }
};

ZERO_INLINE VectorBits bits_of(Vector a) { return {_mm256_castps_si256(a.x)}; }
ZERO_INLINE Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.x, b.x)}; }
ZERO_INLINE Vector sqrt(Vector a) { return {_mm256_sqrt_ps(a.x)}; }
ZERO_INLINE void Vector::store(BF16* p) const { bf16_ties_to_even(*this).store(&p->bits); }

// Sixteen fp64 sums of squares; element j of each sixteen goes to lane j. The square of an fp32 number is exact in
// fp64, so that fused or not gives the same bits.
struct SquareLanes {
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
};

}  // namespace ZERO_ISA
}  // namespace zero
