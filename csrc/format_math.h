// How masters and moments are stored in fewer bits than they are computed in, once, over the vector type V and its
// integer lanes V::Bits. In words, and in plain torch: zero/kernels/remainder.py, zero/kernels/moments.py.
//
// Remainder master. The bf16 parameter P is the fp32 master u rounded to 16 bits; only the low 16 bits of u are kept
// beside it. Ties go away from zero: P = (u + 0x8000) >> 16, so the carry into P is the top bit of the low half, and
// ((P - carry) << 16) | low gives u back, for every bit pattern: each P stands for exactly 65536 masters. With ties to
// even an even P would stand for 65537, which no 16 bits can tell apart. NaN is first made 0x7FC00000: others could
// carry into inf or zero.
//
// Moments in bf16 are rounded stochastically (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML
// 2015): exp_avg_sq moves by 1e-3 of itself in a step, which nearest rounding to 8 bits of mantissa would lose.
//
// Moments in 8 bit: one scale per block of 256 (after Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
// ICLR 2022), here a power of two, and codes that are small floats: 1 sign, 4 exponent and 3 mantissa bits, or 5 and 3
// where all are >= 0. So encoding is a subtraction and a shift of the fp32 pattern, and is rounded stochastically too.
//
// On the wire (zero/kernels/wire.py) blocks of 64 elements: a code of 8 bits for each, an integer, and one bf16 scale.
//
// Random bits come from a counter, not from a state: key and step give the seed, the element's place in its unit does
// the rest. So a run repeats, and no cut into shards, threads or instruction sets changes it. The mixers: splitmix64
// (Steele, Lea & Flood, OOPSLA 2014) per block, lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018) per
// lane.
#pragma once

#include <cstdint>

#include "step_math.h"  // ZERO_INLINE, magnitude

namespace zero {

// The codes are part of the Python side's contract (zero/kernels/moments.py).
enum StateFormat : int { kStateF32 = 0, kStateBF16 = 1, kState8Bit = 2 };

inline constexpr int kBlock = 256;  // elements that share a scale, and a word of randomness
inline constexpr int kWireBlock = 64, kWireRecord = kWireBlock + 2;  // elements and bytes of a block on the wire
// Blocks whose codes stand one after the other, their scales behind them: 528 bytes, so that codes begin at 16 bytes.
inline constexpr uint32_t kWireGroup = 8;

ZERO_INLINE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

ZERO_INLINE uint64_t step_seed(uint64_t key, uint64_t step) { return mix64(key * 0x9E3779B97F4A7C15ull + step); }

ZERO_INLINE uint32_t block_seed(uint64_t seed, uint64_t block) { return static_cast<uint32_t>(mix64(seed + block)); }

// What a lane's random bits are made of; `lane` counts from 0 inside the block. The counter of the lane `n` further is
// n * kLaneStep more.
inline constexpr uint32_t kLaneStep = 0x9E3779B9u;

template <class Bits>
ZERO_INLINE Bits lane_counter(uint32_t block, Bits lane) {
  return Bits::all(block) + lane * Bits::all(kLaneStep);
}

// 32 random bits per lane. State 0 takes the low half, state 1 the high one.
template <class Bits>
ZERO_INLINE Bits random_bits(Bits counter) {
  Bits x = (counter ^ (counter >> 16)) * Bits::all(0x7FEB352Du);
  x = (x ^ (x >> 15)) * Bits::all(0x846CA68Bu);
  return x ^ (x >> 16);
}

template <int state, class Bits>
ZERO_INLINE Bits random_half(Bits random) {
  if (state == 0) return random & Bits::all(0xFFFFu);
  return random >> 16;
}

// The pattern of x, with every NaN made 0x7FC00000. NaN is rare enough for a branch.
template <class V>
ZERO_INLINE typename V::Bits clean_bits(V x) {
  using Bits = typename V::Bits;
  const Bits u = bits_of(x);
  if (!any_nan(x)) return u;
  return select_greater(magnitude(u), Bits::all(0x7F800000u), Bits::all(0x7FC00000u), u);
}

// fp32 to bf16, in the low 16 bits of each lane.
template <class V>
ZERO_INLINE typename V::Bits bf16_ties_to_even(V x) {
  using Bits = typename V::Bits;
  const Bits u = clean_bits(x), odd = (u >> 16) & Bits::all(1);
  return (u + odd + Bits::all(0x7FFFu)) >> 16;
}

template <class V>
ZERO_INLINE typename V::Bits bf16_ties_away(V x) {
  return (clean_bits(x) + V::Bits::all(0x8000u)) >> 16;
}

template <class V>
ZERO_INLINE typename V::Bits bf16_stochastic(V x, typename V::Bits random16) {
  return (clean_bits(x) + random16) >> 16;
}

template <class V>
ZERO_INLINE V join_master(typename V::Bits param, typename V::Bits low) {
  return V::of(((param - (low >> 15)) << 16) | low);
}

template <class V>
ZERO_INLINE void split_master(V master, typename V::Bits& param, typename V::Bits& low) {
  using Bits = typename V::Bits;
  const Bits u = clean_bits(master);
  param = (u + Bits::all(0x8000u)) >> 16;
  low = u & Bits::all(0xFFFFu);
}

template <class V>
ZERO_INLINE void store_master_split(V master, uint16_t* param, uint16_t* low) {
  typename V::Bits upper, lower;
  split_master(master, upper, lower);
  upper.store(param);
  lower.store(low);
}

// The exponent K of a block's scale 2^(K - 127), from the largest magnitude in it as an integer. What comes within
// half a code's width of the next power of two takes that: so no code overflows, and a maximum that grows by less
// than a code in each step is not held where it is.
ZERO_INLINE uint32_t block_exponent(uint32_t largest) {
  const uint32_t exponent = (largest + 0x100000u) >> 23;
  return exponent < 255u ? exponent : 255u;
}

// The scale as an fp32 pattern. A block with an element that is not finite is all NaN from then on: seen, never zeros.
ZERO_INLINE uint32_t scale_pattern(uint32_t exponent) { return exponent < 255u ? exponent << 23 : 0x7FC00000u; }

// fp32 to an 8-bit code in the low bits of each lane. What is below the smallest code becomes zero where the values
// have signs; where they have none it becomes that code, as a root of zero would be divided by.
template <bool has_sign, class V>
ZERO_INLINE typename V::Bits encode_8bit(V x, uint32_t exponent, typename V::Bits random16) {
  using Bits = typename V::Bits;
  // The block holds zeros (or less than 2^-126), or is not finite.
  if (exponent == 0u || exponent == 255u) return Bits::all(0);
  const Bits u = bits_of(x), size = magnitude(u);
  const uint32_t lowest = (exponent - (has_sign ? 15u : 31u)) << 23;  // pattern of 2^-15 or 2^-31 of the scale
  const Bits code = shift_right_signed(size - Bits::all(lowest) + (random16 << 4), 20);
  if (has_sign) return keep_where_positive(code, code | ((u >> 24) & Bits::all(0x80u)));
  return keep_where_positive(size, max_signed(code, Bits::all(1)));
}

template <bool has_sign, class V>
ZERO_INLINE V decode_8bit(typename V::Bits code, float scale) {
  using Bits = typename V::Bits;
  const Bits size = has_sign ? code & Bits::all(127) : code;
  const Bits base = (size << 20) + Bits::all((127u - (has_sign ? 15u : 31u)) << 23);
  const V value = V::of(keep_where_positive(size, base)) * V::all(scale);
  if (!has_sign) return value;
  return V::of(bits_of(value) | ((code & Bits::all(0x80u)) << 24));
}

// A block's scale in the low 16 bits: its largest magnitude over 127. `largest` is a pattern, of which NaN's are the
// largest of all; such a block, or one with inf, reads as NaN.
template <class V>
ZERO_INLINE typename V::Bits wire_scale(typename V::Bits largest) {
  const V scale = V::of(largest) / V::all(127.0f);
  return bf16_ties_to_even(V::of(max_signed(bits_of(scale), V::Bits::all(0x00800000u))));
}

// fp32 to a code in the low 8 bits of each lane: x / scale to nearest, ties to even, as adding 1.5 x 2^23 rounds.
template <class V>
ZERO_INLINE typename V::Bits wire_code(V x, uint32_t scale) {
  using Bits = typename V::Bits;
  const V units = x / V::of(Bits::all(scale << 16)) + V::all(12582912.0f);
  const Bits code = bits_of(units) - Bits::all(0x4B400000u), most = Bits::all(127);
  const Bits byte = Bits::all(scale < 0x7F80u ? 0xFFu : 0u);
  return max_signed(select_greater(code, most, most, code), Bits::all(0) - most) & byte;
}

template <class V>
ZERO_INLINE V wire_value(typename V::Bits code, uint32_t scale) {
  using Bits = typename V::Bits;
  // 2^23 + 128 + code, whose low bits are the code with its sign turned.
  const V shifted = V::of((code ^ Bits::all(0x80u)) | Bits::all(0x4B000000u));
  return (shifted - V::all(8388736.0f)) * V::of(Bits::all(scale << 16));
}

// What an encoding has left of a value; nothing where that is not finite.
template <class V>
ZERO_INLINE V wire_rest(V value, V decoded) {
  using Bits = typename V::Bits;
  const Bits rest = bits_of(value - decoded);
  return V::of(keep_where_positive(Bits::all(0x7F800000u) - magnitude(rest), rest));
}

// Where block `b` of a message has its codes and its scale, in bytes. Each of the message's equal parts, of `part`
// blocks, begins a group.
struct WirePlace {
  int64_t codes, scale;
};

ZERO_INLINE WirePlace wire_place(int64_t b, int64_t part) {
  const uint32_t blocks = static_cast<uint32_t>(part), own = static_cast<uint32_t>(b) % blocks;
  const uint32_t within = own % kWireGroup, left = blocks - (own - within);
  const int64_t begins = (b - within) * kWireRecord;
  return {begins + within * kWireBlock, begins + (left < kWireGroup ? left : kWireGroup) * kWireBlock + within * 2};
}

// A scale where it lies, at any address.
ZERO_INLINE uint32_t load_wire_scale(const uint8_t* from) { return from[0] | static_cast<uint32_t>(from[1]) << 8; }
ZERO_INLINE void store_wire_scale(uint32_t scale, uint8_t* to) {
  to[0] = static_cast<uint8_t>(scale);
  to[1] = static_cast<uint8_t>(scale >> 8);
}

}  // namespace zero
