// zero._cuda: the CUDA kernels for Python. Addresses and streams come as integers, everything was checked by
// zero/kernels/*.py; what is checked here again is only what would send a kernel into the wrong type. Importing it
// touches no device; a call that is given a stream launches there and never waits.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "bind_step.h"
#include "cuda_kernels.cuh"

#ifndef ZERO_CUDA_ARCHS
#define ZERO_CUDA_ARCHS ""
#endif

namespace py = pybind11;

namespace zero {
namespace cuda {
namespace {

Where where(int device, uintptr_t stream) { return Where{device, pointer<void>(stream)}; }

// The coefficients are computed here, on the host, and travel with the launch.
void step_of(const FormulaArguments& formula, int64_t count, double grad_scale, const ShardArguments& shard, int device,
             uintptr_t stream) {
  const int code = std::get<0>(formula);
  const Coef coef = make_coef(code, hyper_of(formula), static_cast<double>(count), grad_scale);
  const StepJob job{shard_of(shard), code, nullptr, Prepared{coef, static_cast<uint64_t>(count), 0}};
  py::gil_scoped_release nogil;
  step(job, where(device, stream));
}

// The coefficients are read from device memory, where `prepare` put them.
void step_live(int formula, uintptr_t prepared, const ShardArguments& shard, int device, uintptr_t stream) {
  need_formula(formula);
  if (prepared == 0) throw std::invalid_argument("prepared is 0; wanted the address of what prepare() wrote");
  const StepJob job{shard_of(shard), formula, pointer<const Prepared>(prepared), Prepared{}};
  py::gil_scoped_release nogil;
  step(job, where(device, stream));
}

void prepare_of(const FormulaArguments& formula, uintptr_t live, uintptr_t prepared, int device, uintptr_t stream) {
  const Hyper hyper = hyper_of(formula);
  py::gil_scoped_release nogil;
  prepare(std::get<0>(formula), hyper, pointer<double>(live), pointer<Prepared>(prepared), where(device, stream));
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

void host_register_of(uintptr_t address, int64_t nbytes, int device) {
  py::gil_scoped_release nogil;
  host_register(pointer<void>(address), nbytes, device);
}

void host_unregister_of(uintptr_t address, int device) {
  py::gil_scoped_release nogil;
  host_unregister(pointer<void>(address), device);
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
  m.def("step", &step_of, "(formula, step, grad_scale, shard, device, stream); the tuples: csrc/bind_step.h");
  m.def("step_live", &step_live, "(formula code, prepared, shard, device, stream)");
  m.def("prepare", &prepare_of, "(formula, live, prepared, device, stream); lr is read from live");
  m.def("clip", &clip_of, "(sum, mean, limit, live, device, stream)");
  m.def("sum_squares", &sum_squares_of, "(x, dtype, numel, scratch, out, accumulate, device, stream)");
  m.def("move", &move_of, "(spans, pieces, count, flat, flat_dtype, scale, to_flat, device, stream)");
  m.def("probe", &probe_of, "(threads, device, stream)");
  m.def("host_register", &host_register_of, "(address, nbytes, device)");
  m.def("host_unregister", &host_unregister_of, "(address, device)");
}
