// The one list of CUDA kernels, in plain C++: bind_cuda.cpp needs no header of CUDA.
//
// Every call that takes a stream only launches on it: none allocates, copies to the host or waits. So any sequence of
// them can be captured in a CUDA graph. What fails throws std::runtime_error with CUDA's words.
//
// Bits are those of the CPU kernels (up to the payload of a NaN), whatever the size of the grid and the alignment of
// the arrays.
#pragma once

#include <cstdint>

#include "norm_math.h"
#include "jobs.h"

namespace zero {
namespace cuda {

struct Where {
  int device;
  void* stream;  // a cudaStream_t of that device; null is its default stream
};

// One optimizer step.
struct StepJob : Shard {
  int formula;
  Coef coef;
  uint64_t step;             // counted from 1
  const double* grad_scale;  // in device memory, NaN: nothing is written; null: that of `coef` holds
};

void step(const StepJob& job, Where where);

// The same for one format of the states (cuda_step.cu, which is compiled once for each).
template <int format>
void step_in(const StepJob& job, const Where& where);

// out[0] = (accumulate ? out[0] : 0) + the sum of squares, added as norm_math.h says. `scratch` holds one fp64 number
// per block.
void sum_squares(const void* x, int dtype, int64_t numel, double* scratch, double* out, bool accumulate, Where where);

// out = (accumulate ? out : 0) + (row 0 + row 1 + ...), in fp32. Row r is `stride` bytes, either way, behind row r - 1.
struct SumRowsJob {
  const char* first;
  int64_t stride, rows;
  int dtype;  // of the rows, whose sum is fp32 and may be a row of fp32; where they are messages, that of their sum
  void* out;
  int64_t numel;
  bool accumulate;
  int64_t part;  // 0, or the rows are messages in 8 bits, of parts of so many blocks (format_math.h)
};

void sum_rows(const SumRowsJob& job, Where where);
void sum_messages(const SumRowsJob& job, Where where);

// 8 bits of each element, a multiple of kWireBlock of them (format_math.h).
void encode(const EncodeJob& job, int64_t numel, Where where);

// Sets the spans of `flat` to the tensors times `scale`, or adds those to them.
void pack(const Span* spans, int64_t count, void* flat, int flat_dtype, float scale, bool add, Where where);

// Launches a kernel that does nothing, on `threads` threads: throws when this device cannot run what was compiled.
void probe(int threads, Where where);

// Pins host memory, whole pages of it, so that devices copy from and to it by themselves while the host goes on; and
// ends that. Both make `device` the current one of the calling thread. Pinning takes time for every page.
void host_register(void* address, int64_t nbytes, int device);
void host_unregister(void* address, int device);

}  // namespace cuda
}  // namespace zero
