// The arguments of kernels as Python gives them, for both modules. Addresses come as integers, everything was checked
// by zero/kernels/*.py; what is checked here again is only what would send a kernel into the wrong type.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "jobs.h"

namespace zero {

// Formula.native() of zero/kernels/formulas.py: (formula, lr, beta1, beta2, eps, weight_decay, momentum, dampening,
// lr_decay, flags).
using FormulaArguments = std::tuple<int, double, double, double, double, double, double, double, double, int>;

// kernel_arguments() of zero/kernels/step.py: (master, remainder, param, param_dtype, grad,
// grad_dtype, state0, scale0, state1, scale1, state_format, numel, key, first).
using ShardArguments = std::tuple<uintptr_t, uintptr_t, uintptr_t, int, uintptr_t, int, uintptr_t, uintptr_t, uintptr_t,
                                  uintptr_t, int, int64_t, uint64_t, int64_t>;

// With the address of the marks, where changes are to be marked.
using AnyShardArguments = std::variant<ShardArguments, std::tuple<ShardArguments, uintptr_t>>;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void need_dtype(int code, bool none_allowed = false) {
  if (code == kF32 || code == kBF16 || code == kF16 || (none_allowed && code == kNone)) return;
  throw std::invalid_argument("dtype code " + std::to_string(code) + "; wanted 0 (fp32), 1 (bf16) or 2 (fp16)");
}

inline Hyper hyper_of(const FormulaArguments& arguments) {
  const auto& [formula, lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags] = arguments;
  if (formula < 0 || formula >= kFormulas) throw std::invalid_argument("unknown formula " + std::to_string(formula));
  return Hyper{lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags};
}

inline Shard shard_of(const ShardArguments& arguments) {
  const auto& [master, remainder, param, param_dtype, grad, grad_dtype, state0, scale0, state1, scale1, state_format,
               numel, key, first] = arguments;
  need_dtype(grad_dtype);
  need_dtype(param_dtype, true);
  if (state_format < kStateF32 || state_format > kState8Bit) {
    throw std::invalid_argument("unknown format of states " + std::to_string(state_format));
  }
  if (remainder != 0 && (master != 0 || param_dtype != kBF16)) {
    throw std::invalid_argument("a remainder stands for the master, beside a bf16 parameter");
  }
  if (first % kBlock != 0) throw std::invalid_argument("first must be a multiple of " + std::to_string(kBlock));
  return Shard{pointer<float>(master),
               pointer<uint16_t>(remainder),
               pointer<void>(param),
               param_dtype,
               pointer<void>(grad),
               grad_dtype,
               {pointer<void>(state0), pointer<void>(state1)},
               {pointer<float>(scale0), pointer<float>(scale1)},
               state_format,
               numel,
               key,
               static_cast<uint64_t>(first / kBlock),
               nullptr};
}

inline Shard shard_of(const AnyShardArguments& arguments) {
  if (const auto* plain = std::get_if<ShardArguments>(&arguments)) return shard_of(*plain);
  const auto& [plain, marks] = std::get<1>(arguments);
  Shard shard = shard_of(plain);
  shard.marks = pointer<uint8_t>(marks);
  return shard;
}

// Packing: (address, dtype, numel, offset) of each tensor.
using SpanArguments = std::vector<std::tuple<uintptr_t, int, int64_t, int64_t>>;

inline std::vector<Span> spans_of(const SpanArguments& arguments) {
  std::vector<Span> spans;
  spans.reserve(arguments.size());
  for (const auto& [tensor, dtype, numel, offset] : arguments) {
    need_dtype(dtype);
    spans.push_back(Span{pointer<void>(tensor), dtype, numel, offset});
  }
  return spans;
}

inline EncodeJob encode_job_of(uintptr_t values, int dtype, uintptr_t message, uintptr_t error, int64_t part) {
  need_dtype(dtype);
  return EncodeJob{pointer<void>(values), dtype, pointer<uint8_t>(message), pointer<uint8_t>(error), part};
}

}  // namespace zero
