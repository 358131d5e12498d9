// What the tests of the kernels share: arrays that are exactly as long as they say, numbers of all kinds, comparisons.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../cpu_kernels.h"

namespace test {

// An array in a heap block of its own that ends with its last element, so that AddressSanitizer sees every step beyond
// it. With a lead the first element lies that many elements into the block, off any boundary of a vector; what is
// before it must keep its value.
class Array {
 public:
  Array(int64_t numel, int itemsize, int64_t lead = 0)
      : numel_(numel), itemsize_(itemsize), before_(lead * itemsize), block_(new unsigned char[bytes() + before_]) {
    std::memset(block_, kGuard, static_cast<size_t>(bytes() + before_));
  }
  Array(const Array& other, int64_t lead) : Array(other.numel_, other.itemsize_, lead) {
    std::memcpy(data(), other.data(), static_cast<size_t>(bytes()));
  }
  Array(const Array& other) : Array(other, 0) {}
  Array(Array&& other) noexcept
      : numel_(other.numel_),
        itemsize_(other.itemsize_),
        before_(other.before_),
        block_(std::exchange(other.block_, nullptr)) {}
  Array& operator=(const Array&) = delete;
  ~Array() { delete[] block_; }

  int64_t numel() const { return numel_; }
  int itemsize() const { return itemsize_; }
  int64_t bytes() const { return numel_ * itemsize_; }
  unsigned char* data() const { return block_ + before_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  bool guard_intact() const {
    for (int64_t i = 0; i < before_; ++i) {
      if (block_[i] != kGuard) return false;
    }
    return true;
  }
  // The bits of an element.
  uint32_t bits(int64_t i) const {
    uint32_t value = 0;
    std::memcpy(&value, data() + i * itemsize_, static_cast<size_t>(itemsize_));
    return value;
  }

 private:
  static constexpr unsigned char kGuard = 0xA5;
  int64_t numel_;
  int itemsize_;
  int64_t before_;  // bytes
  unsigned char* block_;
};

// splitmix64: the same numbers everywhere.
struct Random {
  uint64_t state;

  uint32_t next() {
    state += 0x9E3779B97F4A7C15ull;
    return static_cast<uint32_t>(zero::mix64(state));
  }
  uint32_t below(uint32_t bound) { return next() % bound; }
};

enum class Kind { kSigned, kPositive, kHostile };

// The pattern of an fp32 number: mostly of everyday size, some tiny, subnormal or zero; with kHostile some inf and NaN.
inline uint32_t any_float(Random& random, Kind kind) {
  const uint32_t mantissa = random.next() & 0x7FFFFFu;
  const uint32_t sign = kind == Kind::kPositive ? 0u : (random.next() & 1u) << 31;
  switch (random.below(16)) {
    case 0: return sign;
    case 1: return sign | mantissa;                                      // subnormal
    case 2: return sign | (1u + random.below(100)) << 23 | mantissa;     // tiny
    case 3:
      if (kind != Kind::kHostile) break;
      return sign | (random.below(4) == 0 ? 0x7FC00000u : 0x7F800000u);  // NaN or inf
    default: break;
  }
  return sign | (112u + random.below(20)) << 23 | mantissa;  // 2^-15 to 2^4
}

// Fills with numbers of the dtype; the 16-bit ones are cut, not rounded, as any pattern will do.
inline Array numbers(int64_t numel, int dtype, Random& random, Kind kind) {
  Array made(numel, static_cast<int>(zero::dtype_size(dtype)));
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t u = any_float(random, kind);
    if (dtype == zero::kF32) {
      std::memcpy(made.data() + 4 * i, &u, 4);
    } else if (dtype == zero::kBF16) {
      made.as<uint16_t>()[i] = static_cast<uint16_t>(u >> 16);
    } else if (kind == Kind::kHostile && random.below(32) == 0) {
      made.as<uint16_t>()[i] = 0x7C00;
    } else {  // every finite fp16
      made.as<uint16_t>()[i] = static_cast<uint16_t>((u >> 16 & 0x8000u) | random.below(0x7C00u));
    }
  }
  return made;
}

inline Array random_bytes(int64_t numel, int itemsize, Random& random) {
  Array made(numel, itemsize);
  for (int64_t i = 0; i < made.bytes(); ++i) made.data()[i] = static_cast<unsigned char>(random.next());
  return made;
}

// What an array holds decides which of its differences count: the payload of a NaN does not.
enum class Holds { kF32, kF16, kBits };

inline bool is_nan(uint32_t bits, Holds holds) {
  if (holds == Holds::kF32) return (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return holds == Holds::kF16 && (bits & 0x7FFFu) > 0x7C00u;
}

struct Failure {
  std::string text;
};

// Throws unless both hold the same bits.
inline void same(const std::string& what, const Array& got, const Array& wanted, Holds holds) {
  if (!got.guard_intact()) throw Failure{what + ": written before its first element"};
  if (std::memcmp(got.data(), wanted.data(), static_cast<size_t>(got.bytes())) == 0) return;
  for (int64_t i = 0; i < got.numel(); ++i) {
    const uint32_t a = got.bits(i), b = wanted.bits(i);
    if (a == b || (is_nan(a, holds) && is_nan(b, holds))) continue;
    char text[96];
    std::snprintf(text, sizeof text, "[%lld] is 0x%X, wanted 0x%X", static_cast<long long>(i), a, b);
    throw Failure{what + text};
  }
}

inline void same(const std::string& what, double got, double wanted) {
  uint64_t a, b;
  std::memcpy(&a, &got, 8);
  std::memcpy(&b, &wanted, 8);
  if (a == b || (got != got && wanted != wanted)) return;
  char text[96];
  std::snprintf(text, sizeof text, " is %.17g, wanted %.17g", got, wanted);
  throw Failure{what + text};
}

// How a kernel is run: the first way gives what all others must give.
struct Way {
  std::string isa;
  int threads;
  int64_t lead;  // of array k: `lead * (k + 1)` elements modulo 8, so that no two arrays are off by the same

  int64_t lead_of(int array) const { return lead * (array + 1) % 8; }
  std::string text() const {
    return isa + ", " + std::to_string(threads) + (threads > 1 ? " threads" : " thread") + (lead ? ", shifted" : "");
  }
};

inline std::vector<Way> ways() {
  std::vector<Way> made;
  for (int i = 0; i < zero::compiled_count(); ++i) {
    if (!zero::runnable(i)) continue;
    made.push_back(Way{zero::compiled(i).name, 1, 0});
    made.push_back(Way{zero::compiled(i).name, 2, 1});
  }
  return made;
}

}  // namespace test
