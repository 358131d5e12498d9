// Sum of squares of one block in fp64. It is not finite exactly when an element is not finite: the largest square
// of an fp32 number is 1e77, far below what fp64 holds, so one pass answers both questions.
// Compiled once per instruction set.
#include "cpu_kernels.h"
#include "vec.h"

namespace zero {
namespace ZERO_ISA {
namespace {

template <class T>
double block(const void* data, int64_t numel) {
  const T* x = static_cast<const T*>(data);
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
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sum[j] += sum[j + half];
  }
  return sum[0];
}

}  // namespace

double sum_squares_block(const void* x, int dtype, int64_t numel) {
  switch (dtype) {
    case kBF16: return block<BF16>(x, numel);
    case kF16: return block<F16>(x, numel);
    default: return block<float>(x, numel);
  }
}

}  // namespace ZERO_ISA
}  // namespace zero
