// zero._cpu: the CPU kernels for Python. Addresses come as integers, everything was checked by zero/kernels/*.py;
// what is checked here again is only what would send a kernel into the wrong type. The GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels.h"

namespace py = pybind11;

namespace zero {
namespace {

void need_dtype(int code, bool none_allowed = false) {
  if (code == kF32 || code == kBF16 || code == kF16 || (none_allowed && code == kNone)) return;
  throw std::invalid_argument("dtype code " + std::to_string(code) + "; wanted 0 (fp32), 1 (bf16) or 2 (fp16)");
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void step_of(int formula, double lr, double beta1, double beta2, double eps, double weight_decay, double momentum,
             double dampening, double lr_decay, int flags, int64_t count, double grad_scale, uintptr_t master,
             uintptr_t remainder, uintptr_t param, int param_dtype, uintptr_t grad, int grad_dtype, uintptr_t state0,
             uintptr_t scale0, uintptr_t state1, uintptr_t scale1, int state_format, int64_t numel, uint64_t key,
             int64_t first, int threads) {
  need_dtype(grad_dtype);
  need_dtype(param_dtype, true);
  if (formula < 0 || formula >= kFormulas) throw std::invalid_argument("unknown formula " + std::to_string(formula));
  if (state_format < kStateF32 || state_format > kState8Bit) {
    throw std::invalid_argument("unknown format of states " + std::to_string(state_format));
  }
  if (remainder != 0 && (master != 0 || param_dtype != kBF16)) {
    throw std::invalid_argument("a remainder stands for the master, beside a bf16 parameter");
  }
  if (first % kBlock != 0) throw std::invalid_argument("first must be a multiple of " + std::to_string(kBlock));
  const Hyper hyper{lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags};
  const StepJob job{formula,
                    make_coef(formula, hyper, static_cast<double>(count), grad_scale),
                    pointer<float>(master),
                    pointer<uint16_t>(remainder),
                    pointer<void>(param),
                    param_dtype,
                    pointer<void>(grad),
                    grad_dtype,
                    state_format,
                    {pointer<void>(state0), pointer<void>(state1)},
                    {pointer<float>(scale0), pointer<float>(scale1)},
                    step_seed(key, static_cast<uint64_t>(count)),
                    static_cast<uint64_t>(first / kBlock)};
  py::gil_scoped_release nogil;
  step(job, numel, threads);
}

double sum_squares_of(uintptr_t x, int dtype, int64_t numel, int threads) {
  need_dtype(dtype);
  py::gil_scoped_release nogil;
  return sum_squares(pointer<void>(x), dtype, numel, threads);
}

std::vector<Span> spans_of(const std::vector<uintptr_t>& tensors, const std::vector<int>& dtypes,
                           const std::vector<int64_t>& numels, const std::vector<int64_t>& offsets) {
  const size_t count = tensors.size();
  if (dtypes.size() != count || numels.size() != count || offsets.size() != count) {
    throw std::invalid_argument("tensors, dtypes, numels and offsets must have the same length");
  }
  std::vector<Span> spans;
  spans.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    need_dtype(dtypes[i]);
    spans.push_back(Span{pointer<void>(tensors[i]), dtypes[i], numels[i], offsets[i]});
  }
  return spans;
}

void pack_spans(const std::vector<uintptr_t>& tensors, const std::vector<int>& dtypes,
                const std::vector<int64_t>& numels, const std::vector<int64_t>& offsets, uintptr_t flat,
                int flat_dtype, double scale, int threads) {
  need_dtype(flat_dtype);
  const std::vector<Span> spans = spans_of(tensors, dtypes, numels, offsets);
  py::gil_scoped_release nogil;
  pack(spans.data(), static_cast<int64_t>(spans.size()), pointer<void>(flat), flat_dtype,
       static_cast<float>(scale), threads);
}

void unpack_spans(uintptr_t flat, int flat_dtype, const std::vector<uintptr_t>& tensors,
                  const std::vector<int>& dtypes, const std::vector<int64_t>& numels,
                  const std::vector<int64_t>& offsets, double scale, int threads) {
  need_dtype(flat_dtype);
  const std::vector<Span> spans = spans_of(tensors, dtypes, numels, offsets);
  py::gil_scoped_release nogil;
  unpack(pointer<void>(flat), flat_dtype, spans.data(), static_cast<int64_t>(spans.size()),
         static_cast<float>(scale), threads);
}

void sum_rows_of(const std::vector<uintptr_t>& rows, int dtype, uintptr_t out, int64_t numel, bool accumulate,
                 int threads) {
  need_dtype(dtype);
  if (rows.empty()) throw std::invalid_argument("rows is empty; wanted at least one");
  std::vector<const void*> pointers;
  pointers.reserve(rows.size());
  for (const uintptr_t row : rows) pointers.push_back(pointer<void>(row));
  const SumRowsJob job{pointers.data(), static_cast<int64_t>(pointers.size()), dtype, pointer<float>(out), accumulate};
  py::gil_scoped_release nogil;
  sum_rows(job, numel, threads);
}

std::vector<std::string> names(bool only_runnable) {
  std::vector<std::string> result;
  for (int i = 0; i < compiled_count(); ++i) {
    if (!only_runnable || runnable(i)) result.emplace_back(compiled(i).name);
  }
  return result;
}

}  // namespace
}  // namespace zero

PYBIND11_MODULE(_cpu, m) {
  using namespace zero;
  m.doc() = "CPU kernels of zero over raw addresses; use zero.kernels, which checks its arguments.";
  m.def("isa", [] { return std::string(active().name); }, "Instruction set in use.");
  m.def("isas", [] { return names(true); }, "Instruction sets that this machine can run, weakest first.");
  m.def("compiled_isas", [] { return names(false); }, "Instruction sets that were compiled in, weakest first.");
  m.def("set_isa", [](const std::string& name) { set_isa(name.c_str()); }, py::arg("name"),
        "Choose an instruction set for the whole process ('auto': the strongest). For tests.");
  // Positional only: keyword arguments would cost a dictionary look-up each, on a path that runs every step.
  m.def("step", &step_of,
        "(formula, lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags, step, grad_scale,"
        " master, remainder, param, param_dtype, grad, grad_dtype, state0, scale0, state1, scale1, state_format,"
        " numel, key, first, threads)");
  m.def("sum_squares", &sum_squares_of, "(x, dtype, numel, threads) -> float");
  m.def("pack", &pack_spans, "(tensors, dtypes, numels, offsets, flat, flat_dtype, scale, threads)");
  m.def("unpack", &unpack_spans, "(flat, flat_dtype, tensors, dtypes, numels, offsets, scale, threads)");
  m.def("sum_rows", &sum_rows_of, "(rows, dtype, out, numel, accumulate, threads)");
}
