// Packs tensors into spans of a flat buffer, with cast and factor or added to it, some hundred of them in one launch.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;  // elements of a thread, side by side
constexpr int64_t kChunk = kThreads * kRun;
constexpr int kSpans = 112;  // of a launch, whose arguments are less than 4 KB

struct PackJob {
  Span spans[kSpans];
  int first[kSpans + 1];  // chunk of each span, and behind the last one
  int count;
  void* flat;
  int flat_dtype;
  float scale;
  bool add;
};

// A block of threads takes one chunk after the other; no chunk holds elements of two spans.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackJob job) {
  for (int chunk = static_cast<int>(blockIdx.x); chunk < job.first[job.count]; chunk += static_cast<int>(gridDim.x)) {
    int s = 0, end = job.count;  // the last span that begins here or before
    while (end - s > 1) {
      const int middle = (s + end) / 2;
      (job.first[middle] <= chunk ? s : end) = middle;
    }
    const Span& span = job.spans[s];
    const int64_t i = (chunk - job.first[s]) * kChunk + static_cast<int64_t>(threadIdx.x) * kRun;
    const int64_t left = span.numel - i, to = span.offset + i;
    if (left <= 0) continue;
    const int count = left < kRun ? static_cast<int>(left) : kRun;
    const bool wide = aligned(at(job.flat, to * size_of(job.flat_dtype)), kWidest);
    uint32_t w[kRun], before[kRun];
    load_floats<kRun>(w, span.tensor, span.dtype, i, count, aligned(span.tensor, kWidest));
    if (job.add) load_floats<kRun>(before, job.flat, job.flat_dtype, to, count, wide);
    Scalar x[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      x[k] = float_at(w, k, span.dtype) * Scalar{job.scale};
      if (job.add) x[k] = float_at(before, k, job.flat_dtype) + x[k];
    }
    store_floats<kRun>(x, job.flat, job.flat_dtype, to, count, wide);
  }
}

}  // namespace

void pack(const Span* spans, int64_t count, void* flat, int flat_dtype, float scale, bool add, Where where) {
  enter(where);
  for (int64_t begin = 0; begin < count; begin += kSpans) {
    PackJob job{};
    job.count = static_cast<int>(std::min<int64_t>(kSpans, count - begin));
    job.flat = flat, job.flat_dtype = flat_dtype, job.scale = scale, job.add = add;
    for (int s = 0; s < job.count; ++s) {
      job.spans[s] = spans[begin + s];
      job.first[s + 1] = job.first[s] + static_cast<int>(ceil_div(job.spans[s].numel, kChunk));
    }
    const int chunks = job.first[job.count];
    if (chunks > 0) launch("pack", pack_kernel, grid(&pack_kernel, kThreads, chunks, where), kThreads, where, job);
  }
}

}  // namespace cuda
}  // namespace zero
