// What the host would otherwise be asked for in a step, on the device: clip factor, is-finite, count of steps and the
// formula's coefficients. Kernels of one thread; they cost a launch.
#include "cuda_common.cuh"
#include "cuda_step.cuh"

namespace zero {
namespace cuda {
namespace {

__global__ void prepare_kernel(int formula, const __grid_constant__ Hyper user, double* live, Prepared* prepared) {
  const bool skip = live[kFoundInf] != 0.0;  // also where it is NaN
  prepared->skip = skip ? 1 : 0;
  if (skip) return;
  const double count = live[kStep] + 1.0;
  live[kStep] = count;
  Hyper hyper = user;
  hyper.lr = live[kLr];
  prepared->coef = make_coef(formula, hyper, count, live[kGradScale]);
  prepared->step = static_cast<uint64_t>(count);
}

// As zero/optim/clip.py does it on the host: limit / (norm + 1e-6), never above 1.
__global__ void clip_kernel(const double* sum, double mean, double limit, double* live) {
  const double norm = ::sqrt(*sum) * mean;
  const double factor = limit > 0.0 ? limit / (norm + 1e-6) : 1.0;
  live[kNorm] = norm;
  live[kGradScale] = factor < 1.0 ? mean * factor : mean;
  live[kFoundInf] = norm - norm == 0.0 ? 0.0 : 1.0;
}

__global__ void probe_kernel() {}

}  // namespace

void prepare(int formula, const Hyper& hyper, double* live, Prepared* prepared, Where where) {
  enter(where);
  launch("prepare", prepare_kernel, 1, 1, where, formula, hyper, live, prepared);
}

void clip(const double* sum, double mean, double limit, double* live, Where where) {
  enter(where);
  launch("clip", clip_kernel, 1, 1, where, sum, mean, limit, live);
}

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
