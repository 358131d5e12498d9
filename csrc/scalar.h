// One lane: the vector type of width 1, for tails, for builds without vectors, and for CUDA's threads. It shows the
// interface that every vector type V has: `width` fp32 lanes with + - * / and sqrt, V::Bits with the same number of
// 32-bit integer lanes, and loads and stores of fp32, bf16, fp16 and of integers of 8 and 16 bits.
//
// Narrowing rounds to nearest, ties to even, subnormals kept. NaN: bf16 becomes 0x7FC0 (as c10::BFloat16 does; the
// vectorized paths of torch give other NaNs), fp16 keeps sign and leading payload bits and becomes quiet (as F16C).
//
// The file is compiled once per instruction set, with -DZERO_ISA=<name>; everything lives in a namespace of that
// name, and no inline function of the standard library is used (cpu_kernels.h says why).
#pragma once

#include <cstdint>

#include "jobs.h"

#ifndef ZERO_ISA
#error "compile with -DZERO_ISA=<instruction set> (or cuda)"
#endif

namespace zero {
namespace ZERO_ISA {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// Calls `body` with a number of this dtype.
template <class Body>
ZERO_INLINE void with_type(int dtype, const Body& body) {
  switch (dtype) {
    case kBF16: return body(BF16{});
    case kF16: return body(F16{});
    default: return body(float{});
  }
}

ZERO_INLINE uint32_t pattern(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
#endif
}
ZERO_INLINE float from_pattern(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
#endif
}

ZERO_INLINE float widen(F16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t exponent = (h.bits >> 10) & 31u;
  const uint32_t mantissa = h.bits & 0x3FFu;
  if (exponent == 31u) {  // inf, or NaN made quiet
    return from_pattern(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x00400000u : 0u));
  }
  if (exponent == 0u) {  // zero or subnormal: a small integer times 2^-24, exact
    return from_pattern(sign | pattern(static_cast<float>(mantissa) * 0x1p-24f));
  }
  return from_pattern(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

ZERO_INLINE F16 narrow_f16(float x) {
  const uint32_t u = pattern(x);
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
    h = pattern(from_pattern(a) + 0.5f) - 0x3F000000u;
  }
  return F16{static_cast<uint16_t>(sign | h)};
}

struct ScalarBits {
  uint32_t x;

  static ZERO_INLINE ScalarBits all(uint32_t s) { return {s}; }
  static ZERO_INLINE ScalarBits lanes() { return {0}; }  // 0, 1, ... width - 1
  static ZERO_INLINE ScalarBits load(const uint16_t* p) { return {*p}; }
  static ZERO_INLINE ScalarBits load(const uint8_t* p) { return {*p}; }
  ZERO_INLINE void store(uint16_t* p) const { *p = static_cast<uint16_t>(x); }  // the low bits
  ZERO_INLINE void store(uint8_t* p) const { *p = static_cast<uint8_t>(x); }
  ZERO_INLINE uint32_t largest() const { return x; }  // over the lanes; unsigned values below 2^31
};

ZERO_INLINE ScalarBits operator+(ScalarBits a, ScalarBits b) { return {a.x + b.x}; }
ZERO_INLINE ScalarBits operator-(ScalarBits a, ScalarBits b) { return {a.x - b.x}; }
ZERO_INLINE ScalarBits operator*(ScalarBits a, ScalarBits b) { return {a.x * b.x}; }
ZERO_INLINE ScalarBits operator&(ScalarBits a, ScalarBits b) { return {a.x & b.x}; }
ZERO_INLINE ScalarBits operator|(ScalarBits a, ScalarBits b) { return {a.x | b.x}; }
ZERO_INLINE ScalarBits operator^(ScalarBits a, ScalarBits b) { return {a.x ^ b.x}; }
ZERO_INLINE ScalarBits operator<<(ScalarBits a, int n) {
  return {a.x << n};
}
ZERO_INLINE ScalarBits operator>>(ScalarBits a, int n) {
  return {a.x >> n};
}
ZERO_INLINE ScalarBits shift_right_signed(ScalarBits a, int n) {
  return {static_cast<uint32_t>(static_cast<int32_t>(a.x) >> n)};
}
ZERO_INLINE bool greater_signed(ScalarBits a, ScalarBits b) {
  return static_cast<int32_t>(a.x) > static_cast<int32_t>(b.x);
}
// yes where a > b as signed integers, else no.
ZERO_INLINE ScalarBits select_greater(ScalarBits a, ScalarBits b, ScalarBits yes, ScalarBits no) {
  return greater_signed(a, b) ? yes : no;
}
// value where test > 0 as a signed integer, else 0.
ZERO_INLINE ScalarBits keep_where_positive(ScalarBits test, ScalarBits value) {
  return greater_signed(test, ScalarBits{0}) ? value : ScalarBits{0};
}
ZERO_INLINE ScalarBits max_signed(ScalarBits a, ScalarBits b) { return greater_signed(a, b) ? a : b; }

struct Scalar {
  using Bits = ScalarBits;
  static constexpr int width = 1;
  float x;

  static ZERO_INLINE Scalar all(float s) { return {s}; }
  static ZERO_INLINE Scalar of(Bits bits) { return {from_pattern(bits.x)}; }
  static ZERO_INLINE Scalar load(const float* p) { return {*p}; }
  static ZERO_INLINE Scalar load(const BF16* p) { return {from_pattern(static_cast<uint32_t>(p->bits) << 16)}; }
  static ZERO_INLINE Scalar load(const F16* p) { return {widen(*p)}; }
  ZERO_INLINE void store(float* p) const { *p = x; }
  ZERO_INLINE void store(BF16* p) const { bf16_ties_to_even(*this).store(&p->bits); }
  ZERO_INLINE void store(F16* p) const { *p = narrow_f16(x); }
  // A master as bf16 parameter and remainder.
  static ZERO_INLINE Scalar load_joined(const uint16_t* param, const uint16_t* low) {
    return join_master<Scalar>(Bits::load(param), Bits::load(low));
  }
  ZERO_INLINE void store_split(uint16_t* param, uint16_t* low) const { store_master_split(*this, param, low); }
  // To and from memory that only loops of one order see (vec_avx2.h); here there is one order.
  static ZERO_INLINE Scalar load_as_is(const float* p) { return load(p); }
  ZERO_INLINE void store_as_is(float* p) const { store(p); }
};

ZERO_INLINE bool any_nan(Scalar a) { return a.x != a.x; }
ZERO_INLINE ScalarBits bits_of(Scalar a) { return {pattern(a.x)}; }
ZERO_INLINE Scalar operator+(Scalar a, Scalar b) { return {a.x + b.x}; }
ZERO_INLINE Scalar operator-(Scalar a, Scalar b) { return {a.x - b.x}; }
ZERO_INLINE Scalar operator*(Scalar a, Scalar b) { return {a.x * b.x}; }
ZERO_INLINE Scalar operator/(Scalar a, Scalar b) { return {a.x / b.x}; }
ZERO_INLINE Scalar sqrt(Scalar a) {
#if defined(__CUDA_ARCH__)
  return {__fsqrt_rn(a.x)};
#else
  return {__builtin_sqrtf(a.x)};
#endif
}

}  // namespace ZERO_ISA
}  // namespace zero
