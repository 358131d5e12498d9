// The yardstick of benchmarks/kernels.py: reads, updates in place and writes the arrays that a kernel does, with next
// to no arithmetic. No kernel with the same reads and writes has a reason to be faster. Built by that program, with all
// instructions of the machine, into a library of its own.
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace {

// Elements that are treated in one array before the next one has its turn: at most 1 KiB, so that all arrays stay in
// the nearest cache together, and enough that the loops over them cost nothing.
constexpr int64_t kBlock = 256;
constexpr int kLanes = 8;

typedef uint64_t Line __attribute__((vector_size(32), aligned(1), may_alias));

struct Array {
  char* data;
  int64_t itemsize;
};

}  // namespace

// numel: elements of every array; the last numel % 256 are left out. mask: 0, which the compiler must not know: so
// updates change nothing. Arrays that are written become zeros. Returns a word that depends on all that was read.
extern "C" __attribute__((visibility("default"))) uint64_t zero_stream(const Array* reads, int read_count,
                                                                       const Array* updates, int update_count,
                                                                       const Array* writes, int write_count,
                                                                       int64_t numel, uint64_t mask, int threads) {
  const int64_t blocks = numel / kBlock;
  uint64_t seen = 0;
#pragma omp parallel num_threads(threads) reduction(^ : seen)
  {
    const int64_t part = (blocks + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t first = omp_get_thread_num() * part, last = std::min(blocks, first + part);
    const Line masks = Line{} + mask;
    Line sum[kLanes] = {};
    const auto lines = [](const Array& array, int64_t block) {
      return reinterpret_cast<Line*>(array.data + block * kBlock * array.itemsize);
    };
    const auto turns = [](const Array& array) { return array.itemsize * kBlock / int64_t{sizeof(Line) * kLanes}; };
    for (int64_t b = first; b < last; ++b) {
      for (int k = 0; k < read_count; ++k) {
        const Line* at = lines(reads[k], b);
        for (int64_t t = 0; t < turns(reads[k]); ++t) {
          for (int j = 0; j < kLanes; ++j) sum[j] ^= at[t * kLanes + j];
        }
      }
      for (int k = 0; k < update_count; ++k) {
        Line* at = lines(updates[k], b);
        for (int64_t t = 0; t < turns(updates[k]); ++t) {
          for (int j = 0; j < kLanes; ++j) at[t * kLanes + j] ^= sum[j] & masks;
        }
      }
      for (int k = 0; k < write_count; ++k) {
        Line* at = lines(writes[k], b);
        for (int64_t t = 0; t < turns(writes[k]); ++t) {
          for (int j = 0; j < kLanes; ++j) at[t * kLanes + j] = sum[j] & masks;
        }
      }
    }
    for (const Line& line : sum) seen ^= line[0] ^ line[1] ^ line[2] ^ line[3];
  }
  return seen;
}
