// Asynchronous reads and writes for Python. Everything was checked by zero/kernels/aio.py, which also keeps memory and
// files alive until a request is done.
#include "bind_aio.h"

#include <memory>
#include <utility>

#include "aio.h"

namespace py = pybind11;

namespace zero {
namespace {

// Between two looks at the signals: a drive that does not answer must not keep a program from being interrupted.
constexpr int kSlice = 100;  // milliseconds

void wait_for(AioRequest& request) {
  bool done = request.done();
  while (!done) {
    {
      py::gil_scoped_release nogil;
      done = request.wait(kSlice);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

std::shared_ptr<AioRequest> submit(AioPool& pool, bool write, int fd, uintptr_t data, int64_t nbytes, int64_t offset,
                                   int64_t align) {
  if (nbytes < 0 || offset < 0 || align < 1) throw std::invalid_argument("nbytes, offset or align out of range");
  return pool.submit(AioSpan{write, fd, reinterpret_cast<char*>(data), nbytes, offset, align});
}

std::pair<int, int64_t> outcome(AioRequest& request) {
  const AioOutcome found = request.outcome();
  return {found.error, found.reached};
}

}  // namespace

void bind_aio(py::module_& m) {
  py::class_<AioRequest, std::shared_ptr<AioRequest>>(m, "AioRequest")
      .def("wait", &wait_for, "Wait until it is done.")
      .def("done", &AioRequest::done)
      .def("outcome", &outcome, "(error, reached) once it is done: struct AioOutcome of csrc/aio.h.");
  py::class_<AioPool>(m, "AioPool")
      .def(py::init<int, int, int64_t, bool>(), py::arg("workers"), py::arg("depth"), py::arg("block"),
           py::arg("uring"))
      .def("submit", &submit, "(write, fd, data, nbytes, offset, align) -> AioRequest; struct AioSpan of csrc/aio.h")
      .def("close", &AioPool::close, py::call_guard<py::gil_scoped_release>(), "Wait for all requests and end.");
}

}  // namespace zero
