// Sixteen lanes: AVX-512 (F, BW, VL, DQ). The interface is that of Scalar (scalar.h). The conversion instructions of
// AVX512-BF16 are not used: they flush subnormals to zero and know ties to even only, and integers are not slower
// in a step that waits for memory.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace zero {
namespace ZERO_ISA {

struct VectorBits {
  __m512i x;

  static ZERO_INLINE VectorBits all(uint32_t s) { return {_mm512_set1_epi32(static_cast<int>(s))}; }
  static ZERO_INLINE VectorBits lanes() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
  }
  static ZERO_INLINE VectorBits load(const uint16_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static ZERO_INLINE VectorBits load(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  ZERO_INLINE void store(uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  ZERO_INLINE void store(uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  ZERO_INLINE uint32_t largest() const { return _mm512_reduce_max_epu32(x); }
};

ZERO_INLINE VectorBits operator+(VectorBits a, VectorBits b) { return {_mm512_add_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits operator-(VectorBits a, VectorBits b) { return {_mm512_sub_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits operator*(VectorBits a, VectorBits b) { return {_mm512_mullo_epi32(a.x, b.x)}; }
ZERO_INLINE VectorBits operator&(VectorBits a, VectorBits b) { return {_mm512_and_si512(a.x, b.x)}; }
ZERO_INLINE VectorBits operator|(VectorBits a, VectorBits b) { return {_mm512_or_si512(a.x, b.x)}; }
ZERO_INLINE VectorBits operator^(VectorBits a, VectorBits b) { return {_mm512_xor_si512(a.x, b.x)}; }
ZERO_INLINE VectorBits operator<<(VectorBits a, int n) {
  return {_mm512_slli_epi32(a.x, n)};
}
ZERO_INLINE VectorBits operator>>(VectorBits a, int n) {
  return {_mm512_srli_epi32(a.x, n)};
}
ZERO_INLINE VectorBits shift_right_signed(VectorBits a, int n) {
  return {_mm512_srai_epi32(a.x, n)};
}
ZERO_INLINE VectorBits select_greater(VectorBits a, VectorBits b, VectorBits yes, VectorBits no) {
  return {_mm512_mask_mov_epi32(no.x, _mm512_cmpgt_epi32_mask(a.x, b.x), yes.x)};
}
ZERO_INLINE VectorBits keep_where_positive(VectorBits test, VectorBits value) {
  return {_mm512_maskz_mov_epi32(_mm512_cmpgt_epi32_mask(test.x, _mm512_setzero_si512()), value.x)};
}
ZERO_INLINE VectorBits max_signed(VectorBits a, VectorBits b) { return {_mm512_max_epi32(a.x, b.x)}; }

struct Vector {
  using Bits = VectorBits;
  static constexpr int width = 16;
  __m512 x;

  static ZERO_INLINE Vector all(float s) { return {_mm512_set1_ps(s)}; }
  static ZERO_INLINE Vector of(Bits bits) { return {_mm512_castsi512_ps(bits.x)}; }
  static ZERO_INLINE Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static ZERO_INLINE Vector load(const BF16* p) { return of(Bits::load(&p->bits) << 16); }
  static ZERO_INLINE Vector load(const F16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static ZERO_INLINE Vector load_joined(const uint16_t* param, const uint16_t* low) {
    return join_master<Vector>(Bits::load(param), Bits::load(low));
  }
  ZERO_INLINE void store_split(uint16_t* param, uint16_t* low) const;
  // To and from memory that only loops of one order see (vec_avx2.h); here there is one order.
  static ZERO_INLINE Vector load_as_is(const float* p) { return load(p); }
  ZERO_INLINE void store_as_is(float* p) const { store(p); }
  ZERO_INLINE void store(float* p) const { _mm512_storeu_ps(p, x); }
  ZERO_INLINE void store(BF16* p) const;
  ZERO_INLINE void store(F16* p) const {
    const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
  }
};

ZERO_INLINE bool any_nan(Vector a) { return _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q) != 0; }
ZERO_INLINE VectorBits bits_of(Vector a) { return {_mm512_castps_si512(a.x)}; }
ZERO_INLINE Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.x, b.x)}; }
ZERO_INLINE Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.x, b.x)}; }
ZERO_INLINE Vector sqrt(Vector a) { return {_mm512_sqrt_ps(a.x)}; }
ZERO_INLINE void Vector::store(BF16* p) const { bf16_ties_to_even(*this).store(&p->bits); }
ZERO_INLINE void Vector::store_split(uint16_t* param, uint16_t* low) const { store_master_split(*this, param, low); }

using Crossed = Vector;  // there is one order (vec_avx2.h)

// Sixteen fp64 sums of squares; element j of each sixteen goes to lane j. The square of an fp32 number is exact in
// fp64, so that fused or not gives the same bits.
struct SquareLanes {
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
};

}  // namespace ZERO_ISA
}  // namespace zero
