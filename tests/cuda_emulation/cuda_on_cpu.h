// Runs csrc/*.cu on a processor: put before the source with -include, compiled as C++ by any host compiler. It has the
// part of CUDA that those files use, no more. For tests of the kernels' logic on machines without a GPU; slow.
//
// Each CUDA thread of a block is a fiber. A fiber runs until it waits for others (a barrier, a shuffle) or ends; blocks
// run one after another. When all fibers wait, threads took different ways around a barrier: on a GPU that would hang
// or go wrong, here it ends the process. What this cannot see: races, and what only nvcc does.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T>
T __ldca(const T* from) {
  return *from;
}
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr std::size_t kStack = 64 * 1024;

// Threads that wait for each other: a block, or a warp.
struct Group {
  int alive = 0, arrived = 0;
  std::uint64_t turn = 0;

  bool complete() {
    if (arrived < alive || arrived == 0) return false;
    arrived = 0;
    ++turn;
    return true;
  }
};

// Made once, with a stack of its own, by makecontext; from then on it is left and entered by jumps, which unlike
// swapcontext need no call of the system. It runs one CUDA thread after the other.
struct Fiber {
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

struct State {
  dim3 grid, block, block_index, thread_index;
  jmp_buf scheduler;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Group> warps;
  Group all;
  int current = 0;
  bool moved = false;
  std::uint64_t slots[kMaxThreads];
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
};

inline State& state() {
  static State only;
  return only;
}

inline Fiber& own_fiber() { return *state().fibers[static_cast<std::size_t>(state().current)]; }

inline void yield() {
  if (_setjmp(own_fiber().place) == 0) _longjmp(state().scheduler, 1);
}

inline void wait(Group& group) {
  const std::uint64_t turn = group.turn;
  ++group.arrived;
  state().moved = true;
  group.complete();
  while (group.turn == turn) yield();
}

inline Group& own_warp() { return state().warps[static_cast<std::size_t>(state().current / kWarp)]; }

inline void run_thread() {
  State& s = state();
  s.body(s.arguments);
  own_fiber().done = true;
  s.moved = true;
  --s.all.alive;
  --own_warp().alive;
  s.all.complete();  // who has ended is not waited for
  own_warp().complete();
}

inline void run_threads() {
  for (;;) {
    run_thread();
    yield();
  }
}

// Runs thread `t` until it waits or ends.
inline void resume(int t) {
  State& s = state();
  s.current = t;
  s.thread_index.x = static_cast<unsigned>(t);
  if (_setjmp(s.scheduler) != 0) return;
  Fiber& fiber = own_fiber();
  if (fiber.stack) _longjmp(fiber.place, 1);
  fiber.stack.reset(new char[kStack]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, &run_threads, 0);
  setcontext(&context);
}

inline void run_block(State& s) {
  const int threads = static_cast<int>(s.block.x);
  while (s.fibers.size() < s.block.x) s.fibers.push_back(std::make_unique<Fiber>());
  s.all = Group{threads, 0, 0};
  s.warps.assign(static_cast<std::size_t>((threads + kWarp - 1) / kWarp), Group{});
  for (int t = 0; t < threads; ++t) {
    ++s.warps[static_cast<std::size_t>(t / kWarp)].alive;
    s.fibers[static_cast<std::size_t>(t)]->done = false;
  }
  while (s.all.alive > 0) {
    s.moved = false;
    for (int t = 0; t < threads; ++t) {
      if (!s.fibers[static_cast<std::size_t>(t)]->done) resume(t);
    }
    if (!s.moved && s.all.alive > 0) {
      std::fprintf(stderr, "all threads of block %u wait: they took different ways around a barrier\n", s.block_index.x);
      std::abort();
    }
  }
}

template <class T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t), "a shuffle moves 4 or 8 bytes");
  State& s = state();
  std::memcpy(&s.slots[s.current], &value, sizeof(T));
  wait(own_warp());
  T result;
  std::memcpy(&result, &s.slots[s.current / kWarp * kWarp + source], sizeof(T));
  wait(own_warp());  // nobody writes again before all have read
  return result;
}

template <class... P, std::size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<P*>(arguments[I])...);
}

}  // namespace emulated

#define gridDim (emulated::state().grid)
#define blockDim (emulated::state().block)
#define blockIdx (emulated::state().block_index)
#define threadIdx (emulated::state().thread_index)

inline void __syncthreads() { emulated::wait(emulated::state().all); }
inline void __syncwarp() { emulated::wait(emulated::own_warp()); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::exchange(value, (emulated::state().current % emulated::kWarp) ^ mask);
}

template <class T>
T __shfl_down_sync(unsigned, T value, int delta, int width = emulated::kWarp) {
  const int lane = emulated::state().current % emulated::kWarp;
  return emulated::exchange(value, lane % width + delta < width ? lane + delta : lane);
}

// The host's side of CUDA. Two processors with room for one block each, so that kernels go around their loops.
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

inline const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    default: return "cudaErrorInvalidConfiguration";
  }
}
inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    default: return "invalid configuration argument";
  }
}
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}
constexpr unsigned cudaHostRegisterPortable = 1;
inline std::vector<void*>& registered() {
  static std::vector<void*> only;
  return only;
}
inline cudaError_t cudaHostRegister(void* address, std::size_t, unsigned) {
  for (void* known : registered()) {
    if (known == address) return cudaErrorHostMemoryAlreadyRegistered;
  }
  registered().push_back(address);
  return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* address) {
  for (void*& known : registered()) {
    if (known != address) continue;
    known = registered().back();
    registered().pop_back();
    return cudaSuccess;
  }
  return cudaErrorHostMemoryNotRegistered;
}
inline int questions = 0;
extern "C" __attribute__((visibility("default"), used)) inline int emulated_questions() { return questions; }
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 1;
  ++questions;
  return cudaSuccess;
}

template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments, std::size_t, cudaStream_t) {
  if (grid.x < 1 || block.x < 1 || block.x > emulated::kMaxThreads) return cudaErrorInvalidConfiguration;
  struct Call {
    void (*kernel)(P...);
    void** arguments;
  } bound{kernel, arguments};
  emulated::State& s = emulated::state();
  s.grid = grid;
  s.block = block;
  s.arguments = &bound;
  s.body = [](void* opaque) {
    const Call* own = static_cast<Call*>(opaque);
    emulated::call(own->kernel, own->arguments, std::index_sequence_for<P...>{});
  };
  for (unsigned b = 0; b < grid.x; ++b) {
    s.block_index.x = b;
    emulated::run_block(s);
  }
  return cudaSuccess;
}
