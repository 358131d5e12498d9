// The one list of CPU kernels. Each entry works on a range, on the calling thread, with no allocation;
// who splits the work over threads is cpu_parallel.cpp, who picks the instruction set is cpu_dispatch.cpp.
//
// Every kernel gives the same bits for every instruction set, every cut into ranges and every thread count
// (up to the payload of a NaN). A file that is compiled once per instruction set must not use inline functions
// or templates of the standard library: the linker keeps one copy of such a function, and if it keeps the copy
// made with AVX-512, the scalar build dies with an illegal instruction on an old machine.
#pragma once

#include <cstdint>

#include "norm_math.h"
#include "jobs.h"

namespace zero {

inline constexpr int64_t dtype_size(int dtype) { return dtype == kF32 ? 4 : 2; }

// One optimizer step.
struct StepJob : Shard {
  int formula;
  Coef coef;
  uint64_t seed;  // of the random bits: of this unit and step
};

// out[i] = row 0 [i] + row 1 [i] + ... in this order, in fp32.
struct SumRowsJob {
  const void* const* rows;
  int64_t count;
  int dtype;  // of the rows, whose sum is fp32; where they are messages, that of their sum
  void* out;
  bool accumulate;
  int64_t part;  // 0, or the rows are messages in 8 bits, of parts of so many blocks (format_math.h)
};

struct Kernels {
  const char* name;
  void (*step)(const StepJob& job, int64_t begin, int64_t end);  // begin: a multiple of kBlock
  void (*sum_squares_blocks)(const void* x, int dtype, int64_t numel, double* sums);  // one for each block
  void (*convert)(const void* src, int src_dtype, void* dst, int dst_dtype, int64_t numel, float scale, bool add);
  void (*sum_rows)(const SumRowsJob& job, int64_t begin, int64_t end);
  void (*sum_messages)(const SumRowsJob& job, int64_t begin, int64_t end);  // multiples of kWireBlock, here and below
  void (*encode)(const EncodeJob& job, int64_t begin, int64_t end);
  uint32_t (*crc32)(uint32_t value, const void* data, int64_t nbytes);  // value: of what comes before; 0 of nothing
};

// cpu_dispatch.cpp
const Kernels& active();
void set_isa(const char* name);  // "auto" or a name; throws std::invalid_argument
int compiled_count();
const Kernels& compiled(int index);  // weakest first
bool runnable(int index);            // this processor, and its operating system, can run it

// cpu_parallel.cpp: the same kernels over whole arrays. threads <= 1 never enters an OpenMP region.
void step(const StepJob& job, int threads);
double sum_squares(const void* x, int dtype, int64_t numel, int threads);
void sum_rows(const SumRowsJob& job, int64_t numel, int threads);
void encode(const EncodeJob& job, int64_t numel, int threads);
void pack(const Span* spans, int64_t count, void* flat, int flat_dtype, float scale, bool add, int threads);

// cpu_read.cpp: reads a file from `offset` on, on the calling thread, and continues the CRC-32 `value` by what came.
// Returns how many bytes did, fewer where the file ends, or -errno.
int64_t crc32_read(int file, int64_t offset, void* target, int64_t nbytes, uint32_t& value);

}  // namespace zero
