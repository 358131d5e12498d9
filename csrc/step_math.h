// The optimizers' formulas, once. Scalar, the CPU's vector types and CUDA instantiate them over their type V.
//
// Adam:     Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1.
// AdamW:    Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2.
// Lion:     Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2.
// Momentum: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, in the
//           form of torch.optim.SGD; Sgd is the same without momentum.
// Adagrad:  Duchi, Hazan & Singer, "Adaptive Subgradient Methods", JMLR 2011.
//
// Multiplications and additions are rounded one by one, never fused: so a plain sequence of torch operations,
// on any device, gives the same bits (the reference in zero/kernels/step.py). The step is bound by memory, so fusing
// would buy nothing.
//
// A formula is a struct of coefficients, computed in double and rounded once by `make`, and one `update`:
// p: master parameter, g: raw gradient, s: the formula's states. kSigned0 and kSigned1 say which of these may be
// negative, for those who store them in few bits.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define ZERO_INLINE __host__ __device__ __forceinline__
#else
#define ZERO_INLINE inline __attribute__((always_inline))
#endif

namespace zero {

// The codes are part of the Python side's contract (zero/kernels/formulas.py).
enum Formula : int { kAdam = 0, kLion = 1, kMomentum = 2, kSgd = 3, kAdagrad = 4 };
inline constexpr int kFormulas = 5;
inline constexpr int kMaxStates = 2;

// What the user sets; a formula reads its own part.
struct Hyper {
  enum Flags : int { kDecoupled = 1, kBiasCorrection = 2, kNesterov = 4 };

  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double momentum;
  double dampening;
  double lr_decay;
  int flags;
};

template <class Bits>
ZERO_INLINE Bits magnitude(Bits bits) {
  return bits & Bits::all(0x7FFFFFFFu);
}

// -1, 0 or 1 with the sign of x; zeros and NaN stay what they are.
template <class V>
ZERO_INLINE V sign_of(V x) {
  using Bits = typename V::Bits;
  const Bits u = bits_of(x), size = magnitude(u);
  const Bits one = (u & Bits::all(0x80000000u)) | Bits::all(0x3F800000u);
  const Bits number = select_greater(size, Bits::all(0x7F800000u), u, one);
  return V::of(select_greater(size, Bits::all(0), number, u));
}

// What every formula does to the gradient and the parameter before its own part.
struct Decay {
  float grad_scale;    // unscale x clip
  float weight_decay;  // L2: g += weight_decay * p
  float decay;         // decoupled: p *= decay = 1 - lr * weight_decay
  bool l2;
  bool decoupled;

  static ZERO_INLINE Decay make(const Hyper& h, double grad_scale, bool decoupled) {
    return {static_cast<float>(grad_scale), static_cast<float>(h.weight_decay),
            static_cast<float>(decoupled ? 1.0 - h.lr * h.weight_decay : 1.0), !decoupled && h.weight_decay != 0.0,
            decoupled};
  }

  template <class V>
  ZERO_INLINE V apply(V& p, V g) const {
    g = g * V::all(grad_scale);
    if (l2) g = g + p * V::all(weight_decay);
    if (decoupled) p = p * V::all(decay);
    return g;
  }
};

// s[0]: exp_avg, s[1]: exp_avg_sq.
struct Adam {
  static constexpr int kStates = 2;
  static constexpr bool kSigned0 = true, kSigned1 = false;

  Decay decay;
  float lerp_weight;    // 1 - beta1, or -beta1 when lerp_from_grad
  bool lerp_from_grad;  // 1 - beta1 >= 0.5: interpolate from the near end, so that beta1 = 0 gives m = g exactly
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float neg_step_size;  // -lr / (1 - beta1^step)

  static ZERO_INLINE Adam make(const Hyper& h, double step, double grad_scale) {
    const bool corrected = h.flags & Hyper::kBiasCorrection;
    const double correction1 = corrected ? 1.0 - pow(h.beta1, step) : 1.0;
    const double correction2 = corrected ? 1.0 - pow(h.beta2, step) : 1.0;
    const double weight = 1.0 - h.beta1;
    const bool from_grad = weight >= 0.5;
    return {Decay::make(h, grad_scale, h.flags & Hyper::kDecoupled),
            static_cast<float>(from_grad ? weight - 1.0 : weight),
            from_grad,
            static_cast<float>(h.beta2),
            static_cast<float>(1.0 - h.beta2),
            static_cast<float>(1.0 / ::sqrt(correction2)),
            static_cast<float>(h.eps),
            static_cast<float>(-h.lr / correction1)};
  }

  template <class V>
  ZERO_INLINE void update(V& p, V g, V* s) const {
    V m = s[0], v = s[1];
    g = decay.apply(p, g);
    const V change = (g - m) * V::all(lerp_weight);
    if (lerp_from_grad) {
      m = g + change;
    } else {
      m = m + change;
    }
    v = v * V::all(beta2) + g * V::all(one_minus_beta2) * g;
    const V denom = sqrt(v) * V::all(inv_sqrt_correction2) + V::all(eps);
    p = p + m * V::all(neg_step_size) / denom;
    s[0] = m;
    s[1] = v;
  }
};

// s[0]: exp_avg.
struct Lion {
  static constexpr int kStates = 1;
  static constexpr bool kSigned0 = true, kSigned1 = true;

  Decay decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float neg_lr;

  static ZERO_INLINE Lion make(const Hyper& h, double, double grad_scale) {
    return {Decay::make(h, grad_scale, true),      static_cast<float>(h.beta1),
            static_cast<float>(1.0 - h.beta1),     static_cast<float>(h.beta2),
            static_cast<float>(1.0 - h.beta2),     static_cast<float>(-h.lr)};
  }

  template <class V>
  ZERO_INLINE void update(V& p, V g, V* s) const {
    g = decay.apply(p, g);
    const V direction = s[0] * V::all(beta1) + g * V::all(one_minus_beta1);
    p = p + sign_of(direction) * V::all(neg_lr);
    s[0] = s[0] * V::all(beta2) + g * V::all(one_minus_beta2);
  }
};

// s[0]: momentum_buffer.
struct Momentum {
  static constexpr int kStates = 1;
  static constexpr bool kSigned0 = true, kSigned1 = true;

  Decay decay;
  float momentum;
  float one_minus_dampening;  // 1 in the first step, as torch starts the buffer with the gradient itself
  bool nesterov;
  float neg_lr;

  static ZERO_INLINE Momentum make(const Hyper& h, double step, double grad_scale) {
    return {Decay::make(h, grad_scale, false), static_cast<float>(h.momentum),
            static_cast<float>(step > 1.0 ? 1.0 - h.dampening : 1.0), (h.flags & Hyper::kNesterov) != 0,
            static_cast<float>(-h.lr)};
  }

  template <class V>
  ZERO_INLINE void update(V& p, V g, V* s) const {
    g = decay.apply(p, g);
    s[0] = s[0] * V::all(momentum) + g * V::all(one_minus_dampening);
    V direction = s[0];
    if (nesterov) direction = g + s[0] * V::all(momentum);
    p = p + direction * V::all(neg_lr);
  }
};

struct Sgd {
  static constexpr int kStates = 0;
  static constexpr bool kSigned0 = true, kSigned1 = true;

  Decay decay;
  float neg_lr;

  static ZERO_INLINE Sgd make(const Hyper& h, double, double grad_scale) {
    return {Decay::make(h, grad_scale, false), static_cast<float>(-h.lr)};
  }

  template <class V>
  ZERO_INLINE void update(V& p, V g, V*) const {
    g = decay.apply(p, g);
    p = p + g * V::all(neg_lr);
  }
};

// s[0]: sum (of the squared gradients).
struct Adagrad {
  static constexpr int kStates = 1;
  static constexpr bool kSigned0 = false, kSigned1 = false;

  Decay decay;
  float eps;
  float neg_lr;  // -lr / (1 + (step - 1) * lr_decay)

  static ZERO_INLINE Adagrad make(const Hyper& h, double step, double grad_scale) {
    return {Decay::make(h, grad_scale, false), static_cast<float>(h.eps),
            static_cast<float>(-(h.lr / (1.0 + (step - 1.0) * h.lr_decay)))};
  }

  template <class V>
  ZERO_INLINE void update(V& p, V g, V* s) const {
    g = decay.apply(p, g);
    s[0] = s[0] + g * g;
    p = p + g * V::all(neg_lr) / (sqrt(s[0]) + V::all(eps));
  }
};

// The coefficients of whichever formula runs.
union Coef {
  Adam adam;
  Lion lion;
  Momentum momentum;
  Sgd sgd;
  Adagrad adagrad;
};

ZERO_INLINE Coef make_coef(int formula, const Hyper& hyper, double step, double grad_scale) {
  Coef coef;
  switch (formula) {
    case kLion: coef.lion = Lion::make(hyper, step, grad_scale); break;
    case kMomentum: coef.momentum = Momentum::make(hyper, step, grad_scale); break;
    case kSgd: coef.sgd = Sgd::make(hyper, step, grad_scale); break;
    case kAdagrad: coef.adagrad = Adagrad::make(hyper, step, grad_scale); break;
    default: coef.adam = Adam::make(hyper, step, grad_scale); break;
  }
  return coef;
}

}  // namespace zero
