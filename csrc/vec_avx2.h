// Sixteen lanes in two registers: AVX2 with F16C. In pairs, since sixteen 16-bit numbers are one register: to widen and
// to narrow them costs half of the shuffles, for which these processors have one or two units, that a division keeps
// busy as well. The interface is that of Scalar (scalar.h).
//
// Two orders. The instructions that widen and narrow 16-bit numbers in registers work on halves of registers, so they
// leave the sixteen elements crossed. Putting them in order costs a shuffle each time; to load and to store fp32
// numbers crossed costs two more moves. So `Vector` is in order, and `Crossed` for loops with many 16-bit arrays.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace zero {
namespace ZERO_ISA {

enum Order {
  kInOrder,  // elements 0-7, then 8-15
  kCrossed,  // elements 0-3 and 8-11, then 4-7 and 12-15
};

template <Order order>
struct PairBits {
  __m256i a, b;

  static ZERO_INLINE PairBits all(uint32_t s) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(s));
    return {x, x};
  }
  static ZERO_INLINE PairBits lanes() {
    if (order == kCrossed) {
      return {_mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11), _mm256_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15)};
    }
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
  }
  static ZERO_INLINE PairBits load(const uint16_t* p) { return interleaved(sixteen(p), _mm256_setzero_si256()); }
  static ZERO_INLINE PairBits load(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return interleaved(arranged(x), _mm256_setzero_si256());
  }
  // Both stores: all lanes hold a value that fits (packus saturates others).
  ZERO_INLINE void store(uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), arranged(packed()));
  }
  ZERO_INLINE void store(uint8_t* p) const {
    const __m256i h = arranged(packed());
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  ZERO_INLINE uint32_t largest() const {
    const __m256i both = _mm256_max_epu32(a, b);
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  }

  // Between memory and registers of sixteen 16-bit numbers: what packed() gives and interleaved() takes has, for
  // kInOrder, its quarters as 0, 2, 1, 3; the same exchange leads there and back.
  static ZERO_INLINE __m256i arranged(__m256i x) {
    return order == kInOrder ? _mm256_permute4x64_epi64(x, 0xD8) : x;
  }
  static ZERO_INLINE __m256i sixteen(const void* p) {
    return arranged(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  ZERO_INLINE __m256i packed() const { return _mm256_packus_epi32(a, b); }
  static ZERO_INLINE PairBits interleaved(__m256i low, __m256i high) {
    return {_mm256_unpacklo_epi16(low, high), _mm256_unpackhi_epi16(low, high)};
  }
};

template <Order order>
ZERO_INLINE PairBits<order> operator+(PairBits<order> l, PairBits<order> r) {
  return {_mm256_add_epi32(l.a, r.a), _mm256_add_epi32(l.b, r.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator-(PairBits<order> l, PairBits<order> r) {
  return {_mm256_sub_epi32(l.a, r.a), _mm256_sub_epi32(l.b, r.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator*(PairBits<order> l, PairBits<order> r) {
  return {_mm256_mullo_epi32(l.a, r.a), _mm256_mullo_epi32(l.b, r.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator&(PairBits<order> l, PairBits<order> r) {
  return {_mm256_and_si256(l.a, r.a), _mm256_and_si256(l.b, r.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator|(PairBits<order> l, PairBits<order> r) {
  return {_mm256_or_si256(l.a, r.a), _mm256_or_si256(l.b, r.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator^(PairBits<order> l, PairBits<order> r) {
  return {_mm256_xor_si256(l.a, r.a), _mm256_xor_si256(l.b, r.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator<<(PairBits<order> x, int n) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
template <Order order>
ZERO_INLINE PairBits<order> operator>>(PairBits<order> x, int n) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
template <Order order>
ZERO_INLINE PairBits<order> shift_right_signed(PairBits<order> x, int n) {
  return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
ZERO_INLINE __m256i select_greater(__m256i l, __m256i r, __m256i yes, __m256i no) {
  return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(l, r));
}
template <Order order>
ZERO_INLINE PairBits<order> select_greater(PairBits<order> l, PairBits<order> r, PairBits<order> yes,
                                           PairBits<order> no) {
  return {select_greater(l.a, r.a, yes.a, no.a), select_greater(l.b, r.b, yes.b, no.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> keep_where_positive(PairBits<order> test, PairBits<order> value) {
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_and_si256(_mm256_cmpgt_epi32(test.a, zero), value.a),
          _mm256_and_si256(_mm256_cmpgt_epi32(test.b, zero), value.b)};
}
template <Order order>
ZERO_INLINE PairBits<order> max_signed(PairBits<order> l, PairBits<order> r) {
  return {_mm256_max_epi32(l.a, r.a), _mm256_max_epi32(l.b, r.b)};
}

// Halves of registers: elements p[0..3] and q[0..3].
ZERO_INLINE __m256 load_halves(const float* p, const float* q) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(q), 1);
}
ZERO_INLINE void store_halves(__m256 x, float* p, float* q) {
  _mm_storeu_ps(p, _mm256_castps256_ps128(x));
  _mm_storeu_ps(q, _mm256_extractf128_ps(x, 1));
}

template <Order order>
struct Pair {
  using Bits = PairBits<order>;
  static constexpr int width = 16;
  __m256 a, b;

  static ZERO_INLINE Pair all(float s) {
    const __m256 x = _mm256_set1_ps(s);
    return {x, x};
  }
  static ZERO_INLINE Pair of(Bits bits) { return {_mm256_castsi256_ps(bits.a), _mm256_castsi256_ps(bits.b)}; }
  static ZERO_INLINE Pair load(const float* p) {
    if (order == kCrossed) return {load_halves(p, p + 8), load_halves(p + 4, p + 12)};
    return load_as_is(p);
  }
  static ZERO_INLINE Pair load(const BF16* p) {
    return of(Bits::interleaved(_mm256_setzero_si256(), Bits::sixteen(p)));
  }
  static ZERO_INLINE Pair load(const F16* p) {
    const __m128i* const h = reinterpret_cast<const __m128i*>(p);
    const __m256 first = _mm256_cvtph_ps(_mm_loadu_si128(h)), second = _mm256_cvtph_ps(_mm_loadu_si128(h + 1));
    if (order == kInOrder) return {first, second};
    return {_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31)};
  }
  // join_master (format_math.h) while the halves still are 16 bits wide.
  static ZERO_INLINE Pair load_joined(const uint16_t* param, const uint16_t* low) {
    const __m256i lower = Bits::sixteen(low);
    const __m256i minus_carry = _mm256_srai_epi16(lower, 15);
    return of(Bits::interleaved(lower, _mm256_add_epi16(Bits::sixteen(param), minus_carry)));
  }
  // To and from memory that only loops of this order see.
  static ZERO_INLINE Pair load_as_is(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  ZERO_INLINE void store_as_is(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  ZERO_INLINE void store(float* p) const {
    if (order == kInOrder) return store_as_is(p);
    store_halves(a, p, p + 8);
    store_halves(b, p + 4, p + 12);
  }
  ZERO_INLINE void store(BF16* p) const { bf16_ties_to_even(*this).store(&p->bits); }
  ZERO_INLINE void store(F16* p) const {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m128i first = _mm256_cvtps_ph(a, nearest), second = _mm256_cvtps_ph(b, nearest);
    __m128i* const h = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(h, order == kInOrder ? first : _mm_unpacklo_epi64(first, second));
    _mm_storeu_si128(h + 1, order == kInOrder ? second : _mm_unpackhi_epi64(first, second));
  }
  // split_master (format_math.h), the carry added where the halves are 16 bits wide.
  ZERO_INLINE void store_split(uint16_t* param, uint16_t* low) const {
    const Bits u = clean_bits(*this);
    const __m256i lower = (u & Bits::all(0xFFFFu)).packed();
    const __m256i carry_as_minus_one = _mm256_srai_epi16(lower, 15);
    const __m256i upper = _mm256_sub_epi16((u >> 16).packed(), carry_as_minus_one);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(param), Bits::arranged(upper));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), Bits::arranged(lower));
  }
};

template <Order order>
ZERO_INLINE bool any_nan(Pair<order> x) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x.a, x.b, _CMP_UNORD_Q)) != 0;
}
template <Order order>
ZERO_INLINE PairBits<order> bits_of(Pair<order> x) {
  return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
template <Order order>
ZERO_INLINE Pair<order> operator+(Pair<order> l, Pair<order> r) {
  return {_mm256_add_ps(l.a, r.a), _mm256_add_ps(l.b, r.b)};
}
template <Order order>
ZERO_INLINE Pair<order> operator-(Pair<order> l, Pair<order> r) {
  return {_mm256_sub_ps(l.a, r.a), _mm256_sub_ps(l.b, r.b)};
}
template <Order order>
ZERO_INLINE Pair<order> operator*(Pair<order> l, Pair<order> r) {
  return {_mm256_mul_ps(l.a, r.a), _mm256_mul_ps(l.b, r.b)};
}
template <Order order>
ZERO_INLINE Pair<order> operator/(Pair<order> l, Pair<order> r) {
  return {_mm256_div_ps(l.a, r.a), _mm256_div_ps(l.b, r.b)};
}
template <Order order>
ZERO_INLINE Pair<order> sqrt(Pair<order> x) {
  return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)};
}

using Vector = Pair<kInOrder>;
using Crossed = Pair<kCrossed>;

// Sixteen fp64 sums of squares; element j of each sixteen goes to lane j. The square of an fp32 number is exact in
// fp64, so that fused or not gives the same bits.
struct SquareLanes {
  __m256d lane[4];

  ZERO_INLINE void clear() { lane[0] = lane[1] = lane[2] = lane[3] = _mm256_setzero_pd(); }
  template <class T>
  ZERO_INLINE void add16(const T* p) {
    const Vector x = Vector::load(p);
    add8(x.a, lane[0], lane[1]);
    add8(x.b, lane[2], lane[3]);
  }
  // In the order that unpacking leaves: elements 0-3 and 8-11, then 4-7 and 12-15.
  ZERO_INLINE void add16(const BF16* p) {
    const __m256i zero = _mm256_setzero_si256(), x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    add8(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)), lane[0], lane[2]);
    add8(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x)), lane[1], lane[3]);
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
