// zero._cpu: the CPU kernels for Python. Addresses come as integers, everything was checked by zero/kernels/*.py;
// what is checked here again is only what would send a kernel into the wrong type. The GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_aio.h"
#include "bind_arguments.h"
#include "cpu_kernels.h"

namespace py = pybind11;

namespace zero {
namespace {

void step_of(const FormulaArguments& formula, int64_t count, double grad_scale,
             const AnyShardArguments& shard, int threads) {
  const int code = std::get<0>(formula);
  const Coef coef = make_coef(code, hyper_of(formula), static_cast<double>(count), grad_scale);
  StepJob job{shard_of(shard), code, coef, 0};
  job.seed = step_seed(job.key, static_cast<uint64_t>(count));
  py::gil_scoped_release nogil;
  step(job, threads);
}

double sum_squares_of(uintptr_t x, int dtype, int64_t numel, int threads) {
  need_dtype(dtype);
  py::gil_scoped_release nogil;
  return sum_squares(pointer<void>(x), dtype, numel, threads);
}

void pack_of(const SpanArguments& arguments, uintptr_t flat, int flat_dtype, double scale, bool add, int threads) {
  need_dtype(flat_dtype);
  const std::vector<Span> spans = spans_of(arguments);
  py::gil_scoped_release nogil;
  pack(spans.data(), static_cast<int64_t>(spans.size()), pointer<void>(flat), flat_dtype,
       static_cast<float>(scale), add, threads);
}

void sum_rows_of(const std::vector<uintptr_t>& rows, int dtype, uintptr_t out, int64_t numel, bool accumulate,
                 int64_t part, int threads) {
  need_dtype(dtype);
  if (rows.empty()) throw std::invalid_argument("rows is empty; wanted at least one");
  std::vector<const void*> pointers;
  pointers.reserve(rows.size());
  for (const uintptr_t row : rows) pointers.push_back(pointer<void>(row));
  const int64_t count = static_cast<int64_t>(pointers.size());
  const SumRowsJob job{pointers.data(), count, dtype, pointer<void>(out), accumulate, part};
  py::gil_scoped_release nogil;
  sum_rows(job, numel, threads);
}

void encode_of(uintptr_t values, int dtype, int64_t numel, uintptr_t message, uintptr_t error, int64_t part,
               int threads) {
  const EncodeJob job = encode_job_of(values, dtype, message, error, part);
  py::gil_scoped_release nogil;
  encode(job, numel, threads);
}

// The bytes of an object that has the buffer protocol; it may be read only unless they will be written. It cannot
// shrink while they are held.
class Bytes {
 public:
  explicit Bytes(const py::object& object, bool written = false) {
    const int flags = written ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  char* data() const { return static_cast<char*>(view_.buf); }
  int64_t size() const { return static_cast<int64_t>(view_.len); }

 private:
  Py_buffer view_;
};

uint32_t crc32_of(const py::object& data, uint32_t value) {
  const Bytes bytes(data);
  py::gil_scoped_release nogil;
  return active().crc32(value, bytes.data(), bytes.size());
}

py::tuple crc32_of_read(int file, int64_t offset, const py::object& target, int64_t chunk) {
  if (chunk < 1) throw std::invalid_argument("chunk must be at least 1");
  const Bytes to(target, true);
  std::vector<uint32_t> found;
  int64_t done = 0, got = 0;
  {
    py::gil_scoped_release nogil;
    while (done < to.size()) {
      const int64_t count = to.size() - done < chunk ? to.size() - done : chunk;
      uint32_t value = 0;
      got = crc32_read(file, offset + done, to.data() + done, count, value);
      if (got <= 0) break;
      found.push_back(value);
      done += got;
      if (got < count) break;
    }
  }
  if (got < 0) {
    errno = static_cast<int>(-got);
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return py::make_tuple(done, found);
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
  m.def("step", &step_of, "(formula, step, grad_scale, shard, threads); the tuples: csrc/bind_arguments.h");
  m.def("sum_squares", &sum_squares_of, "(x, dtype, numel, threads) -> float");
  m.def("pack", &pack_of, "([(tensor, dtype, numel, offset)], flat, flat_dtype, scale, add, threads)");
  m.def("sum_rows", &sum_rows_of, "(rows, dtype, out, numel, accumulate, blocks of a part or 0, threads)");
  m.def("encode", &encode_of, "(values, dtype, numel, message, error or 0, blocks of a part, threads)");
  m.def("crc32", &crc32_of, "(data, value) -> int; data: any object with a contiguous buffer");
  m.def("crc32_read", &crc32_of_read, "(file, offset, target, chunk) -> (nbytes, [int]); chunk in bytes");
  bind_aio(m);
}
