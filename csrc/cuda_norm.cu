// Sum of squares in fp64, in two launches whose additions are in a fixed order (cuda_kernels.cuh). It is not finite
// exactly when an element is not: the largest square of an fp32 number is 1e77, far below what fp64 holds.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
// Elements of one block that a warp brings at a time. Between the tiles of its two blocks lies half a row of banks, so
// that the 32 chains read 32 different banks.
constexpr int kTile = 512;
constexpr int kStride = kTile + kNormLanes;

// Brings kTile elements of each of two neighbouring blocks into shared memory, as fp32, zeros where x ends. A block's
// 16 chains of additions take elements 16 apart; this way they are still fetched by 16 bytes a thread.
template <int size>
__device__ __forceinline__ void fill(float* tile, const void* x, int dtype, int64_t begin, int64_t numel, bool wide) {
  constexpr int n = kWidest / size, turns = 2 * kTile / (kWarp * n);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint32_t w[turns][4];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int place = (turn * kWarp + lane) * n;
    const int64_t i = begin + place / kTile * kNormBlock + place % kTile, left = numel - i;
    load_words<size, n>(w[turn], at(x, i * size), left >= n ? n : left > 0 ? static_cast<int>(left) : 0, wide);
  }
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int place = (turn * kWarp + lane) * n;
    float* to = tile + place / kTile * kStride + place % kTile;
#pragma unroll
    for (int k = 0; k < n; k += 4) {
      *reinterpret_cast<float4*>(to + k) =
          make_float4(float_at(w[turn], k, dtype).x, float_at(w[turn], k + 1, dtype).x,
                      float_at(w[turn], k + 2, dtype).x, float_at(w[turn], k + 3, dtype).x);
    }
  }
}

// Each warp sums two blocks at a time: lane l does chain l % 16 of block l / 16.
template <int size>
__global__ void __launch_bounds__(kThreads) norm_blocks(const void* x, int dtype, int64_t numel, double* sums) {
  __shared__ __align__(16) float tiles[kWarps][2 * kStride];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  float* const tile = tiles[warp];
  const float* const chain = tile + lane / kNormLanes * kStride + lane % kNormLanes;
  const bool wide = aligned(x, kWidest);
  const int64_t blocks = (numel + kNormBlock - 1) / kNormBlock, step = 2 * kWarps * static_cast<int64_t>(gridDim.x);
  for (int64_t block = 2 * (static_cast<int64_t>(blockIdx.x) * kWarps + warp); block < blocks; block += step) {
    const int64_t begin = block * kNormBlock, end = begin + kNormBlock;
    double sum = 0.0;
    for (int64_t i = begin; i < end && i < numel; i += kTile) {
      __syncwarp();  // the tile before has been read
      fill<size>(tile, x, dtype, i, numel, wide);
      __syncwarp();
#pragma unroll 8
      for (int row = 0; row < kTile; row += kNormLanes) {
        const double value = chain[row];
        sum = ::fma(value, value, sum);  // the square is exact: the same as multiplying and adding
      }
    }
#pragma unroll
    for (int half = kNormLanes / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half, kNormLanes);
    const int64_t own = block + lane / kNormLanes;
    if (lane % kNormLanes == 0 && own < blocks) sums[own] = sum;
  }
}

__global__ void __launch_bounds__(kNormSums) norm_total(const double* sums, int64_t blocks, double* out,
                                                        bool accumulate) {
  __shared__ double lanes[kNormSums];
  const int own = static_cast<int>(threadIdx.x);
  double sum = 0.0;
#pragma unroll 8
  for (int64_t block = own; block < blocks; block += kNormSums) sum += sums[block];
  lanes[own] = sum;
  for (int half = kNormSums / 2; half > 0; half /= 2) {
    __syncthreads();
    if (own < half) lanes[own] += lanes[own + half];
  }
  if (own == 0) *out = accumulate ? *out + lanes[0] : lanes[0];
}

}  // namespace

void sum_squares(const void* x, int dtype, int64_t numel, double* scratch, double* out, bool accumulate, Where where) {
  enter(where);
  const int64_t blocks = ceil_div(numel, kNormBlock);
  if (blocks > 0) {
    const auto kernel = dtype == kF32 ? &norm_blocks<4> : &norm_blocks<2>;
    const int64_t size = grid(kernel, kThreads, ceil_div(blocks, 2 * kWarps), where);
    launch("sum_squares (blocks)", kernel, size, kThreads, where, x, dtype, numel, scratch);
  }
  launch("sum_squares (total)", norm_total, 1, kNormSums, where, scratch, blocks, out, accumulate);
}

}  // namespace cuda
}  // namespace zero
