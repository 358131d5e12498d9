// Sums of squares of blocks in fp64 (norm_math.h). A sum is not finite exactly when an element is not finite: the
// largest square of an fp32 number is 1e77, far below what fp64 holds, so one pass answers both questions.
// Compiled once per instruction set.
#include "cpu_kernels.h"
#include "vec.h"

namespace zero {
namespace ZERO_ISA {
namespace {

ZERO_INLINE double fold(double* sum) {
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sum[j] += sum[j + half];
  }
  return sum[0];
}

template <class T>
ZERO_INLINE double one_block(const T* x, int64_t numel) {
  SquareLanes lanes;
  lanes.clear();
  int64_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) lanes.add16(x + i);
  double sum[kNormLanes];
  lanes.store(sum);
  for (int j = 0; i < numel; ++i, ++j) {
    const double tail = Scalar::load(x + i).x;
    sum[j] += tail * tail;
  }
  return fold(sum);
}

// Two whole blocks side by side: twice the additions that wait for nobody, and two streams from memory, of which one
// core reads faster than of one.
template <class T>
ZERO_INLINE void two_blocks(const T* x, double* sums) {
  SquareLanes first, second;
  first.clear();
  second.clear();
  for (int64_t i = 0; i < kNormBlock; i += kNormLanes) {
    first.add16(x + i);
    second.add16(x + kNormBlock + i);
  }
  double sum[kNormLanes];
  first.store(sum);
  sums[0] = fold(sum);
  second.store(sum);
  sums[1] = fold(sum);
}

template <class T>
void run(const void* data, int64_t numel, double* sums) {
  const T* x = static_cast<const T*>(data);
  for (; numel >= 2 * kNormBlock; numel -= 2 * kNormBlock, x += 2 * kNormBlock, sums += 2) two_blocks(x, sums);
  for (; numel > 0; numel -= kNormBlock, x += kNormBlock) {
    *sums++ = one_block(x, numel < kNormBlock ? numel : kNormBlock);
  }
}

}  // namespace

void sum_squares_blocks(const void* x, int dtype, int64_t numel, double* sums) {
  with_type(dtype, [&](auto value) { run<decltype(value)>(x, numel, sums); });
}

}  // namespace ZERO_ISA
}  // namespace zero
