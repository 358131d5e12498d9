// One optimizer step over a contiguous shard, in one launch: gradient, master and states are read once and written
// once, the parameter is written on the way.
//
// Templates: the formula and the format of the states. The dtypes of gradient and parameter and the kind of master are
// branches that all threads take the same way; they cost nothing beside the memory. The file is compiled once per
// format, with -DZERO_STATE_FORMAT=0, 1 or 2, which lets the three compile side by side.
#include <type_traits>

#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 128;

// Elements of a thread, side by side. fp32: 4, so that each access of a warp covers whole sectors of all its arrays.
// 16-bit and 8-bit states: 8, which makes 16 bytes of a 16-bit array, and a block of 256 elements the work of a warp.
template <int format>
inline constexpr int kRun = format == kStateF32 ? 4 : 8;

// Blocks of threads that a processor is to hold at least; it bounds the registers, and nothing spills.
template <int format>
inline constexpr int kResident = format == kStateF32 ? 8 : format == kStateBF16 ? 6 : 5;

template <int format>
inline constexpr int kStateSize = format == kStateF32 ? 4 : format == kStateBF16 ? 2 : 1;

template <class Rule>
__device__ __forceinline__ Rule rule_of(const Coef& coef) {
  if constexpr (std::is_same_v<Rule, Lion>) return coef.lion;
  if constexpr (std::is_same_v<Rule, Momentum>) return coef.momentum;
  if constexpr (std::is_same_v<Rule, Sgd>) return coef.sgd;
  if constexpr (std::is_same_v<Rule, Adagrad>) return coef.adagrad;
  if constexpr (std::is_same_v<Rule, Adam>) return coef.adam;
}

// Which arrays begin where a whole run can be moved at once. Runs keep that from there on.
template <int format>
struct Wide {
  static constexpr int n = kRun<format>;
  bool grad, master, param, state[kMaxStates];

  __device__ __forceinline__ explicit Wide(const StepJob& job)
      : grad(aligned(job.grad, n * size_of(job.grad_dtype))),
        master(job.remainder ? aligned(job.remainder, n * 2) : aligned(job.master, n * 4)),
        param(aligned(job.param, n * size_of(job.param_dtype))),
        state{aligned(job.state[0], n * kStateSize<format>), aligned(job.state[1], n * kStateSize<format>)} {}
};

// A run of elements as it lies in memory.
template <int format>
struct Raw {
  static constexpr int n = kRun<format>;
  uint32_t grad[n], master[n], param[n], state[kMaxStates][n];
  float scale[kMaxStates];

  template <class Rule>
  __device__ __forceinline__ void load(const StepJob& job, const Wide<format>& wide, int64_t i, int count) {
    load_floats<n>(grad, job.grad, job.grad_dtype, i, count, wide.grad);
    if (job.remainder) {
      load_words<2, n>(master, job.remainder + i, count, wide.master);
      load_words<2, n>(param, at(job.param, i * 2), count, wide.param);
    } else {
      load_words<4, n>(master, job.master + i, count, wide.master);
      if (job.marks && job.param_dtype != kNone) {
        load_floats<n>(param, job.param, job.param_dtype, i, count, wide.param);
      }
    }
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      constexpr int size = kStateSize<format>;
      load_words<size, n>(state[s], at(job.state[s], i * size), count, wide.state[s]);
      if constexpr (format == kState8Bit) scale[s] = count > 0 ? job.scale[s][i / kBlock] : 0.0f;
    }
  }

  __device__ __forceinline__ Scalar master_at(const StepJob& job, int k) const {
    if (!job.remainder) return Scalar{from_pattern(master[k])};
    return join_master<Scalar>(ScalarBits{word_at<2>(param, k)}, ScalarBits{word_at<2>(master, k)});
  }

  template <bool has_sign, int s>
  __device__ __forceinline__ Scalar state_at(int k) const {
    const uint32_t x = word_at<kStateSize<format>>(state[s], k);
    if constexpr (format == kStateF32) return Scalar{from_pattern(x)};
    if constexpr (format == kStateBF16) return Scalar{from_pattern(x << 16)};
    return decode_8bit<has_sign, Scalar>(ScalarBits{x}, scale[s]);
  }
};

// Marks the elements of a run whose words of `size` bytes have changed. All lanes of a warp come here together.
template <int size, int n>
__device__ __forceinline__ void mark(const StepJob& job, const uint32_t* before, const uint32_t* now, int64_t i,
                                     int count) {
  if (!job.marks) return;
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < n; ++k) {
    if (k < count && word_at<size>(before, k) != word_at<size>(now, k)) bits |= 1u << k;
  }
  if constexpr (n == 4) {  // a byte is that of two lanes, of which the first writes it
    bits |= __shfl_xor_sync(kAllLanes, bits, 1) << 4;
    if (i / n % 2 != 0) return;
  }
  if (bits) job.marks[i / 8] = static_cast<uint8_t>(job.marks[i / 8] | bits);
}

template <int n>
__device__ __forceinline__ void store_param(const StepJob& job, const Scalar (&p)[n], const uint32_t* before, int64_t i,
                                            int count, bool wide) {
  uint32_t w[n];
  if (job.param_dtype == kF32) {
#pragma unroll
    for (int k = 0; k < n; ++k) w[k] = pattern(p[k].x);
    store_words<4, n>(w, at(job.param, i * 4), count, wide);
    mark<4, n>(job, before, w, i, count);
    return;
  }
#pragma unroll
  for (int k = 0; k < n; ++k) {
    put_word<2>(w, k, job.param_dtype == kBF16 ? bf16_ties_away(p[k]).x : narrow_f16(p[k].x).bits);
  }
  store_words<2, n>(w, at(job.param, i * 2), count, wide);
  mark<2, n>(job, before, w, i, count);
}

template <int format, int n>
__device__ __forceinline__ void store_master(const StepJob& job, const Wide<format>& wide, const Raw<format>& before,
                                             const Scalar (&p)[n], int64_t i, int count) {
  uint32_t w[n];
  if (!job.remainder) {
#pragma unroll
    for (int k = 0; k < n; ++k) w[k] = pattern(p[k].x);
    store_words<4, n>(w, job.master + i, count, wide.master);
    if (job.param_dtype != kNone) return store_param(job, p, before.param, i, count, wide.param);
    mark<4, n>(job, before.master, w, i, count);
    return;
  }
  uint32_t upper[n];
#pragma unroll
  for (int k = 0; k < n; ++k) {
    ScalarBits param, low;
    split_master(p[k], param, low);
    put_word<2>(upper, k, param.x & 0xFFFFu);
    put_word<2>(w, k, low.x);
  }
  store_words<2, n>(upper, at(job.param, i * 2), count, wide.param);
  store_words<2, n>(w, job.remainder + i, count, wide.master);
  mark<2, n>(job, before.param, upper, i, count);
}

// State number `s` of a run. All lanes of a warp come here together: in 8 bit they share a block and its scale.
template <int format, bool has_sign, int s, int n>
__device__ __forceinline__ void store_state(const StepJob& job, const Scalar (&x)[n], const ScalarBits (&random)[n],
                                            int64_t i, int count, bool wide) {
  constexpr int size = kStateSize<format>;
  uint32_t w[n];
  if constexpr (format == kState8Bit) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const uint32_t own = magnitude(bits_of(x[k])).x;
      if (k < count && own > largest) largest = own;
    }
    const uint32_t exponent = block_exponent(largest_of<kWarp>(largest));
#pragma unroll
    for (int k = 0; k < n; ++k) {
      put_word<1>(w, k, encode_8bit<has_sign>(x[k], exponent, random_half<s>(random[k])).x);
    }
    if (count > 0 && i % kBlock == 0) job.scale[s][i / kBlock] = from_pattern(scale_pattern(exponent));
  } else {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      if constexpr (format == kStateF32) w[k] = pattern(x[k].x);
      if constexpr (format == kStateBF16) put_word<2>(w, k, bf16_stochastic(x[k], random_half<s>(random[k])).x);
    }
  }
  store_words<size, n>(w, at(job.state[s], i * size), count, wide);
}

template <class Rule, int format>
__device__ __forceinline__ void step_run(const StepJob& job, const Rule& rule, uint64_t seed, const Wide<format>& wide,
                                         int64_t i, int count) {
  constexpr int n = kRun<format>;
  Raw<format> raw;
  raw.template load<Rule>(job, wide, i, count);
  Scalar p[n], s0[n], s1[n];
#pragma unroll
  for (int k = 0; k < n; ++k) {
    Scalar s[kMaxStates];
    if constexpr (Rule::kStates > 0) s[0] = raw.template state_at<Rule::kSigned0, 0>(k);
    if constexpr (Rule::kStates > 1) s[1] = raw.template state_at<Rule::kSigned1, 1>(k);
    p[k] = raw.master_at(job, k);
    rule.update(p[k], float_at(raw.grad, k, job.grad_dtype), s);
    if constexpr (Rule::kStates > 0) s0[k] = s[0];
    if constexpr (Rule::kStates > 1) s1[k] = s[1];
  }
  ScalarBits random[n];
  if constexpr (format != kStateF32) {
    const uint32_t block = block_seed(seed, job.first_block + static_cast<uint64_t>(i / kBlock));
    const ScalarBits counter = lane_counter(block, ScalarBits{static_cast<uint32_t>(i % kBlock)});
#pragma unroll
    for (int k = 0; k < n; ++k) random[k] = random_bits(counter + ScalarBits::all(k * kLaneStep));
  }
  if constexpr (Rule::kStates > 0) store_state<format, Rule::kSigned0, 0>(job, s0, random, i, count, wide.state[0]);
  if constexpr (Rule::kStates > 1) store_state<format, Rule::kSigned1, 1>(job, s1, random, i, count, wide.state[1]);
  store_master(job, wide, raw, p, i, count);
}

template <class Rule, int format>
__global__ void __launch_bounds__(kThreads, kResident<format>) step_kernel(const __grid_constant__ StepJob job) {
  Rule rule = rule_of<Rule>(job.coef);
  if (job.grad_scale) {
    const double grad_scale = *job.grad_scale;
    if (grad_scale != grad_scale) return;
    rule.decay.grad_scale = static_cast<float>(grad_scale);
  }
  const uint64_t seed = step_seed(job.key, job.step);
  const Wide<format> wide(job);
  constexpr int n = kRun<format>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * n;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // A whole warp goes on or ends, although its last lanes may have nothing left.
  int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x - lane) * n;
  for (; warp < job.numel; warp += stride) {
    const int64_t i = warp + lane * n, left = job.numel - i;
    step_run<Rule, format>(job, rule, seed, wide, i, left >= n ? n : left > 0 ? static_cast<int>(left) : 0);
  }
}

template <class Rule, int format>
void run(const char* name, const StepJob& job, const Where& where) {
  const auto kernel = &step_kernel<Rule, format>;
  const int64_t blocks = grid(kernel, kThreads, ceil_div(job.numel, kThreads * kRun<format>), where);
  launch(name, kernel, blocks, kThreads, where, job);
}

}  // namespace

template <int format>
void step_in(const StepJob& job, const Where& where) {
  switch (job.formula) {
    case kLion: return run<Lion, format>("step (Lion)", job, where);
    case kMomentum: return run<Momentum, format>("step (SGD with momentum)", job, where);
    case kAdagrad: return run<Adagrad, format>("step (Adagrad)", job, where);
    case kSgd:  // has no states, and so no format
      if constexpr (format == kStateF32) return run<Sgd, format>("step (SGD)", job, where);
      throw std::invalid_argument("SGD without momentum has no states to keep in a format");
    default: return run<Adam, format>("step (Adam)", job, where);
  }
}

template void step_in<ZERO_STATE_FORMAT>(const StepJob& job, const Where& where);

}  // namespace cuda
}  // namespace zero
