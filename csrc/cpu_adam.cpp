// Adam step over a range of a contiguous shard: one pass over gradient, master and both moments, with the narrowed
// copy of the parameter written on the way. Compiled once per instruction set.
#include "cpu_kernels.h"
#include "vec.h"

namespace zero {
namespace ZERO_ISA {
namespace {

struct Nothing {};  // no parameter copy

template <class V, class Out>
ZERO_INLINE void store_param(const V& p, Out* out, int64_t i) {
  p.store(out + i);
}
template <class V>
ZERO_INLINE void store_param(const V&, Nothing*, int64_t) {}

template <class V, bool L2, class Grad, class Out>
ZERO_INLINE void step_at(float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                         const Grad* __restrict grad, Out* __restrict out, const AdamCoef& coef, int64_t i) {
  V p = V::load(master + i);
  V m = V::load(exp_avg + i);
  V v = V::load(exp_avg_sq + i);
  adam_update<L2>(p, V::load(grad + i), m, v, coef);
  m.store(exp_avg + i);
  v.store(exp_avg_sq + i);
  p.store(master + i);
  store_param(p, out, i);
}

// The arrays do not overlap. Without __restrict the compiler, which must fear that a store changes another array or
// the coefficients, cannot vectorize the scalar build; for the same reason the coefficients are copied to the stack.
template <bool L2, class Grad, class Out>
void run(const AdamJob& job, int64_t begin, int64_t end) {
  float* __restrict master = job.master;
  float* __restrict exp_avg = job.exp_avg;
  float* __restrict exp_avg_sq = job.exp_avg_sq;
  const Grad* __restrict grad = static_cast<const Grad*>(job.grad);
  Out* __restrict out = static_cast<Out*>(job.param_out);
  const AdamCoef coef = job.coef;
  const int64_t tail = begin + (end - begin) / Vector::width * Vector::width;
  for (int64_t i = begin; i < tail; i += Vector::width) {
    step_at<Vector, L2>(master, exp_avg, exp_avg_sq, grad, out, coef, i);
  }
  for (int64_t i = tail; i < end; ++i) step_at<Scalar, L2>(master, exp_avg, exp_avg_sq, grad, out, coef, i);
}

template <bool L2, class Grad>
void run_out(const AdamJob& job, int64_t begin, int64_t end) {
  switch (job.param_out_dtype) {
    case kF32: return run<L2, Grad, float>(job, begin, end);
    case kBF16: return run<L2, Grad, BF16>(job, begin, end);
    case kF16: return run<L2, Grad, F16>(job, begin, end);
    default: return run<L2, Grad, Nothing>(job, begin, end);
  }
}

template <bool L2>
void run_grad(const AdamJob& job, int64_t begin, int64_t end) {
  switch (job.grad_dtype) {
    case kBF16: return run_out<L2, BF16>(job, begin, end);
    case kF16: return run_out<L2, F16>(job, begin, end);
    default: return run_out<L2, float>(job, begin, end);
  }
}

}  // namespace

void adam(const AdamJob& job, int64_t begin, int64_t end) {
  job.l2 ? run_grad<true>(job, begin, end) : run_grad<false>(job, begin, end);
}

}  // namespace ZERO_ISA
}  // namespace zero
