// What kernels work on, on the CPU and on CUDA: the arrays of a contiguous shard for a step, and the spans of packing.
#pragma once

#include <cstdint>

#include "format_math.h"
#include "step_math.h"

namespace zero {

// The codes are part of the Python side's contract (zero/kernels/native.py).
enum DType : int { kNone = -1, kF32 = 0, kBF16 = 1, kF16 = 2 };
// No two of the arrays overlap. Exactly one of `master` and `remainder` is there; with `remainder`, `param` is bf16,
// read and written (format_math.h).
struct Shard {
  float* master;
  uint16_t* remainder;
  void* param;  // beside a master: written only; kNone: there is no copy
  int param_dtype;
  const void* grad;  // kF32, kBF16 or kF16
  int grad_dtype;
  void* state[kMaxStates];   // float, bf16 or uint8_t
  float* scale[kMaxStates];  // kState8Bit: one per kBlock elements
  int state_format;
  int64_t numel;
  uint64_t key;          // of the unit, for its random bits
  uint64_t first_block;  // place of the shard in its unit, in blocks
  // Bit i % 8 of byte i / 8 is set where the bits of the parameter of element i change (of the master where there is no
  // copy); others stay as they are. Null: nobody asks.
  uint8_t* marks;
};

// A tensor to pack into a flat buffer.
struct Span {
  void* tensor;
  int dtype;
  int64_t numel;
  int64_t offset;  // of its first element in the flat buffer
};

// Values to encode in 8 bits, for a message of parts of `part` blocks (format_math.h). What `error` holds, a message as
// well, is added to them, and what they then lose is left there; null: it is lost.
struct EncodeJob {
  const void* values;
  int dtype;
  uint8_t* message;
  uint8_t* error;
  int64_t part;
};

}  // namespace zero
