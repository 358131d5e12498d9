// Which instruction set runs: the strongest that was compiled in and that this processor has, unless overridden.
#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu_kernels.h"

namespace zero {

#define ZERO_DECLARE_ISA(isa)                                                          \
  namespace isa {                                                                      \
  void step(const StepJob&, int64_t, int64_t);                                         \
  void sum_squares_blocks(const void*, int, int64_t, double*);                         \
  void convert(const void*, int, void*, int, int64_t, float, bool);                    \
  void sum_rows(const SumRowsJob&, int64_t, int64_t);                                  \
  void sum_messages(const SumRowsJob&, int64_t, int64_t);                              \
  void encode(const EncodeJob&, int64_t, int64_t);                                     \
  uint32_t crc32(uint32_t, const void*, int64_t);                                      \
  constexpr Kernels kernels{#isa,     step,         sum_squares_blocks, convert,       \
                            sum_rows, sum_messages, encode,             crc32};        \
  }

ZERO_DECLARE_ISA(scalar)
#ifdef ZERO_HAVE_SSE2
ZERO_DECLARE_ISA(sse2)
#endif
#ifdef ZERO_HAVE_NEON
ZERO_DECLARE_ISA(neon)
#endif
#ifdef ZERO_HAVE_AVX2
ZERO_DECLARE_ISA(avx2)
#endif
#ifdef ZERO_HAVE_AVX512
ZERO_DECLARE_ISA(avx512)
#endif

namespace {

bool always() { return true; }

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
#ifdef ZERO_HAVE_AVX2
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif
#ifdef ZERO_HAVE_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}
#endif

struct Isa {
  const Kernels* kernels;
  bool (*supported)();
};

constexpr Isa kIsas[] = {
    {&scalar::kernels, always},
#ifdef ZERO_HAVE_SSE2
    {&sse2::kernels, always},  // part of x86-64
#endif
#ifdef ZERO_HAVE_NEON
    {&neon::kernels, always},  // part of 64-bit Arm
#endif
#ifdef ZERO_HAVE_AVX2
    {&avx2::kernels, has_avx2},
#endif
#ifdef ZERO_HAVE_AVX512
    {&avx512::kernels, has_avx512},
#endif
};

const Kernels* best() {
  const Kernels* found = nullptr;
  for (const Isa& isa : kIsas) {
    if (isa.supported()) found = isa.kernels;
  }
  return found;
}

// One word per process, written by set_isa alone, which is for tests: all choices give the same results.
std::atomic<const Kernels*>& choice() {
  static std::atomic<const Kernels*> chosen{best()};
  return chosen;
}

}  // namespace

const Kernels& active() { return *choice().load(std::memory_order_relaxed); }

int compiled_count() { return static_cast<int>(sizeof(kIsas) / sizeof(kIsas[0])); }
const Kernels& compiled(int index) { return *kIsas[index].kernels; }
bool runnable(int index) { return kIsas[index].supported(); }

void set_isa(const char* name) {
  const std::string wanted(name);
  if (wanted == "auto") {
    choice().store(best());
    return;
  }
  std::string usable;
  for (const Isa& isa : kIsas) {
    if (!isa.supported()) continue;
    if (wanted == isa.kernels->name) {
      choice().store(isa.kernels);
      return;
    }
    usable += std::string(usable.empty() ? "" : ", ") + isa.kernels->name;
  }
  throw std::invalid_argument("instruction set '" + wanted + "' cannot run here; wanted auto, or one of " + usable);
}

}  // namespace zero
