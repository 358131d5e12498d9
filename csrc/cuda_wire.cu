// Rows in 8 bits (format_math.h): made of values and of the error of those before, and added in row order.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // elements of a thread, side by side: a block is that of 8 lanes

// A run's codes, moved as wide as their address allows. Parts of messages begin at any even one.
__device__ __forceinline__ void load_codes(uint32_t (&w)[kRun], const char* from, int count) {
  if (aligned(from, kRun)) return load_words<1, kRun>(w, from, count, true);
  if (aligned(from, 2)) return load_words<2, kRun / 2>(w, from, count / 2, false);
  load_words<1, kRun>(w, from, count, false);
}

__device__ __forceinline__ void store_codes(const uint32_t (&w)[kRun], char* to, int count) {
  if (aligned(to, kRun)) return store_words<1, kRun>(w, to, count, true);
  if (aligned(to, 2)) return store_words<2, kRun / 2>(w, to, count / 2, false);
  store_words<1, kRun>(w, to, count, false);
}

__device__ __forceinline__ void decode_run(Scalar (&x)[kRun], const void* message, const WirePlace& place, int64_t i,
                                           int count) {
  uint32_t w[kRun];
  load_codes(w, at(message, place.codes + i % kWireBlock), count);
  const uint32_t scale = count ? load_wire_scale(static_cast<const uint8_t*>(message) + place.scale) : 0u;
#pragma unroll
  for (int k = 0; k < kRun; ++k) x[k] = wire_value<Scalar>(ScalarBits{word_at<1>(w, k)}, scale);
}

__global__ void __launch_bounds__(kThreads) sum_messages_kernel(const __grid_constant__ SumRowsJob job) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool wide = aligned(job.out, kRun * size_of(job.dtype));
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kRun; i < job.numel;
       i += threads * kRun) {
    const WirePlace place = wire_place(i / kWireBlock, job.part);
    Scalar sum[kRun], next[kRun];
    decode_run(sum, job.first, place, i, kRun);
    for (int64_t row = 1; row < job.rows; ++row) {
      decode_run(next, job.first + row * job.stride, place, i, kRun);
#pragma unroll
      for (int k = 0; k < kRun; ++k) sum[k] = sum[k] + next[k];
    }
    if (job.accumulate) {
      uint32_t before[kRun];
      load_floats<kRun>(before, job.out, job.dtype, i, kRun, wide);
#pragma unroll
      for (int k = 0; k < kRun; ++k) sum[k] = float_at(before, k, job.dtype) + sum[k];
    }
    store_floats<kRun>(sum, job.out, job.dtype, i, kRun, wide);
  }
}

// Writes a run of a message. All lanes of a warp come here together: those of a block share its scale, which this
// returns, with the codes in `w`.
__device__ __forceinline__ uint32_t encode_run(const Scalar (&x)[kRun], uint32_t (&w)[kRun], uint8_t* message,
                                               const WirePlace& place, int64_t i, int count) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k) largest = max_signed(ScalarBits{largest}, magnitude(bits_of(x[k]))).x;
  const uint32_t scale = wire_scale<Scalar>(ScalarBits{largest_of<kWireBlock / kRun>(largest)}).x;
#pragma unroll
  for (int k = 0; k < kRun; ++k) put_word<1>(w, k, wire_code(x[k], scale).x);
  store_codes(w, at(message, place.codes + i % kWireBlock), count);
  if (count && i % kWireBlock == 0) store_wire_scale(scale, message + place.scale);
  return scale;
}

__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ EncodeJob job, int64_t numel) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kRun;
  const bool wide = aligned(job.values, kRun * size_of(job.dtype));
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // A whole warp goes on or ends, although its last lanes may have nothing left.
  int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x - lane) * kRun;
  for (; warp < numel; warp += stride) {
    const int64_t i = warp + lane * kRun;
    const int count = i < numel ? kRun : 0;
    const WirePlace place = wire_place(i / kWireBlock, job.part);
    Scalar x[kRun], error[kRun];
    uint32_t w[kRun];
    load_floats<kRun>(w, job.values, job.dtype, i, count, wide);
    if (job.error) decode_run(error, job.error, place, i, count);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      x[k] = float_at(w, k, job.dtype);
      if (job.error) x[k] = x[k] + error[k];
    }
    const uint32_t scale = encode_run(x, w, job.message, place, i, count);
    if (!job.error) continue;
#pragma unroll
    for (int k = 0; k < kRun; ++k) error[k] = wire_rest(x[k], wire_value<Scalar>(ScalarBits{word_at<1>(w, k)}, scale));
    encode_run(error, w, job.error, place, i, count);
  }
}

}  // namespace

void encode(const EncodeJob& job, int64_t numel, Where where) {
  if (numel == 0) return;
  enter(where);
  const int64_t blocks = grid(&encode_kernel, kThreads, ceil_div(numel, kThreads * kRun), where);
  launch("encode", encode_kernel, blocks, kThreads, where, job, numel);
}

void sum_messages(const SumRowsJob& job, Where where) {
  if (job.numel == 0) return;
  enter(where);
  const int64_t blocks = grid(&sum_messages_kernel, kThreads, ceil_div(job.numel, kThreads * kRun), where);
  launch("sum_messages", sum_messages_kernel, blocks, kThreads, where, job);
}

}  // namespace cuda
}  // namespace zero
