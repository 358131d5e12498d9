// Four lanes: NEON on 64-bit Arm, SSE2 on every x86-64 (so that the code of the former is run on the latter, too).
// GCC's and Clang's vector extension gives arithmetic, comparisons and shifts for both from one text; the few
// operations that it lacks are named below. The interface is that of Scalar (scalar.h).
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <emmintrin.h>
#endif

#include "scalar.h"

namespace zero {
namespace ZERO_ISA {

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Unsigned4 __attribute__((vector_size(16)));
typedef int32_t Signed4 __attribute__((vector_size(16)));
typedef uint16_t Half4 __attribute__((vector_size(8)));
typedef uint8_t Byte4 __attribute__((vector_size(4)));
typedef double Double2 __attribute__((vector_size(16)));

struct VectorBits {
  Unsigned4 x;

  static ZERO_INLINE VectorBits all(uint32_t s) { return {Unsigned4{s, s, s, s}}; }
  static ZERO_INLINE VectorBits lanes() { return {Unsigned4{0, 1, 2, 3}}; }
  static ZERO_INLINE VectorBits load(const uint16_t* p) {
    Half4 h;
    __builtin_memcpy(&h, p, sizeof h);
    return {__builtin_convertvector(h, Unsigned4)};
  }
  static ZERO_INLINE VectorBits load(const uint8_t* p) {
    Byte4 b;
    __builtin_memcpy(&b, p, sizeof b);
    return {__builtin_convertvector(b, Unsigned4)};
  }
  ZERO_INLINE void store(uint16_t* p) const {
    const Half4 h = __builtin_convertvector(x, Half4);
    __builtin_memcpy(p, &h, sizeof h);
  }
  ZERO_INLINE void store(uint8_t* p) const {
    const Byte4 b = __builtin_convertvector(x, Byte4);
    __builtin_memcpy(p, &b, sizeof b);
  }
  ZERO_INLINE uint32_t largest() const {
    const uint32_t low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
  }
};

ZERO_INLINE VectorBits operator+(VectorBits a, VectorBits b) { return {a.x + b.x}; }
ZERO_INLINE VectorBits operator-(VectorBits a, VectorBits b) { return {a.x - b.x}; }
ZERO_INLINE VectorBits operator*(VectorBits a, VectorBits b) { return {a.x * b.x}; }
ZERO_INLINE VectorBits operator&(VectorBits a, VectorBits b) { return {a.x & b.x}; }
ZERO_INLINE VectorBits operator|(VectorBits a, VectorBits b) { return {a.x | b.x}; }
ZERO_INLINE VectorBits operator^(VectorBits a, VectorBits b) { return {a.x ^ b.x}; }
ZERO_INLINE VectorBits operator<<(VectorBits a, int n) {
  return {a.x << n};
}
ZERO_INLINE VectorBits operator>>(VectorBits a, int n) {
  return {a.x >> n};
}
ZERO_INLINE VectorBits shift_right_signed(VectorBits a, int n) {
  return {(Unsigned4)((Signed4)a.x >> n)};
}
ZERO_INLINE VectorBits select_greater(VectorBits a, VectorBits b, VectorBits yes, VectorBits no) {
  const Unsigned4 mask = (Unsigned4)((Signed4)a.x > (Signed4)b.x);
  return {(mask & yes.x) | (~mask & no.x)};
}
ZERO_INLINE VectorBits keep_where_positive(VectorBits test, VectorBits value) {
  return {(Unsigned4)((Signed4)test.x > 0) & value.x};
}
ZERO_INLINE VectorBits max_signed(VectorBits a, VectorBits b) { return select_greater(a, b, a, b); }

struct Vector {
  using Bits = VectorBits;
  static constexpr int width = 4;
  Float4 x;

  static ZERO_INLINE Vector all(float s) { return {Float4{s, s, s, s}}; }
  static ZERO_INLINE Vector of(Bits bits) { return {(Float4)bits.x}; }
  static ZERO_INLINE Vector load(const float* p) {
    Float4 x;
    __builtin_memcpy(&x, p, sizeof x);
    return {x};
  }
  static ZERO_INLINE Vector load(const BF16* p) { return of(Bits::load(&p->bits) << 16); }
  static ZERO_INLINE Vector load(const F16* p) {
#if defined(__aarch64__)
    return {(Float4)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))};
#else
    return {Float4{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}};
#endif
  }
  static ZERO_INLINE Vector load_joined(const uint16_t* param, const uint16_t* low) {
    return join_master<Vector>(Bits::load(param), Bits::load(low));
  }
  ZERO_INLINE void store_split(uint16_t* param, uint16_t* low) const;
  // To and from memory that only loops of one order see (vec_avx2.h); here there is one order.
  static ZERO_INLINE Vector load_as_is(const float* p) { return load(p); }
  ZERO_INLINE void store_as_is(float* p) const { store(p); }
  ZERO_INLINE void store(float* p) const { __builtin_memcpy(p, &x, sizeof x); }
  ZERO_INLINE void store(BF16* p) const;
  ZERO_INLINE void store(F16* p) const {
#if defined(__aarch64__)
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    for (int i = 0; i < width; ++i) p[i] = narrow_f16(x[i]);
#endif
  }
};

ZERO_INLINE bool any_nan(Vector a) {
  const Signed4 is_nan = a.x != a.x;
  return (is_nan[0] | is_nan[1] | is_nan[2] | is_nan[3]) != 0;
}
ZERO_INLINE VectorBits bits_of(Vector a) { return {(Unsigned4)a.x}; }
ZERO_INLINE Vector operator+(Vector a, Vector b) { return {a.x + b.x}; }
ZERO_INLINE Vector operator-(Vector a, Vector b) { return {a.x - b.x}; }
ZERO_INLINE Vector operator*(Vector a, Vector b) { return {a.x * b.x}; }
ZERO_INLINE Vector operator/(Vector a, Vector b) { return {a.x / b.x}; }
ZERO_INLINE Vector sqrt(Vector a) {
#if defined(__aarch64__)
  return {(Float4)vsqrtq_f32((float32x4_t)a.x)};
#else
  return {(Float4)_mm_sqrt_ps((__m128)a.x)};
#endif
}
ZERO_INLINE void Vector::store(BF16* p) const { bf16_ties_to_even(*this).store(&p->bits); }
ZERO_INLINE void Vector::store_split(uint16_t* param, uint16_t* low) const { store_master_split(*this, param, low); }

using Crossed = Vector;  // there is one order (vec_avx2.h)

// Sixteen fp64 sums of squares; element j of each sixteen goes to lane j.
struct SquareLanes {
  Double2 lane[8];

  ZERO_INLINE void clear() {
    for (int i = 0; i < 8; ++i) lane[i] = Double2{0.0, 0.0};
  }
  template <class T>
  ZERO_INLINE void add16(const T* p) {
    for (int i = 0; i < 4; ++i) {
      const Float4 x = Vector::load(p + 4 * i).x;
      const Double2 low = {x[0], x[1]}, high = {x[2], x[3]};
      lane[2 * i] += low * low;
      lane[2 * i + 1] += high * high;
    }
  }
  ZERO_INLINE void store(double* out) const { __builtin_memcpy(out, lane, sizeof lane); }
};

}  // namespace ZERO_ISA
}  // namespace zero
