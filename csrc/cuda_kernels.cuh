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
#include "shard.h"

namespace zero {
namespace cuda {

struct Where {
  int device;
  void* stream;  // a cudaStream_t of that device; null is its default stream
};

// What a step reads from device memory instead of asking the host: fp64 words (zero/kernels/live.py).
enum Live : int { kLr = 0, kGradScale = 1, kStep = 2, kFoundInf = 3, kNorm = 4, kLiveWords = 8 };

// What `prepare` makes of them, for the steps that follow it on the stream.
struct Prepared {
  Coef coef;
  uint64_t step;  // counted from 1
  int skip;       // not zero: a gradient was not finite, nothing is to be written
};
inline constexpr int64_t kPreparedBytes = 128;
static_assert(sizeof(Prepared) <= kPreparedBytes, "zero/kernels/live.py allots this much");

// One optimizer step.
struct StepJob : Shard {
  int formula;
  const Prepared* prepared;  // in device memory; null: `now` holds
  Prepared now;
};

void step(const StepJob& job, Where where);

// Counts `live`'s step up and writes the formula's coefficients; where found_inf is not 0, only sets `skip`.
void prepare(int formula, const Hyper& hyper, double* live, Prepared* prepared, Where where);

// From a sum of squares to live's norm = sqrt(sum) * mean, found_inf = norm is not finite, and grad_scale = mean times
// the factor that brings the norm to at most `limit` (0: 1).
void clip(const double* sum, double mean, double limit, double* live, Where where);

// out[0] = (accumulate ? out[0] : 0) + the sum of squares, added as norm_math.h says. `scratch` holds one fp64 number
// per block.
void sum_squares(const void* x, int dtype, int64_t numel, double* scratch, double* out, bool accumulate, Where where);

// The table of `move`: int64 words in device memory (zero/kernels/bucket.py).
struct Span {
  uint64_t address;  // of a tensor
  int64_t dtype;
  int64_t numel;
  int64_t offset;  // of its first element in the flat buffer
};
struct Piece {
  int64_t span;
  int64_t first;  // element of the span; a piece ends kPiece further on, or where the span does
};
inline constexpr int64_t kPiece = 8192;

// Tensors to flat buffer or back, cast, times scale.
void move(const Span* spans, const Piece* pieces, int64_t count, void* flat, int flat_dtype, float scale, bool to_flat,
          Where where);

// Launches a kernel that does nothing, on `threads` threads: throws when this device cannot run what was compiled.
void probe(int threads, Where where);

// Pins host memory, whole pages of it, so that devices copy from and to it by themselves while the host goes on; and
// ends that. Both make `device` the current one of the calling thread. Pinning takes time for every page.
void host_register(void* address, int64_t nbytes, int device);
void host_unregister(void* address, int device);

}  // namespace cuda
}  // namespace zero
