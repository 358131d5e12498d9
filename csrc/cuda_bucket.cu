// Many tensors to a flat buffer or back, with cast and factor, in one launch over a table in device memory. The table
// lists the tensors, and pieces of them of about the same size: a bucket may hold one large tensor and a hundred small
// ones, and each block of threads takes pieces. And the sum of rows, in their order, also of rows in 8 bits, which are
// made here, too.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// The same dtype and no factor: bytes are moved, whatever they say.
__device__ __forceinline__ void copy(const char* from, char* to, int64_t bytes) {
  const int thread = static_cast<int>(threadIdx.x);
  int64_t done = 0;
  if (aligned(from, kWidest) && aligned(to, kWidest)) {
    const int64_t words = bytes / kWidest;
#pragma unroll 4
    for (int64_t i = thread; i < words; i += kThreads) {
      __stwb(reinterpret_cast<uint4*>(to) + i, __ldca(reinterpret_cast<const uint4*>(from) + i));
    }
    done = words * kWidest;
  }
#pragma unroll 4
  for (int64_t i = done + 2 * thread; i < bytes; i += 2 * kThreads) {
    *reinterpret_cast<uint16_t*>(to + i) = *reinterpret_cast<const uint16_t*>(from + i);
  }
}

// n elements of each thread side by side; 4 where both sides can be moved at once, else 1.
template <int n>
__device__ __forceinline__ void convert(const char* from, int from_dtype, char* to, int to_dtype, int numel,
                                        float scale) {
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * n; i < numel; i += kThreads * n) {
    const int count = numel - i < n ? numel - i : n;
    uint32_t in[n], out[n];
    load_floats<n>(in, from, from_dtype, i, count, n > 1);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const Scalar x = float_at(in, k, from_dtype) * Scalar::all(scale);
      if (to_dtype == kF32) {
        out[k] = pattern(x.x);
      } else {
        put_word<2>(out, k, to_dtype == kBF16 ? bf16_ties_to_even(x).x & 0xFFFFu : narrow_f16(x.x).bits);
      }
    }
    if (to_dtype == kF32) {
      store_words<4, n>(out, at(to, static_cast<int64_t>(i) * 4), count, n > 1);
    } else {
      store_words<2, n>(out, at(to, static_cast<int64_t>(i) * 2), count, n > 1);
    }
  }
}

__global__ void __launch_bounds__(kThreads) move_kernel(const Span* spans, const Piece* pieces, int64_t count,
                                                        char* flat, int flat_dtype, float scale, bool to_flat) {
  for (int64_t p = blockIdx.x; p < count; p += gridDim.x) {
    const Piece piece = pieces[p];
    const Span span = spans[piece.span];
    const int dtype = static_cast<int>(span.dtype);
    const int64_t left = span.numel - piece.first;
    const int numel = static_cast<int>(left < kPiece ? left : kPiece);
    char* const tensor = reinterpret_cast<char*>(span.address) + piece.first * size_of(dtype);
    char* const inside = flat + (span.offset + piece.first) * size_of(flat_dtype);
    const char* const from = to_flat ? tensor : inside;
    char* const to = to_flat ? inside : tensor;
    const int from_dtype = to_flat ? dtype : flat_dtype, to_dtype = to_flat ? flat_dtype : dtype;
    if (dtype == flat_dtype && scale == 1.0f) {
      copy(from, to, static_cast<int64_t>(numel) * size_of(dtype));
    } else if (aligned(from, 4 * size_of(from_dtype)) && aligned(to, 4 * size_of(to_dtype))) {
      convert<4>(from, from_dtype, to, to_dtype, numel, scale);
    } else {
      convert<1>(from, from_dtype, to, to_dtype, numel, scale);
    }
  }
}

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

void move(const Span* spans, const Piece* pieces, int64_t count, void* flat, int flat_dtype, float scale, bool to_flat,
          Where where) {
  if (count == 0) return;
  enter(where);
  const int64_t blocks = grid(&move_kernel, kThreads, count, where);
  launch(to_flat ? "pack" : "unpack", move_kernel, blocks, kThreads, where, spans, pieces, count,
         static_cast<char*>(flat), flat_dtype, scale, to_flat);
}

}  // namespace cuda
}  // namespace zero
