// Splits the kernels' work over OpenMP threads. Results never depend on the split (cpu_kernels.h).
#include <omp.h>

#include <algorithm>
#include <vector>

#include "cpu_kernels.h"

namespace zero {
namespace {

// Elements below which a further thread costs more (waking it, a few microseconds) than it gains.
constexpr int64_t kGrain = 16384;

// Cuts fall on multiples of this many elements, so that no two threads write into one cache line, or share a block of
// 8-bit moments.
constexpr int64_t kAlign = kBlock;

// Calls body(begin, end) on equal, contiguous, static parts of [0, numel). An element is worth `weight` grains.
template <class Body>
void split(int64_t numel, int threads, int64_t weight, const Body& body) {
  const int64_t useful = std::min<int64_t>(threads, numel * weight / kGrain);
  if (useful <= 1) {
    if (numel > 0) body(int64_t{0}, numel);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(useful))
  {
    // The runtime may give fewer threads than were asked for.
    const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
    const int64_t align = weight == 1 ? kAlign : 1;
    const int64_t part = ((numel + count - 1) / count + align - 1) / align * align;
    const int64_t begin = std::min(numel, index * part), end = std::min(numel, begin + part);
    if (begin < end) body(begin, end);
  }
}

char* at(const void* base, int dtype, int64_t index) {
  return static_cast<char*>(const_cast<void*>(base)) + index * dtype_size(dtype);
}

// Treats the spans, one after the other, as one long array and gives each thread an equal part of it: a bucket may
// hold one large tensor and a hundred small ones. body(span, first element in the span, number of elements).
template <class Body>
void split_spans(const Span* spans, int64_t count, int threads, const Body& body) {
  int64_t total = 0;
  for (int64_t s = 0; s < count; ++s) total += spans[s].numel;
  split(total, threads, 1, [&](int64_t begin, int64_t end) {
    int64_t start = 0;  // of the span in the long array
    for (int64_t s = 0; s < count && start < end; start += spans[s].numel, ++s) {
      const int64_t first = std::max(begin, start), last = std::min(end, start + spans[s].numel);
      if (first < last) body(spans[s], first - start, last - first);
    }
  });
}

}  // namespace

void step(const StepJob& job, int threads) {
  const Kernels& kernels = active();
  split(job.numel, threads, 1, [&](int64_t begin, int64_t end) { kernels.step(job, begin, end); });
}

double sum_squares(const void* x, int dtype, int64_t numel, int threads) {
  const Kernels& kernels = active();
  const int64_t blocks = (numel + kNormBlock - 1) / kNormBlock;
  // The blocks' sums first, by all threads; the rest is quick.
  std::vector<double> sums(static_cast<size_t>(std::max<int64_t>(blocks, 1)));
  split(blocks, threads, kNormBlock, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kNormBlock, last = std::min(numel, end * kNormBlock);
    kernels.sum_squares_blocks(at(x, dtype, first), dtype, last - first, sums.data() + begin);
  });
  for (int64_t b = kNormSums; b < blocks; ++b) sums[static_cast<size_t>(b % kNormSums)] += sums[static_cast<size_t>(b)];
  // Lanes that no block went to would add zeros.
  const int64_t lanes = std::min<int64_t>(blocks, kNormSums);
  for (int64_t half = kNormSums / 2; half > 0; half /= 2) {
    for (int64_t j = half; j < std::min(lanes, 2 * half); ++j) {
      sums[static_cast<size_t>(j - half)] += sums[static_cast<size_t>(j)];
    }
  }
  return sums[0];
}

void sum_rows(const SumRowsJob& job, int64_t numel, int threads) {
  const Kernels& kernels = active();
  const auto sum = job.part > 0 ? kernels.sum_messages : kernels.sum_rows;
  split(numel, threads, 1, [&](int64_t begin, int64_t end) { sum(job, begin, end); });
}

void encode(const EncodeJob& job, int64_t numel, int threads) {
  const Kernels& kernels = active();
  split(numel, threads, 1, [&](int64_t begin, int64_t end) { kernels.encode(job, begin, end); });
}

void pack(const Span* spans, int64_t count, void* flat, int flat_dtype, float scale, bool add, int threads) {
  const Kernels& kernels = active();
  split_spans(spans, count, threads, [&](const Span& span, int64_t first, int64_t numel) {
    kernels.convert(at(span.tensor, span.dtype, first), span.dtype, at(flat, flat_dtype, span.offset + first),
                    flat_dtype, numel, scale, add);
  });
}

}  // namespace zero
