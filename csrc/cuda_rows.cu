// The sum of rows, in their order.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// n elements of `size` bytes of each thread side by side, 16 bytes of them where all rows and the sum can be moved at
// once, else one.
template <int size, int n>
__device__ __forceinline__ void add_rows(const SumRowsJob& job) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  float* const out = static_cast<float*>(job.out);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * n; i < job.numel; i += threads * n) {
    const int count = job.numel - i < n ? static_cast<int>(job.numel - i) : n;
    Scalar sum[n];
    uint32_t w[n];
    load_words<size, n>(w, job.first + i * size, count, n > 1);
#pragma unroll
    for (int k = 0; k < n; ++k) sum[k] = float_at(w, k, job.dtype);
    for (int64_t row = 1; row < job.rows; ++row) {
      load_words<size, n>(w, job.first + row * job.stride + i * size, count, n > 1);
#pragma unroll
      for (int k = 0; k < n; ++k) sum[k] = sum[k] + float_at(w, k, job.dtype);
    }
    if (job.accumulate) {
      load_words<4, n>(w, out + i, count, n > 1);
#pragma unroll
      for (int k = 0; k < n; ++k) sum[k] = Scalar{from_pattern(w[k])} + sum[k];
    }
    store_floats<n>(sum, out, kF32, i, count, n > 1);
  }
}

template <int size>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const __grid_constant__ SumRowsJob job) {
  if (aligned(job.first, kWidest) && job.stride % kWidest == 0 && aligned(job.out, kWidest)) {
    add_rows<size, kWidest / size>(job);
  } else {
    add_rows<size, 1>(job);
  }
}

}  // namespace

void sum_rows(const SumRowsJob& job, Where where) {
  if (job.numel == 0) return;
  enter(where);
  const auto kernel = job.dtype == kF32 ? &sum_rows_kernel<4> : &sum_rows_kernel<2>;
  const int64_t work = ceil_div(job.numel, kThreads * kWidest / size_of(job.dtype));
  launch("sum_rows", kernel, grid(kernel, kThreads, work, where), kThreads, where, job);
}

}  // namespace cuda
}  // namespace zero
