// The vector type of the instruction set that the file is compiled for: `Vector`, and `SquareLanes` for norms.
// Which one follows from -DZERO_ISA=<name>, not from what the compiler could do: `scalar` stays scalar.
#pragma once

#include "scalar.h"

#define ZERO_ISA_scalar 1
#define ZERO_ISA_sse2 2
#define ZERO_ISA_neon 3
#define ZERO_ISA_avx2 4
#define ZERO_ISA_avx512 5
#define ZERO_ISA_CODE_OF(isa) ZERO_ISA_##isa
#define ZERO_ISA_CODE(isa) ZERO_ISA_CODE_OF(isa)

#if ZERO_ISA_CODE(ZERO_ISA) == ZERO_ISA_avx512
#include "vec_avx512.h"
#elif ZERO_ISA_CODE(ZERO_ISA) == ZERO_ISA_avx2
#include "vec_avx2.h"
#elif ZERO_ISA_CODE(ZERO_ISA) == ZERO_ISA_sse2 || ZERO_ISA_CODE(ZERO_ISA) == ZERO_ISA_neon
#include "vec_128.h"
#elif ZERO_ISA_CODE(ZERO_ISA) == ZERO_ISA_scalar

namespace zero {
namespace ZERO_ISA {

using Vector = Scalar;
using Crossed = Scalar;

// Sixteen fp64 sums of squares; element j of each sixteen goes to lane j.
struct SquareLanes {
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
};

}  // namespace ZERO_ISA
}  // namespace zero

#else
#error "ZERO_ISA names no instruction set of vec.h"
#endif
