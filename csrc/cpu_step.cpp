// One optimizer step over a range of a contiguous shard, in one pass over gradient, master and states, with the
// parameter written on the way. Compiled once per instruction set.
//
// Templates: the formula and the format of the states. The dtypes of gradient and parameter and the kind of master are
// branches inside the loop: always taken the same way, they cost nothing in a loop that waits for memory, and a tenth
// of the code.
#include "cpu_kernels.h"
#include "vec.h"

namespace zero {
namespace ZERO_ISA {
namespace {

template <class V>
ZERO_INLINE V load_grad(const StepJob& job, int64_t i) {
  switch (job.grad_dtype) {
    case kBF16: return V::load(static_cast<const BF16*>(job.grad) + i);
    case kF16: return V::load(static_cast<const F16*>(job.grad) + i);
    default: return V::load(static_cast<const float*>(job.grad) + i);
  }
}

template <class V>
ZERO_INLINE V load_master(const StepJob& job, int64_t i) {
  if (job.remainder == nullptr) return V::load(job.master + i);
  return V::load_joined(&static_cast<BF16*>(job.param)[i].bits, job.remainder + i);
}

template <class V>
ZERO_INLINE void store_master(const StepJob& job, int64_t i, V p) {
  if (job.remainder != nullptr) {
    return p.store_split(&static_cast<BF16*>(job.param)[i].bits, job.remainder + i);
  }
  p.store(job.master + i);
  switch (job.param_dtype) {
    case kF32: return p.store(static_cast<float*>(job.param) + i);
    case kBF16: return bf16_ties_away(p).store(&static_cast<BF16*>(job.param)[i].bits);
    case kF16: return p.store(static_cast<F16*>(job.param) + i);
    default: return;
  }
}

template <class V, class Rule>
ZERO_INLINE void step_f32(const StepJob& job, const Rule& rule, int64_t i) {
  V s[kMaxStates];
  for (int k = 0; k < Rule::kStates; ++k) s[k] = V::load(static_cast<float*>(job.state[k]) + i);
  V p = load_master<V>(job, i);
  rule.update(p, load_grad<V>(job, i), s);
  for (int k = 0; k < Rule::kStates; ++k) s[k].store(static_cast<float*>(job.state[k]) + i);
  store_master(job, i, p);
}

// Job and formula come by value, here and below: a store through one of the arrays cannot change them then, so the
// compiler keeps them in registers.
template <class V, class Rule>
void run_f32(StepJob job, Rule rule, int64_t begin, int64_t end) {
  const int64_t tail = begin + (end - begin) / V::width * V::width;
  int64_t i = begin;
  for (; i < tail; i += V::width) step_f32<V>(job, rule, i);
  for (; i < end; ++i) step_f32<Scalar>(job, rule, i);
}

// ---- states of 16 and 8 bits: block by block, an update and one loop for each thing that is encoded ----
//
// For 8 bits the scale follows from the whole block. And one loop for all would need more constants than there are
// registers.

// A block between its update and its encoding.
struct Widened {
  alignas(64) float master[kBlock];
  alignas(64) float state[kMaxStates][kBlock];
};

template <class V, class Rule, int format, int k>
ZERO_INLINE V load_state(const StepJob& job, int64_t i, const float* scale) {
  constexpr bool has_sign = k == 0 ? Rule::kSigned0 : Rule::kSigned1;
  if constexpr (format == kStateBF16) return V::load(static_cast<BF16*>(job.state[k]) + i);
  return decode_8bit<has_sign, V>(V::Bits::load(static_cast<uint8_t*>(job.state[k]) + i), scale[k]);
}

// Updates elements [start + at, + V::width) into `widened`.
template <class V, class Rule, int format>
ZERO_INLINE void update(const StepJob& job, const Rule& rule, int64_t start, int64_t at, const float* scale,
                        Widened& widened, typename V::Bits* largest) {
  const int64_t i = start + at;
  V s[kMaxStates];
  if constexpr (Rule::kStates > 0) s[0] = load_state<V, Rule, format, 0>(job, i, scale);
  if constexpr (Rule::kStates > 1) s[1] = load_state<V, Rule, format, 1>(job, i, scale);
  V p = load_master<V>(job, i);
  rule.update(p, load_grad<V>(job, i), s);
  for (int k = 0; k < Rule::kStates; ++k) {
    s[k].store_as_is(widened.state[k] + at);
    if (format == kState8Bit) largest[k] = max_signed(largest[k], magnitude(bits_of(s[k])));
  }
  p.store_as_is(widened.master + at);
}

template <class V>
ZERO_INLINE void encode_master(const StepJob& job, int64_t start, int64_t at, const Widened& widened) {
  store_master(job, start + at, V::load_as_is(widened.master + at));
}

template <class V, class Rule, int format, int k>
ZERO_INLINE void encode_state(const StepJob& job, int64_t i, V s, uint32_t exponent, typename V::Bits random16) {
  constexpr bool has_sign = k == 0 ? Rule::kSigned0 : Rule::kSigned1;
  if constexpr (format == kStateBF16) {
    bf16_stochastic(s, random16).store(&(static_cast<BF16*>(job.state[k]) + i)->bits);
  } else {
    encode_8bit<has_sign>(s, exponent, random16).store(static_cast<uint8_t*>(job.state[k]) + i);
  }
}

void encode_masters(StepJob job, int64_t start, int64_t end, const Widened& widened) {
  const int64_t count = end - start, tail = count / Crossed::width * Crossed::width;
  int64_t at = 0;
  for (; at < tail; at += Crossed::width) encode_master<Crossed>(job, start, at, widened);
  for (; at < count; ++at) encode_master<Scalar>(job, start, at, widened);
}

struct Scales {
  float old[kMaxStates];
  uint32_t exponent[kMaxStates];
};

template <class Rule, int format>
__attribute__((noinline)) Scales update_compact(StepJob job, Rule rule, int64_t start, int64_t count,
                                                Widened& widened) {
  Scales scales{};
  for (int k = 0; k < Rule::kStates && format == kState8Bit; ++k) scales.old[k] = job.scale[k][start / kBlock];
  Crossed::Bits wide[kMaxStates] = {Crossed::Bits::all(0), Crossed::Bits::all(0)};
  Scalar::Bits narrow[kMaxStates] = {Scalar::Bits::all(0), Scalar::Bits::all(0)};
  const int64_t tail = count / Crossed::width * Crossed::width;
  int64_t at = 0;
  for (; at < tail; at += Crossed::width) {
    update<Crossed, Rule, format>(job, rule, start, at, scales.old, widened, wide);
  }
  for (; at < count; ++at) update<Scalar, Rule, format>(job, rule, start, at, scales.old, widened, narrow);
  for (int k = 0; k < Rule::kStates && format == kState8Bit; ++k) {
    scales.exponent[k] = block_exponent(max_signed(narrow[k], Scalar::Bits::all(wide[k].largest())).x);
    job.scale[k][start / kBlock] = from_pattern(scale_pattern(scales.exponent[k]));
  }
  return scales;
}

// The random bits of a second state wait where the master was: they are those of the first, upper half.
template <class V, class Rule, int format>
ZERO_INLINE void encode_first(const StepJob& job, int64_t start, int64_t at, uint32_t exponent,
                              typename V::Bits counter, Widened& widened) {
  const typename V::Bits random = random_bits(counter);
  const V s = V::load_as_is(widened.state[0] + at);
  encode_state<V, Rule, format, 0>(job, start + at, s, exponent, random_half<0>(random));
  if constexpr (Rule::kStates > 1) V::of(random_half<1>(random)).store_as_is(widened.master + at);
}

template <class V, class Rule, int format>
ZERO_INLINE void encode_second(const StepJob& job, int64_t start, int64_t at, uint32_t exponent,
                               const Widened& widened) {
  const V s = V::load_as_is(widened.state[1] + at), random = V::load_as_is(widened.master + at);
  encode_state<V, Rule, format, 1>(job, start + at, s, exponent, bits_of(random));
}

template <class Rule, int format>
__attribute__((noinline)) void encode_compact(StepJob job, Scales scales, int64_t start, int64_t count,
                                              Widened& widened) {
  encode_masters(job, start, start + count, widened);
  const uint32_t seed = block_seed(job.seed, job.first_block + static_cast<uint64_t>(start / kBlock));
  const int64_t tail = count / Crossed::width * Crossed::width;
  Crossed::Bits counter = lane_counter(seed, Crossed::Bits::lanes());
  int64_t at = 0;
  for (; at < tail; at += Crossed::width) {
    encode_first<Crossed, Rule, format>(job, start, at, scales.exponent[0], counter, widened);
    counter = counter + Crossed::Bits::all(Crossed::width * kLaneStep);
  }
  for (; at < count; ++at) {
    const Scalar::Bits lane = lane_counter(seed, Scalar::Bits::all(static_cast<uint32_t>(at)));
    encode_first<Scalar, Rule, format>(job, start, at, scales.exponent[0], lane, widened);
  }
  if constexpr (Rule::kStates > 1) {
    for (at = 0; at < tail; at += Crossed::width) {
      encode_second<Crossed, Rule, format>(job, start, at, scales.exponent[1], widened);
    }
    for (; at < count; ++at) encode_second<Scalar, Rule, format>(job, start, at, scales.exponent[1], widened);
  }
}

template <class Rule, int format>
void run_compact(const StepJob& job, const Rule& rule, int64_t begin, int64_t end) {
  Widened widened;
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t count = start + kBlock < end ? kBlock : end - start;
    const Scales scales = update_compact<Rule, format>(job, rule, start, count, widened);
    encode_compact<Rule, format>(job, scales, start, count, widened);
  }
}

template <class Rule>
void run(const StepJob& job, const Rule& rule, int64_t begin, int64_t end) {
  if (job.state_format == kStateF32 || Rule::kStates == 0) {
    // Two of five arrays are of 16 bits with a remainder, and the gradient often is a third.
    return job.remainder != nullptr ? run_f32<Crossed>(job, rule, begin, end) : run_f32<Vector>(job, rule, begin, end);
  }
  if constexpr (Rule::kStates > 0) {
    job.state_format == kStateBF16 ? run_compact<Rule, kStateBF16>(job, rule, begin, end)
                                   : run_compact<Rule, kState8Bit>(job, rule, begin, end);
  }
}

void run_rule(const StepJob& job, int64_t begin, int64_t end) {
  switch (job.formula) {
    case kLion: return run(job, job.coef.lion, begin, end);
    case kMomentum: return run(job, job.coef.momentum, begin, end);
    case kSgd: return run(job, job.coef.sgd, begin, end);
    case kAdagrad: return run(job, job.coef.adagrad, begin, end);
    default: return run(job, job.coef.adam, begin, end);
  }
}

// ---- marks of what has changed ----
//
// Beside the loops above, which know nothing of them: the parameters of a piece are copied before its step, and compared
// while both are in the nearest cache.

constexpr int64_t kMarked = 8 * kBlock;

// 1 in each place of 16 bits that is not 0, for four of them, in the low bits.
ZERO_INLINE uint32_t places_of_16(uint64_t x) {
  constexpr uint64_t low = 0x7FFF7FFF7FFF7FFFu;
  const uint64_t high = (((x & low) + low) | x) & ~low;
  return static_cast<uint32_t>(((high >> 15) * 0x0001000200040008u) >> 48) & 15u;
}

ZERO_INLINE uint64_t difference(const char* a, const char* b) {
  uint64_t x, y;
  __builtin_memcpy(&x, a, 8);
  __builtin_memcpy(&y, b, 8);
  return x ^ y;
}

#if defined(__AVX2__)
// Bits of 32 places of 16 bits that differ.
ZERO_INLINE uint32_t different_32(const char* a, const char* b) {
  const __m256i* x = reinterpret_cast<const __m256i*>(a);
  const __m256i* y = reinterpret_cast<const __m256i*>(b);
  const __m256i first = _mm256_cmpeq_epi16(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
  const __m256i second = _mm256_cmpeq_epi16(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(both));
}
#endif

// Without a branch on what has changed, which nobody foresees.
void mark(uint8_t* marks, const char* before, const char* now, int64_t size, int64_t count) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; size == 2 && i + 32 <= count; i += 32) {
    uint32_t bits;
    __builtin_memcpy(&bits, marks + i / 8, 4);
    bits |= different_32(before + i * 2, now + i * 2);
    __builtin_memcpy(marks + i / 8, &bits, 4);
  }
#endif
  for (; i + 8 <= count; i += 8) {
    const char *a = before + i * size, *b = now + i * size;
    uint32_t bits = 0;
    if (size == 2) {
      bits = places_of_16(difference(a, b)) | places_of_16(difference(a + 8, b + 8)) << 4;
    } else {
      for (int k = 0; k < 8; k += 2) {
        const uint64_t x = difference(a + k * 4, b + k * 4);
        bits |= (static_cast<uint32_t>(static_cast<uint32_t>(x) != 0) | static_cast<uint32_t>(x >> 32 != 0) << 1) << k;
      }
    }
    marks[i / 8] = static_cast<uint8_t>(marks[i / 8] | bits);
  }
  for (; i < count; ++i) {
    if (__builtin_memcmp(before + i * size, now + i * size, static_cast<size_t>(size)) != 0) {
      marks[i / 8] = static_cast<uint8_t>(marks[i / 8] | 1u << i % 8);
    }
  }
}

void run_marked(const StepJob& job, int64_t begin, int64_t end) {
  const bool copied = job.param_dtype != kNone;
  const int64_t size = copied ? dtype_size(job.param_dtype) : 4;
  const char* params = copied ? static_cast<const char*>(job.param) : reinterpret_cast<const char*>(job.master);
  alignas(64) char before[kMarked * 4];
  for (int64_t start = begin; start < end; start += kMarked) {
    const int64_t count = start + kMarked < end ? kMarked : end - start;
    __builtin_memcpy(before, params + start * size, static_cast<size_t>(count * size));
    run_rule(job, start, start + count);
    mark(job.marks + start / 8, before, params + start * size, size, count);
  }
}

}  // namespace

void step(const StepJob& job, int64_t begin, int64_t end) {
  job.marks == nullptr ? run_rule(job, begin, end) : run_marked(job, begin, end);
}

}  // namespace ZERO_ISA
}  // namespace zero
