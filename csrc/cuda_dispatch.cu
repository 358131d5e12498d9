// The step in the format of its states, and the kernel that tries a device out.
#include "cuda_common.cuh"
#include "cuda_step.cuh"

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

}  // namespace cuda
}  // namespace zero
