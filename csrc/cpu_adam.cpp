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
ZERO_INLINE void step_at(const AdamJob& job, const AdamCoef& coef, const Grad* grad, Out* out, int64_t i) {
  V p = V::load(job.master + i);
  V m = V::load(job.exp_avg + i);
  V v = V::load(job.exp_avg_sq + i);
  adam_update<L2>(p, V::load(grad + i), m, v, coef);
  m.store(job.exp_avg + i);
  v.store(job.exp_avg_sq + i);
  p.store(job.master + i);
  store_param(p, out, i);
}

template <bool L2, class Grad, class Out>
void run(const AdamJob& shared, int64_t i, int64_t end) {
  // A copy on the stack: else every store through a float* might change the coefficients in the caller's struct,
  // and the compiler would load all of them again for each vector.
  const AdamJob job = shared;
  const Grad* grad = static_cast<const Grad*>(job.grad);
  Out* out = static_cast<Out*>(job.param_out);
  for (; i + Vector::width <= end; i += Vector::width) step_at<Vector, L2>(job, job.coef, grad, out, i);
  for (; i < end; ++i) step_at<Scalar, L2>(job, job.coef, grad, out, i);
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
