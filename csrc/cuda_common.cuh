// What the CUDA files share: launching with CUDA's words for an error, grids that fit the chip, and wide accesses.
//
// Whatever is used of CUDA here and in the other .cu files also stands in tests/cuda_emulation/cuda_on_cpu.h, which
// runs them on a machine without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda_kernels.cuh"

#define ZERO_ISA cuda
#include "scalar.h"

namespace zero {
namespace cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

inline void check(cudaError_t error, const std::string& call, const Where& where) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(call + " on device " + std::to_string(where.device) + ": CUDA error " +
                           std::to_string(static_cast<int>(error)) + ", " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

template <class T>
struct Same {
  using type = T;
};

// Takes the error of this very launch: cudaGetLastError could return what an earlier call of somebody else left.
template <class... P>
void launch(const char* name, void (*kernel)(P...), int64_t blocks, int threads, const Where& where,
            typename Same<P>::type... args) {
  void* pointers[] = {&args...};
  const cudaError_t error =
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), pointers, 0,
                       static_cast<cudaStream_t>(where.stream));
  if (error == cudaSuccess) return;
  check(error, std::string("launch of ") + name + " with " + std::to_string(blocks) + " x " + std::to_string(threads) +
                   " threads", where);
}

// torch's copy of the CUDA runtime knows the current device, ours has to be told.
inline void enter(const Where& where) { check(cudaSetDevice(where.device), "cudaSetDevice", where); }

// Blocks of a kernel that the chip runs at once. Asking takes as long as a launch: it is asked once.
inline int64_t resident_blocks(const void* kernel, int threads, const Where& where) {
  static std::mutex lock;
  static std::map<std::pair<const void*, int>, int64_t> known;
  const std::lock_guard<std::mutex> hold(lock);
  int64_t& blocks = known[{kernel, where.device}];
  if (blocks == 0) {
    int processors = 0, resident = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, where.device), "cudaDeviceGetAttribute",
          where);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor", where);
    blocks = static_cast<int64_t>(processors) * std::max(resident, 1);
  }
  return blocks;
}

// As many as run at once, and no more than there is work for: each one then goes through its share.
template <class... P>
int64_t grid(void (*kernel)(P...), int threads, int64_t blocks_of_work, const Where& where) {
  const int64_t fitting = resident_blocks(reinterpret_cast<const void*>(kernel), threads, where);
  return std::max<int64_t>(1, std::min(fitting, blocks_of_work));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes that one access moves at most. __ldca and __stwb are plain accesses to global memory that stay whole; through
// a pointer the compiler took the stores of masters apart into single words.
inline constexpr int kWidest = 16;

__device__ __forceinline__ bool aligned(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % (bytes < kWidest ? bytes : kWidest) == 0;
}

// `n` elements of `size` bytes each as they lie in global memory, packed into 32-bit words. Loads are kept apart from
// what is done with them, so that a thread has all its loads under way before it waits for the first.
template <int size, int n>
__device__ __forceinline__ void load_words(uint32_t* w, const void* from, int count, bool wide) {
  constexpr int bytes = size * n;
  if (bytes >= 4 && wide && count == n) {
    if constexpr (bytes == 8) {
      const uint2 x = __ldca(static_cast<const uint2*>(from));
      w[0] = x.x, w[1] = x.y;
    } else if constexpr (bytes == 4) {
      w[0] = *static_cast<const uint32_t*>(from);
    } else if constexpr (bytes % 16 == 0) {
#pragma unroll
      for (int k = 0; k < bytes / 16; ++k) {
        const uint4 x = __ldca(static_cast<const uint4*>(from) + k);
        w[4 * k] = x.x, w[4 * k + 1] = x.y, w[4 * k + 2] = x.z, w[4 * k + 3] = x.w;
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < (bytes + 3) / 4; ++k) w[k] = 0;
#pragma unroll
  for (int k = 0; k < n; ++k) {
    uint32_t x = 0;
    if (k < count) {
      if constexpr (size == 4) x = static_cast<const uint32_t*>(from)[k];
      if constexpr (size == 2) x = static_cast<const uint16_t*>(from)[k];
      if constexpr (size == 1) x = static_cast<const uint8_t*>(from)[k];
    }
    w[k * size / 4] |= x << (k * size % 4 * 8);
  }
}

template <int size>
__device__ __forceinline__ uint32_t word_at(const uint32_t* w, int k) {
  if constexpr (size == 4) {
    return w[k];
  } else {
    return (w[k * size / 4] >> (k * size % 4 * 8)) & ((1u << (8 * size)) - 1u);
  }
}

template <int size>
__device__ __forceinline__ void put_word(uint32_t* w, int k, uint32_t x) {
  if constexpr (size == 4) {
    w[k] = x;
  } else {
    const int shift = k * size % 4 * 8;
    w[k * size / 4] = shift == 0 ? x : w[k * size / 4] | (x << shift);  // elements come in order
  }
}

template <int size, int n>
__device__ __forceinline__ void store_words(const uint32_t* w, void* to, int count, bool wide) {
  constexpr int bytes = size * n;
  if (bytes >= 4 && wide && count == n) {
    if constexpr (bytes == 8) {
      __stwb(static_cast<uint2*>(to), make_uint2(w[0], w[1]));
    } else if constexpr (bytes == 4) {
      *static_cast<uint32_t*>(to) = w[0];
    } else if constexpr (bytes % 16 == 0) {
#pragma unroll
      for (int k = 0; k < bytes / 16; ++k) {
        __stwb(static_cast<uint4*>(to) + k, make_uint4(w[4 * k], w[4 * k + 1], w[4 * k + 2], w[4 * k + 3]));
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < n; ++k) {
    if (k >= count) continue;
    const uint32_t x = word_at<size>(w, k);
    if constexpr (size == 4) static_cast<uint32_t*>(to)[k] = x;
    if constexpr (size == 2) static_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(x);
    if constexpr (size == 1) static_cast<uint8_t*>(to)[k] = static_cast<uint8_t>(x);
  }
}

__host__ __device__ __forceinline__ int size_of(int dtype) { return dtype == kF32 ? 4 : 2; }

__device__ __forceinline__ const char* at(const void* base, int64_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
__device__ __forceinline__ char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

// The largest of `lanes` neighbouring lanes of a warp, in all of them.
template <int lanes>
__device__ __forceinline__ uint32_t largest_of(uint32_t x) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

// The same for a floating dtype that is known at run time only; `w` has room for n words.
template <int n>
__device__ __forceinline__ void load_floats(uint32_t* w, const void* base, int dtype, int64_t i, int count, bool wide) {
  if (dtype == kF32) {
    load_words<4, n>(w, at(base, i * 4), count, wide);
  } else {
    load_words<2, n>(w, at(base, i * 2), count, wide);
  }
}

__device__ __forceinline__ Scalar float_at(const uint32_t* w, int k, int dtype) {
  if (dtype == kF32) return Scalar{from_pattern(w[k])};
  const uint32_t half = word_at<2>(w, k);
  if (dtype == kBF16) return Scalar{from_pattern(half << 16)};
  return Scalar{widen(F16{static_cast<uint16_t>(half)})};
}

template <int n>
__device__ __forceinline__ void store_floats(const Scalar (&x)[n], void* base, int dtype, int64_t i, int count,
                                             bool wide) {
  uint32_t w[n];
  if (dtype == kF32) {
#pragma unroll
    for (int k = 0; k < n; ++k) w[k] = pattern(x[k].x);
    return store_words<4, n>(w, at(base, i * 4), count, wide);
  }
#pragma unroll
  for (int k = 0; k < n; ++k) {
    put_word<2>(w, k, dtype == kBF16 ? bf16_ties_to_even(x[k]).x : narrow_f16(x[k].x).bits);
  }
  store_words<2, n>(w, at(base, i * 2), count, wide);
}

}  // namespace cuda
}  // namespace zero
