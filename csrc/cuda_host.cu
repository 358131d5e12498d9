// What the host does around the kernels: it picks the step of a format, tries a device out, and pins memory of its own,
// which the device then reads and writes by itself.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

void step(const StepJob& job, Where where) {
  if (job.numel == 0) return;
  enter(where);
  switch (job.formula == kSgd ? kStateF32 : job.state_format) {
    case kStateBF16: return step_in<kStateBF16>(job, where);
    case kState8Bit: return step_in<kState8Bit>(job, where);
    default: return step_in<kStateF32>(job, where);
  }
}

void probe(int threads, Where where) {
  enter(where);
  launch("probe", probe_kernel, 1, threads, where);
}

void host_register(void* address, int64_t nbytes, int device) {
  enter(Where{device, nullptr});
  // Portable: pinned for every device of the process, whichever one is current when a copy is made.
  check(cudaHostRegister(address, static_cast<size_t>(nbytes), cudaHostRegisterPortable), "cudaHostRegister",
        Where{device, nullptr});
}

void host_unregister(void* address, int device) {
  enter(Where{device, nullptr});
  check(cudaHostUnregister(address), "cudaHostUnregister", Where{device, nullptr});
}

}  // namespace cuda
}  // namespace zero
