// A copy that goes past the caches: what is read from a file is not looked at soon, and a write that first fetches the
// line it is to replace costs the memory a third more than one that does not.
#include <cstring>

#include "cpu_kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#define ZERO_STREAM 1
#include <emmintrin.h>  // SSE2, a part of x86-64: wider stores fill the same line, so no set of its own is needed
#endif

namespace zero {
namespace {

constexpr int64_t kHot = 1 << 14;  // bytes that stay in the innermost caches between checksum and copy

void stream(char* target, const char* source, int64_t nbytes) {
#ifdef ZERO_STREAM
  const int64_t odd = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) & 63u);
  const int64_t head = odd < nbytes ? odd : nbytes;
  std::memcpy(target, source, static_cast<size_t>(head));
  for (target += head, source += head, nbytes -= head; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
    const __m128i* from = reinterpret_cast<const __m128i*>(source);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    __m128i* to = reinterpret_cast<__m128i*>(target);
    _mm_prefetch(source + kHot, _MM_HINT_T0);  // so that memory is read while it is written; of no bytes, no harm
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
#endif
  std::memcpy(target, source, static_cast<size_t>(nbytes));
}

}  // namespace

uint32_t crc32_copy(const void* source, void* target, int64_t nbytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
  uint32_t value = 0;
  for (int64_t begin = 0; begin < nbytes; begin += kHot) {
    const int64_t count = nbytes - begin < kHot ? nbytes - begin : kHot;
    value = active().crc32(value, from + begin, count);
    stream(to + begin, from + begin, count);
  }
#ifdef ZERO_STREAM
  _mm_sfence();  // whoever is told that the copy is there must see it
#endif
  return value;
}

}  // namespace zero
