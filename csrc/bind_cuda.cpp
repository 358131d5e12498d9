// zero._cuda: the CUDA kernels for Python. Addresses and streams come as integers, everything was checked by
// zero/kernels/*.py; what is checked here again is only what would send a kernel into the wrong type. Importing it
// touches no device; a call launches on the given stream and never waits.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cuda_kernels.cuh"

#ifndef ZERO_CUDA_ARCHS
#define ZERO_CUDA_ARCHS ""
#endif

namespace py = pybind11;

namespace zero {
namespace cuda {
namespace {

void need_dtype(int code, bool none_allowed = false) {
  if (code == kF32 || code == kBF16 || code == kF16 || (none_allowed && code == kNone)) return;
  throw std::invalid_argument("dtype code " + std::to_string(code) + "; wanted 0 (fp32), 1 (bf16) or 2 (fp16)");
}

void need_formula(int formula) {
  if (formula < 0 || formula >= kFormulas) throw std::invalid_argument("unknown formula " + std::to_string(formula));
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Where where(int device, uintptr_t stream) { return Where{device, pointer<void>(stream)}; }

// The arguments that name a shard, in the order of zero._cpu.step.
struct Shard {
  uintptr_t master, remainder, param;
  int param_dtype;
  uintptr_t grad;
  int grad_dtype;
  uintptr_t state0, scale0, state1, scale1;
  int state_format;
  int64_t numel;
  uint64_t key;
  int64_t first;
};

StepJob job_of(int formula, const Prepared* prepared, const Prepared& now, const Shard& shard) {
  need_formula(formula);
  need_dtype(shard.grad_dtype);
  need_dtype(shard.param_dtype, true);
  if (shard.state_format < kStateF32 || shard.state_format > kState8Bit) {
    throw std::invalid_argument("unknown format of states " + std::to_string(shard.state_format));
  }
  if (shard.remainder != 0 && (shard.master != 0 || shard.param_dtype != kBF16)) {
    throw std::invalid_argument("a remainder stands for the master, beside a bf16 parameter");
  }
  if (shard.first % kBlock != 0) throw std::invalid_argument("first must be a multiple of " + std::to_string(kBlock));
  return StepJob{formula,
                 shard.state_format,
                 prepared,
                 now,
                 pointer<float>(shard.master),
                 pointer<uint16_t>(shard.remainder),
                 pointer<void>(shard.param),
                 shard.param_dtype,
                 pointer<void>(shard.grad),
                 shard.grad_dtype,
                 {pointer<void>(shard.state0), pointer<void>(shard.state1)},
                 {pointer<float>(shard.scale0), pointer<float>(shard.scale1)},
                 shard.numel,
                 shard.key,
                 static_cast<uint64_t>(shard.first / kBlock)};
}

#define ZERO_SHARD_PARAMETERS                                                                                      \
  uintptr_t master, uintptr_t remainder, uintptr_t param, int param_dtype, uintptr_t grad, int grad_dtype,         \
      uintptr_t state0, uintptr_t scale0, uintptr_t state1, uintptr_t scale1, int state_format, int64_t numel,     \
      uint64_t key, int64_t first, int device, uintptr_t stream
#define ZERO_SHARD \
  Shard { master, remainder, param, param_dtype, grad, grad_dtype, state0, scale0, state1, scale1, state_format, numel, key, first }

// The coefficients are computed here, on the host, and travel with the launch.
void step_of(int formula, double lr, double beta1, double beta2, double eps, double weight_decay, double momentum,
             double dampening, double lr_decay, int flags, int64_t count, double grad_scale, ZERO_SHARD_PARAMETERS) {
  need_formula(formula);
  const Hyper hyper{lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags};
  const Prepared now{make_coef(formula, hyper, static_cast<double>(count), grad_scale), static_cast<uint64_t>(count),
                     0};
  const StepJob job = job_of(formula, nullptr, now, ZERO_SHARD);
  py::gil_scoped_release nogil;
  step(job, where(device, stream));
}

// The coefficients are read from device memory, where `prepare` put them.
void step_live(int formula, uintptr_t prepared, ZERO_SHARD_PARAMETERS) {
  if (prepared == 0) throw std::invalid_argument("prepared is 0; wanted the address of what prepare() wrote");
  const StepJob job = job_of(formula, pointer<const Prepared>(prepared), Prepared{}, ZERO_SHARD);
  py::gil_scoped_release nogil;
  step(job, where(device, stream));
}

void prepare_of(int formula, double lr, double beta1, double beta2, double eps, double weight_decay, double momentum,
                double dampening, double lr_decay, int flags, uintptr_t live, uintptr_t prepared, int device,
                uintptr_t stream) {
  need_formula(formula);
  const Hyper hyper{lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags};
  py::gil_scoped_release nogil;
  prepare(formula, hyper, pointer<double>(live), pointer<Prepared>(prepared), where(device, stream));
}

void clip_of(uintptr_t sum, double mean, double limit, uintptr_t live, int device, uintptr_t stream) {
  py::gil_scoped_release nogil;
  clip(pointer<const double>(sum), mean, limit, pointer<double>(live), where(device, stream));
}

void sum_squares_of(uintptr_t x, int dtype, int64_t numel, uintptr_t scratch, uintptr_t out, bool accumulate,
                    int device, uintptr_t stream) {
  need_dtype(dtype);
  py::gil_scoped_release nogil;
  sum_squares(pointer<void>(x), dtype, numel, pointer<double>(scratch), pointer<double>(out), accumulate,
              where(device, stream));
}

void move_of(uintptr_t spans, uintptr_t pieces, int64_t count, uintptr_t flat, int flat_dtype, double scale,
             bool to_flat, int device, uintptr_t stream) {
  need_dtype(flat_dtype);
  py::gil_scoped_release nogil;
  move(pointer<const Span>(spans), pointer<const Piece>(pieces), count, pointer<void>(flat), flat_dtype,
       static_cast<float>(scale), to_flat, where(device, stream));
}

void probe_of(int threads, int device, uintptr_t stream) {
  py::gil_scoped_release nogil;
  probe(threads, where(device, stream));
}

}  // namespace
}  // namespace cuda
}  // namespace zero

PYBIND11_MODULE(_cuda, m) {
  using namespace zero::cuda;
  m.doc() = "CUDA kernels of zero over raw addresses; use zero.kernels, which checks its arguments.";
  m.attr("ARCHS") = ZERO_CUDA_ARCHS;  // as ZERO_CUDA_ARCHS of setup.py
  m.attr("LIVE_WORDS") = static_cast<int>(kLiveWords);
  m.attr("PREPARED_BYTES") = kPreparedBytes;
  m.attr("NORM_BLOCK") = zero::kNormBlock;
  m.attr("PIECE") = kPiece;
  // Positional only: keyword arguments would cost a dictionary look-up each, on a path that runs every step.
  m.def("step", &step_of,
        "(formula, lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags, step, grad_scale, master,"
        " remainder, param, param_dtype, grad, grad_dtype, state0, scale0, state1, scale1, state_format, numel, key,"
        " first, device, stream)");
  m.def("step_live", &step_live,
        "(formula, prepared, master, remainder, param, param_dtype, grad, grad_dtype, state0, scale0, state1, scale1,"
        " state_format, numel, key, first, device, stream)");
  m.def("prepare", &prepare_of,
        "(formula, lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags, live, prepared, device,"
        " stream); lr is read from live");
  m.def("clip", &clip_of, "(sum, mean, limit, live, device, stream)");
  m.def("sum_squares", &sum_squares_of, "(x, dtype, numel, scratch, out, accumulate, device, stream)");
  m.def("move", &move_of, "(spans, pieces, count, flat, flat_dtype, scale, to_flat, device, stream)");
  m.def("probe", &probe_of, "(threads, device, stream)");
}
