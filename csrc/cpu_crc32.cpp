// The CRC-32 of zlib: polynomial 0x04C11DB7, bits reflected, inverted before and after. Where a processor multiplies
// without carries, by folding (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel, 2009); otherwise by tables, eight bytes at a time (Kounavis and Berry, "A Systematic Approach to
// Building High Performance Software-Based CRC Generators", 2005).
// Compiled once per instruction set. The multiplications belong to no set of vec.h and are asked for at run time:
// AVX-512 comes with and without the wide ones.
#include "cpu_kernels.h"
#include "vec.h"

#if defined(__x86_64__) && ZERO_ISA_CODE(ZERO_ISA) != ZERO_ISA_scalar
#define ZERO_CLMUL 1
#include <immintrin.h>
#if ZERO_ISA_CODE(ZERO_ISA) == ZERO_ISA_avx512
#define ZERO_WIDE_CLMUL 1
#endif
#endif

namespace zero {
namespace ZERO_ISA {
namespace {

// A polynomial over bits: bit 31 - i is the coefficient of x^i. All are modulo that of the CRC.
constexpr uint32_t kOne = 0x80000000u;
constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1u) ? 0xEDB88320u : 0u); }

struct Tables {
  uint32_t behind[8][256];  // [k][b]: what the byte b adds to the state when k + gap more bytes follow it

  constexpr explicit Tables(int gap) : behind{} {
    // The CRC is the remainder of the message times x^32, whose last bit is the upper one of its last byte.
    uint32_t power = kOne;
    for (int i = 0; i < 32 + 8 * gap; ++i) power = times_x(power);
    for (int k = 0; k < 8; ++k) {
      for (uint32_t bit = 128; bit > 0; bit /= 2) {
        behind[k][bit] = power;
        power = times_x(power);
      }
      for (uint32_t b = 1; b < 256; ++b) behind[k][b] = behind[k][b & (b - 1)] ^ behind[k][b & (0u - b)];
    }
  }
};

// Lookups of one word wait for those of the word before it, so several words at a time go each its own way, as braids.
constexpr int kBraids = 4;
constexpr Tables kTables(0), kBraidTables(8 * (kBraids - 1));

// Little endian on any processor; compilers make it one load where that is what it is.
ZERO_INLINE uint32_t four_bytes(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
         static_cast<uint32_t>(p[3]) << 24;
}

ZERO_INLINE uint32_t eight_bytes(const Tables& tables, uint32_t state, const uint8_t* p) {
  const auto& t = tables.behind;
  const uint32_t a = state ^ four_bytes(p), b = four_bytes(p + 4);
  return t[7][a & 255u] ^ t[6][a >> 8 & 255u] ^ t[5][a >> 16 & 255u] ^ t[4][a >> 24] ^  //
         t[3][b & 255u] ^ t[2][b >> 8 & 255u] ^ t[1][b >> 16 & 255u] ^ t[0][b >> 24];
}

uint32_t look_up(uint32_t state, const uint8_t* p, int64_t nbytes) {
  constexpr int64_t kRow = 8 * kBraids;
  if (nbytes >= 2 * kRow) {
    uint32_t braids[kBraids] = {state};
    for (; nbytes >= 2 * kRow; nbytes -= kRow, p += kRow) {
      for (int i = 0; i < kBraids; ++i) braids[i] = eight_bytes(kBraidTables, braids[i], p + 8 * i);
    }
    // In one more row each joins the next.
    state = 0;
    for (int i = 0; i < kBraids; ++i) state = eight_bytes(kTables, state ^ braids[i], p + 8 * i);
    nbytes -= kRow;
    p += kRow;
  }
  for (; nbytes >= 8; nbytes -= 8, p += 8) state = eight_bytes(kTables, state, p);
  for (; nbytes > 0; --nbytes, ++p) state = (state >> 8) ^ kTables.behind[0][(state ^ *p) & 255u];
  return state;
}

#ifdef ZERO_CLMUL

#define ZERO_TARGET_CLMUL __attribute__((target("pclmul")))

// x^n as a factor. Reflected, the product of two words of 64 bits has 127 bits and comes out with an x too few; the
// shift, for which a factor of 32 bits in a word of 64 has room, gives it back.
constexpr uint64_t power(int n) {
  uint32_t a = kOne;
  for (int i = 0; i < n; ++i) a = times_x(a);
  return static_cast<uint64_t>(a) << 1;
}
template <int n>
constexpr long long kPower = static_cast<long long>(power(n));

// To move 16 bytes by `bits` bits towards the end of the message is to multiply them by x^bits. Their first half, the
// low one, stands 64 bits above the other; a factor stands 32 bits below where a word begins.
template <int bits>
ZERO_TARGET_CLMUL ZERO_INLINE __m128i factors() {
  return _mm_set_epi64x(kPower<bits - 32>, kPower<bits + 32>);
}

// x, moved by the factors' bits, is added to what stands there.
ZERO_TARGET_CLMUL ZERO_INLINE __m128i move(__m128i x, __m128i by, __m128i there) {
  const __m128i first = _mm_clmulepi64_si128(x, by, 0x00), second = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), there);
}

ZERO_TARGET_CLMUL ZERO_INLINE __m128i load(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

#ifdef ZERO_WIDE_CLMUL

constexpr int64_t kWide = 256;  // bytes that wait in four registers

#define ZERO_TARGET_WIDE __attribute__((target("pclmul,vpclmulqdq")))

template <int bits>
ZERO_TARGET_WIDE ZERO_INLINE __m512i wide_factors() {
  return _mm512_broadcast_i32x4(factors<bits>());
}

ZERO_TARGET_WIDE ZERO_INLINE __m512i wide_move(__m512i x, __m512i by, __m512i there) {
  const __m512i first = _mm512_clmulepi64_epi128(x, by, 0x00), second = _mm512_clmulepi64_epi128(x, by, 0x11);
  return _mm512_ternarylogic_epi64(first, second, there, 0x96);  // the sum of the three
}

// Folds all whole blocks of 64 bytes, at least kWide bytes, into the last one: 64 bytes.
ZERO_TARGET_WIDE void fold_wide(uint32_t state, const uint8_t* p, int64_t nbytes, __m128i* lanes) {
  __m512i x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_si512(p + 64 * i);
  const __m128i begin = _mm_cvtsi32_si128(static_cast<int>(state));
  x[0] = _mm512_xor_si512(x[0], _mm512_inserti32x4(_mm512_setzero_si512(), begin, 0));
  const __m512i by_256 = wide_factors<8 * 256>(), by_64 = wide_factors<8 * 64>();
  for (p += kWide, nbytes -= kWide; nbytes >= kWide; nbytes -= kWide, p += kWide) {
    for (int i = 0; i < 4; ++i) x[i] = wide_move(x[i], by_256, _mm512_loadu_si512(p + 64 * i));
  }
  for (int i = 1; i < 4; ++i) x[i] = wide_move(x[i - 1], by_64, x[i]);
  for (; nbytes >= 64; nbytes -= 64, p += 64) x[3] = wide_move(x[3], by_64, _mm512_loadu_si512(p));
  _mm512_storeu_si512(lanes, x[3]);
}

#endif  // ZERO_WIDE_CLMUL

// Folds all whole blocks of 64 bytes, at least one, into the last one.
ZERO_TARGET_CLMUL void fold_narrow(uint32_t state, const uint8_t* p, int64_t nbytes, __m128i* lanes) {
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(p + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  const __m128i by_64 = factors<8 * 64>();
  for (p += 64, nbytes -= 64; nbytes >= 64; nbytes -= 64, p += 64) {
    for (int i = 0; i < 4; ++i) x[i] = move(x[i], by_64, load(p + 16 * i));
  }
  for (int i = 0; i < 4; ++i) _mm_storeu_si128(lanes + i, x[i]);
}

// At least 64 bytes.
ZERO_TARGET_CLMUL uint32_t fold(uint32_t state, const uint8_t* p, int64_t nbytes) {
  __m128i lanes[4];
#ifdef ZERO_WIDE_CLMUL
  if (nbytes >= kWide && __builtin_cpu_supports("vpclmulqdq")) {
    fold_wide(state, p, nbytes, lanes);
  } else {
    fold_narrow(state, p, nbytes, lanes);
  }
#else
  fold_narrow(state, p, nbytes, lanes);
#endif
  p += nbytes / 64 * 64;
  nbytes %= 64;
  const __m128i by_16 = factors<8 * 16>();
  __m128i x = lanes[0];
  for (int i = 1; i < 4; ++i) x = move(x, by_16, lanes[i]);
  for (; nbytes >= 16; nbytes -= 16, p += 16) x = move(x, by_16, load(p));
  // What is left is a message of 16 bytes and a tail that has the same CRC, from a state of nothing.
  uint8_t last[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), x);
  return look_up(look_up(0, last, 16), p, nbytes);
}

#endif  // ZERO_CLMUL

}  // namespace

uint32_t crc32(uint32_t value, const void* data, int64_t nbytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
#ifdef ZERO_CLMUL
  if (nbytes >= 64 && __builtin_cpu_supports("pclmul")) return ~fold(~value, p, nbytes);
#endif
  return ~look_up(~value, p, nbytes);
}

}  // namespace ZERO_ISA
}  // namespace zero
