// The sum of rows, in their order, also of rows in 8 bits, which are made here, too.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// n elements of each thread side by side; 4 where all rows and the sum can be moved at once, else 1.
template <int n>
__device__ __forceinline__ void add_rows(const char* first, int64_t stride, int64_t rows, int dtype, float* out,
                                         int64_t numel, bool accumulate) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * n; i < numel; i += threads * n) {
    const int count = numel - i < n ? static_cast<int>(numel - i) : n;
    Scalar sum[n];
    uint32_t w[n];
    load_floats<n>(w, first, dtype, i, count, n > 1);
#pragma unroll
    for (int k = 0; k < n; ++k) sum[k] = float_at(w, k, dtype);
    for (int64_t row = 1; row < rows; ++row) {
      load_floats<n>(w, first + row * stride, dtype, i, count, n > 1);
#pragma unroll
      for (int k = 0; k < n; ++k) sum[k] = sum[k] + float_at(w, k, dtype);
    }
    if (accumulate) load_words<4, n>(w, out + i, count, n > 1);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      w[k] = pattern(accumulate ? (Scalar{from_pattern(w[k])} + sum[k]).x : sum[k].x);
    }
    store_words<4, n>(w, out + i, count, n > 1);
  }
}

__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const char* first, int64_t stride, int64_t rows, int dtype,
                                                            float* out, int64_t numel, bool accumulate) {
  const int bytes = 4 * size_of(dtype);
  if (aligned(first, bytes) && stride % bytes == 0 && aligned(out, kWidest)) {
    add_rows<4>(first, stride, rows, dtype, out, numel, accumulate);
  } else {
    add_rows<1>(first, stride, rows, dtype, out, numel, accumulate);
  }
}

__device__ __forceinline__ Scalar decoded(const char* row, int64_t i) {
  const uint8_t* record = reinterpret_cast<const uint8_t*>(row) + i / kWireBlock * kWireRecord;
  return wire_value<Scalar>(ScalarBits::load(record + i % kWireBlock), wire_scale_of(record));
}

// Neighbours read neighbouring bytes.
__global__ void __launch_bounds__(kThreads) sum_records_kernel(const char* first, int64_t stride, int64_t rows,
                                                               void* out, int dtype, int64_t numel, bool accumulate) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < numel; i += threads) {
    Scalar sum = decoded(first, i);
    for (int64_t row = 1; row < rows; ++row) sum = sum + decoded(first + row * stride, i);
    if (accumulate) {
      uint32_t before;
      load_floats<1>(&before, out, dtype, i, 1, false);
      sum = float_at(&before, 0, dtype) + sum;
    }
    switch (dtype) {
      case kBF16: sum.store(static_cast<BF16*>(out) + i); break;
      case kF16: sum.store(static_cast<F16*>(out) + i); break;
      default: sum.store(static_cast<float*>(out) + i);
    }
  }
}

// A warp makes a record, of two elements of each thread.
__global__ void __launch_bounds__(kThreads) encode_kernel(const float* values, uint8_t* message, int64_t blocks) {
  constexpr int64_t warps = kThreads / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t b = blockIdx.x * warps + threadIdx.x / kWarp; b < blocks; b += gridDim.x * warps) {
    const float* const x = values + b * kWireBlock + lane;
    uint8_t* const record = message + b * kWireRecord;
    const Scalar one{x[0]}, other{x[kWarp]};
    uint32_t largest = max_signed(magnitude(bits_of(one)), magnitude(bits_of(other))).x;
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const uint32_t its = __shfl_xor_sync(kAllLanes, largest, mask);
      largest = largest < its ? its : largest;
    }
    const uint32_t scale = wire_scale<Scalar>(ScalarBits{largest}).x;
    wire_code(one, scale).store(record + lane);
    wire_code(other, scale).store(record + kWarp + lane);
    if (lane < 2) record[kWireBlock + lane] = static_cast<uint8_t>(scale >> (8 * lane));
  }
}

}  // namespace

void encode(const float* values, uint8_t* message, int64_t numel, Where where) {
  if (numel == 0) return;
  enter(where);
  const int64_t blocks = numel / kWireBlock;
  launch("encode", encode_kernel, grid(&encode_kernel, kThreads, ceil_div(numel, 2 * kThreads), where), kThreads, where,
         values, message, blocks);
}

void sum_rows(const void* first, int64_t stride, int64_t rows, int dtype, void* out, int64_t numel, bool accumulate,
              Where where) {
  if (numel == 0) return;
  enter(where);
  if (dtype >= kRecordsTo) {
    const int64_t blocks = grid(&sum_records_kernel, kThreads, ceil_div(numel, kThreads), where);
    launch("sum_rows", sum_records_kernel, blocks, kThreads, where, static_cast<const char*>(first), stride, rows, out,
           dtype - kRecordsTo, numel, accumulate);
    return;
  }
  const int64_t blocks = grid(&sum_rows_kernel, kThreads, ceil_div(numel, 4 * kThreads), where);
  launch("sum_rows", sum_rows_kernel, blocks, kThreads, where, static_cast<const char*>(first), stride, rows, dtype,
         static_cast<float*>(out), numel, accumulate);
}

}  // namespace cuda
}  // namespace zero
