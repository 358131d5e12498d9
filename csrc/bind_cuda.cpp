// zero._cuda: the CUDA kernels for Python. Addresses and streams come as integers, everything was checked by
// zero/kernels/*.py; what is checked here again is only what would send a kernel into the wrong type. Importing it
// touches no device; a call that is given a stream launches there and never waits.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "bind_arguments.h"
#include "cuda_kernels.cuh"

#ifndef ZERO_CUDA_ARCHS
#define ZERO_CUDA_ARCHS ""
#endif

namespace py = pybind11;

namespace zero {
namespace cuda {
namespace {

Where where(int device, uintptr_t stream) { return Where{device, pointer<void>(stream)}; }

// The coefficients are computed here, on the host, and travel with the launch; all but the factor on the gradient, where
// `scale_address` says that this is in device memory.
void step_of(const FormulaArguments& formula, int64_t count, double grad_scale, uintptr_t scale_address,
             const AnyShardArguments& shard, int device, uintptr_t stream) {
  const int code = std::get<0>(formula);
  const Coef coef = make_coef(code, hyper_of(formula), static_cast<double>(count), grad_scale);
  const StepJob job{shard_of(shard), code, coef, static_cast<uint64_t>(count), pointer<const double>(scale_address)};
  py::gil_scoped_release nogil;
  step(job, where(device, stream));
}

void sum_squares_of(uintptr_t x, int dtype, int64_t numel, uintptr_t scratch, uintptr_t out, bool accumulate,
                    int device, uintptr_t stream) {
  need_dtype(dtype);
  py::gil_scoped_release nogil;
  sum_squares(pointer<void>(x), dtype, numel, pointer<double>(scratch), pointer<double>(out), accumulate,
              where(device, stream));
}

void sum_rows_of(uintptr_t first, int64_t stride, int64_t rows, int dtype, uintptr_t out, int64_t numel,
                 bool accumulate, int64_t part, int device, uintptr_t stream) {
  need_dtype(dtype);
  const SumRowsJob job{pointer<const char>(first), stride, rows, dtype, pointer<void>(out), numel, accumulate, part};
  py::gil_scoped_release nogil;
  (part > 0 ? sum_messages : sum_rows)(job, where(device, stream));
}

void encode_of(uintptr_t values, int dtype, int64_t numel, uintptr_t message, uintptr_t error, int64_t part,
               int device, uintptr_t stream) {
  const EncodeJob job = encode_job_of(values, dtype, message, error, part);
  py::gil_scoped_release nogil;
  encode(job, numel, where(device, stream));
}

void pack_of(const SpanArguments& arguments, uintptr_t flat, int flat_dtype, double scale, bool add, int device,
             uintptr_t stream) {
  need_dtype(flat_dtype);
  const std::vector<Span> spans = spans_of(arguments);
  py::gil_scoped_release nogil;
  pack(spans.data(), static_cast<int64_t>(spans.size()), pointer<void>(flat), flat_dtype, static_cast<float>(scale),
       add, where(device, stream));
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
  m.attr("NORM_BLOCK") = zero::kNormBlock;
  // Positional only: keyword arguments would cost a dictionary look-up each, on a path that runs every step.
  m.def("step", &step_of,
        "(formula, step, grad_scale, its address or 0, shard, device, stream); the tuples: csrc/bind_arguments.h");
  m.def("sum_squares", &sum_squares_of, "(x, dtype, numel, scratch, out, accumulate, device, stream)");
  m.def("pack", &pack_of, "([(tensor, dtype, numel, offset)], flat, flat_dtype, scale, add, device, stream)");
  m.def("sum_rows", &sum_rows_of,
        "(first, stride, rows, dtype, out, numel, accumulate, blocks of a part or 0, device, stream)");
  m.def("encode", &encode_of, "(values, dtype, numel, message, error or 0, blocks of a part, device, stream)");
  m.def("probe", &probe_of, "(threads, device, stream)");
  m.def("host_register", &host_register_of, "(address, nbytes, device)");
  m.def("host_unregister", &host_unregister_of, "(address, device)");
}
