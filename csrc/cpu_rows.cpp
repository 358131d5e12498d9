// Moving numbers between tensors and flat buffers: cast with a factor, and the sum of rows in row order. Compiled once
// per instruction set.
#include "cpu_kernels.h"
#include "vec.h"

namespace zero {
namespace ZERO_ISA {
namespace {

template <bool add, class Src, class Dst>
void convert_run(const void* from, void* to, int64_t numel, float scale) {
  const Src* src = static_cast<const Src*>(from);
  Dst* dst = static_cast<Dst*>(to);
  int64_t i = 0;
  const Vector factor = Vector::all(scale);
  for (; i + Vector::width <= numel; i += Vector::width) {
    const Vector x = Vector::load(src + i) * factor;
    (add ? Vector::load(dst + i) + x : x).store(dst + i);
  }
  for (; i < numel; ++i) {
    const Scalar x = Scalar::load(src + i) * Scalar::all(scale);
    (add ? Scalar::load(dst + i) + x : x).store(dst + i);
  }
}

// `unroll` vectors side by side, so that one row pointer is read for all of them and their additions overlap.
template <class V, int unroll, class T>
ZERO_INLINE void sum_at(const SumRowsJob& job, int64_t i) {
  V sum[unroll];
  for (int u = 0; u < unroll; ++u) sum[u] = V::load(static_cast<const T*>(job.rows[0]) + i + u * V::width);
  for (int64_t r = 1; r < job.count; ++r) {
    const T* row = static_cast<const T*>(job.rows[r]) + i;
    for (int u = 0; u < unroll; ++u) sum[u] = sum[u] + V::load(row + u * V::width);
  }
  for (int u = 0; u < unroll; ++u) {
    float* out = static_cast<float*>(job.out) + i + u * V::width;
    (job.accumulate ? V::load(out) + sum[u] : sum[u]).store(out);
  }
}

template <class T>
void sum_run(const SumRowsJob& shared, int64_t i, int64_t end) {
  const SumRowsJob job = shared;  // on the stack, so that stores through float* cannot touch it
  constexpr int unroll = 4;
  constexpr int64_t stride = unroll * Vector::width;
  for (; i + stride <= end; i += stride) sum_at<Vector, unroll, T>(job, i);
  for (; i < end; ++i) sum_at<Scalar, 1, T>(job, i);
}

}  // namespace

void convert(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t numel, float scale, bool add) {
  if (!add && src_dtype == dst_dtype && scale == 1.0f) {
    __builtin_memcpy(dst, src, static_cast<uint64_t>(numel * dtype_size(src_dtype)));
    return;
  }
  with_type(src_dtype, [&](auto from) {
    with_type(dst_dtype, [&](auto to) {
      const auto run = add ? convert_run<true, decltype(from), decltype(to)>
                           : convert_run<false, decltype(from), decltype(to)>;
      run(src, dst, numel, scale);
    });
  });
}

void sum_rows(const SumRowsJob& job, int64_t begin, int64_t end) {
  with_type(job.dtype, [&](auto row) { sum_run<decltype(row)>(job, begin, end); });
}

}  // namespace ZERO_ISA
}  // namespace zero
