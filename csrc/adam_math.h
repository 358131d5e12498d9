// Adam's formula, once. Scalar, AVX2, AVX-512 (and later NEON and CUDA) instantiate it over their vector type V.
//
// Adam:  Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1.
// AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2.
//
// Multiplications and additions are rounded one by one, never fused: so a plain sequence of torch operations,
// on any device, gives the same bits (adam_step_reference in zero/kernels/adam.py). The step is bound by memory,
// so fusing would buy nothing.
#pragma once

#if defined(__CUDACC__)
#define ZERO_INLINE __host__ __device__ __forceinline__
#else
#define ZERO_INLINE inline __attribute__((always_inline))
#endif

namespace zero {

// Everything that is the same for all elements. Computed in double and rounded once, in zero/kernels/adam.py,
// so that the kernels and the reference cannot disagree about it.
struct AdamCoef {
  float grad_scale;     // unscale x clip
  float weight_decay;   // L2: g += weight_decay * p
  float decay;          // decoupled: p *= decay = 1 - lr * weight_decay
  float lerp_weight;    // 1 - beta1, or -beta1 when lerp_from_grad
  bool lerp_from_grad;  // 1 - beta1 >= 0.5: interpolate from the near end, so that beta1 = 0 gives m = g exactly
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float neg_step_size;  // -lr / (1 - beta1^step)
};

// p: master parameter, g: raw gradient, m: exp_avg, v: exp_avg_sq.
template <bool L2, class V>
ZERO_INLINE void adam_update(V& p, V g, V& m, V& v, const AdamCoef& c) {
  g = g * V::all(c.grad_scale);
  if (L2) {
    g = g + p * V::all(c.weight_decay);
  } else {
    p = p * V::all(c.decay);
  }
  const V near = c.lerp_from_grad ? g : m;
  m = near + (g - m) * V::all(c.lerp_weight);
  v = v * V::all(c.beta2) + g * V::all(c.one_minus_beta2) * g;
  const V denom = sqrt(v) * V::all(c.inv_sqrt_correction2) + V::all(c.eps);
  p = p + m * V::all(c.neg_step_size) / denom;
}

}  // namespace zero
