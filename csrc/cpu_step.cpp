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
  using Bits = typename V::Bits;
  return join_master<V>(Bits::load(&static_cast<BF16*>(job.param)[i].bits), Bits::load(job.remainder + i));
}

template <class V>
ZERO_INLINE void store_master(const StepJob& job, int64_t i, V p) {
  if (job.remainder != nullptr) {
    typename V::Bits param, low;
    split_master(p, param, low);
    param.store(&static_cast<BF16*>(job.param)[i].bits);
    low.store(job.remainder + i);
    return;
  }
  p.store(job.master + i);
  switch (job.param_dtype) {
    case kF32: return p.store(static_cast<float*>(job.param) + i);
    case kBF16: return bf16_ties_away(p).store(&static_cast<BF16*>(job.param)[i].bits);
    case kF16: return p.store(static_cast<F16*>(job.param) + i);
    default: return;
  }
}

// The common fp32 step: nothing is encoded, so nothing has to wait.
template <class V, class Rule>
ZERO_INLINE void step_plain(const StepJob& job, const Rule& rule, int64_t i) {
  V s[kMaxStates];
  for (int k = 0; k < Rule::kStates; ++k) s[k] = V::load(static_cast<float*>(job.state[k]) + i);
  V p = V::load(job.master + i);
  rule.update(p, load_grad<V>(job, i), s);
  for (int k = 0; k < Rule::kStates; ++k) s[k].store(static_cast<float*>(job.state[k]) + i);
  p.store(job.master + i);
}

// A block between its update and its encoding. Both are done in one loop, the update of one block beside the encoding
// of the block before: what an update yields, root and quotient, comes late, and a processor that has the instructions
// that wait for it in its queue cannot look further ahead. For 8 bits the wait is needed anyhow: the scale follows from
// the whole block.
struct Widened {
  alignas(64) float master[kBlock];
  alignas(64) float state[kMaxStates][kBlock];
};

// What goes with it.
struct Tile {
  int64_t start;                  // index of its first element
  uint32_t seed;                  // of the random bits
  uint32_t exponent[kMaxStates];  // of the 8-bit scales
};

template <class V, class Rule, int format, int k>
ZERO_INLINE V load_state(const StepJob& job, int64_t i, const float* scale) {
  constexpr bool has_sign = k == 0 ? Rule::kSigned0 : Rule::kSigned1;
  if constexpr (format == kStateF32) return V::load(static_cast<float*>(job.state[k]) + i);
  if constexpr (format == kStateBF16) return V::load(static_cast<BF16*>(job.state[k]) + i);
  return decode_8bit<has_sign, V>(V::Bits::load(static_cast<uint8_t*>(job.state[k]) + i), scale[k]);
}

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
    s[k].store(format == kStateF32 ? static_cast<float*>(job.state[k]) + i : widened.state[k] + at);
    if (format == kState8Bit) largest[k] = max_signed(largest[k], magnitude(bits_of(s[k])));
  }
  p.store(widened.master + at);
}

template <class V, class Rule, int format, int k>
ZERO_INLINE void encode_state(const StepJob& job, const Tile& tile, int64_t at, const Widened& widened,
                              typename V::Bits random) {
  constexpr bool has_sign = k == 0 ? Rule::kSigned0 : Rule::kSigned1;
  const int64_t i = tile.start + at;
  const V s = V::load(widened.state[k] + at);
  if constexpr (format == kStateBF16) bf16_stochastic(s, random).store(&(static_cast<BF16*>(job.state[k]) + i)->bits);
  if constexpr (format == kState8Bit) {
    encode_8bit<has_sign>(s, tile.exponent[k], random).store(static_cast<uint8_t*>(job.state[k]) + i);
  }
}

template <class V, class Rule, int format>
ZERO_INLINE void encode(const StepJob& job, const Tile& tile, int64_t at, const Widened& widened,
                        typename V::Bits counter) {
  store_master(job, tile.start + at, V::load(widened.master + at));
  if constexpr (format != kStateF32 && Rule::kStates > 0) {
    const typename V::Bits random = random_bits(counter);
    encode_state<V, Rule, format, 0>(job, tile, at, widened, random_half<0>(random));
    if constexpr (Rule::kStates > 1) encode_state<V, Rule, format, 1>(job, tile, at, widened, random_half<1>(random));
  }
}

// The counters of a block's random bits, one vector after the other: additions, where a product would be dearer.
struct Lanes {
  Vector::Bits counter;

  explicit ZERO_INLINE Lanes(uint32_t seed) : counter(lane_counter(seed, Vector::Bits::lanes())) {}
  ZERO_INLINE Vector::Bits next() {
    const Vector::Bits now = counter;
    counter = counter + Vector::Bits::all(Vector::width * kLaneStep);
    return now;
  }
};

template <class Rule, int format>
ZERO_INLINE Tile begin_tile(const StepJob& job, int64_t start, float* scale) {
  Tile tile{start, 0, {0, 0}};
  if (format != kStateF32) tile.seed = block_seed(job.seed, job.first_block + static_cast<uint64_t>(start / kBlock));
  for (int k = 0; k < Rule::kStates && format == kState8Bit; ++k) scale[k] = job.scale[k][start / kBlock];
  return tile;
}

template <class Rule, int format>
ZERO_INLINE void end_update(const StepJob& job, const Vector::Bits* wide, const Scalar::Bits* narrow, Tile& tile) {
  for (int k = 0; k < Rule::kStates && format == kState8Bit; ++k) {
    tile.exponent[k] = block_exponent(max_signed(narrow[k], Scalar::Bits::all(wide[k].largest())).x);
    job.scale[k][tile.start / kBlock] = from_pattern(scale_pattern(tile.exponent[k]));
  }
}

// The functions from here on take job, formula and tile by value: a store through one of the arrays cannot change
// them then, so the compiler keeps them in registers.
template <class Rule, int format>
__attribute__((noinline)) Tile update_tile(StepJob job, Rule rule, int64_t start, int64_t end, Widened& widened) {
  float scale[kMaxStates];
  Tile tile = begin_tile<Rule, format>(job, start, scale);
  Vector::Bits wide[kMaxStates] = {Vector::Bits::all(0), Vector::Bits::all(0)};
  Scalar::Bits narrow[kMaxStates] = {Scalar::Bits::all(0), Scalar::Bits::all(0)};
  const int64_t count = end - start, tail = count / Vector::width * Vector::width;
  int64_t at = 0;
  for (; at < tail; at += Vector::width) update<Vector, Rule, format>(job, rule, start, at, scale, widened, wide);
  for (; at < count; ++at) update<Scalar, Rule, format>(job, rule, start, at, scale, widened, narrow);
  end_update<Rule, format>(job, wide, narrow, tile);
  return tile;
}

template <class Rule, int format>
__attribute__((noinline)) void encode_tile(StepJob job, Tile tile, int64_t end, const Widened& widened) {
  Lanes lanes(tile.seed);
  const int64_t count = end - tile.start, tail = count / Vector::width * Vector::width;
  int64_t at = 0;
  for (; at < tail; at += Vector::width) encode<Vector, Rule, format>(job, tile, at, widened, lanes.next());
  for (; at < count; ++at) {
    const Scalar::Bits lane = Scalar::Bits::all(static_cast<uint32_t>(at));
    encode<Scalar, Rule, format>(job, tile, at, widened, lane_counter(tile.seed, lane));
  }
}

// Updates the whole block after `done` into `widened`, and encodes `done` out of `before`.
template <class Rule, int format>
__attribute__((noinline)) Tile update_and_encode(StepJob job, Rule rule, Tile done, const Widened& before,
                                                 Widened& widened) {
  float scale[kMaxStates];
  Tile tile = begin_tile<Rule, format>(job, done.start + kBlock, scale);
  Vector::Bits wide[kMaxStates] = {Vector::Bits::all(0), Vector::Bits::all(0)};
  Lanes lanes(done.seed);
  for (int64_t at = 0; at < kBlock; at += Vector::width) {
    update<Vector, Rule, format>(job, rule, tile.start, at, scale, widened, wide);
    encode<Vector, Rule, format>(job, done, at, before, lanes.next());
  }
  const Scalar::Bits narrow[kMaxStates] = {Scalar::Bits::all(0), Scalar::Bits::all(0)};
  end_update<Rule, format>(job, wide, narrow, tile);
  return tile;
}

template <class Rule, int format>
void run_tiles(const StepJob& job, const Rule& rule, int64_t begin, int64_t end) {
  Widened widened[2];
  const int64_t whole = begin + (end - begin) / kBlock * kBlock;
  if (begin < whole) {
    Tile tile = update_tile<Rule, format>(job, rule, begin, begin + kBlock, widened[0]);
    int current = 0;
    for (int64_t start = begin + kBlock; start < whole; start += kBlock, current = 1 - current) {
      tile = update_and_encode<Rule, format>(job, rule, tile, widened[current], widened[1 - current]);
    }
    encode_tile<Rule, format>(job, tile, whole, widened[current]);
  }
  if (whole < end) {
    const Tile tile = update_tile<Rule, format>(job, rule, whole, end, widened[0]);
    encode_tile<Rule, format>(job, tile, end, widened[0]);
  }
}

template <class Rule>
void run(StepJob job, Rule rule, int64_t begin, int64_t end) {
  const bool f32 = job.state_format == kStateF32 || Rule::kStates == 0;
  if (f32 && job.remainder == nullptr && job.param_dtype == kNone) {
    const int64_t tail = begin + (end - begin) / Vector::width * Vector::width;
    int64_t i = begin;
    for (; i < tail; i += Vector::width) step_plain<Vector>(job, rule, i);
    for (; i < end; ++i) step_plain<Scalar>(job, rule, i);
  } else if (f32) {
    run_tiles<Rule, kStateF32>(job, rule, begin, end);
  } else if constexpr (Rule::kStates > 0) {
    job.state_format == kStateBF16 ? run_tiles<Rule, kStateBF16>(job, rule, begin, end)
                                   : run_tiles<Rule, kState8Bit>(job, rule, begin, end);
  }
}

}  // namespace

void step(const StepJob& job, int64_t begin, int64_t end) {
  switch (job.formula) {
    case kLion: return run(job, job.coef.lion, begin, end);
    case kMomentum: return run(job, job.coef.momentum, begin, end);
    case kSgd: return run(job, job.coef.sgd, begin, end);
    case kAdagrad: return run(job, job.coef.adagrad, begin, end);
    default: return run(job, job.coef.adam, begin, end);
  }
}

}  // namespace ZERO_ISA
}  // namespace zero
