// Rows in 8 bits (format_math.h): made of values and of the error of those before, and added in row order.
// Compiled once per instruction set.
#include "cpu_kernels.h"
#include "vec.h"

namespace zero {
namespace ZERO_ISA {
namespace {

constexpr int kVectors = kWireBlock / Vector::width;  // of a block

// Elements of a block, from `u` vectors on.
ZERO_INLINE Vector decoded(const void* message, const WirePlace& place, int u) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(message);
  return wire_value<Vector>(Vector::Bits::load(bytes + place.codes + u * Vector::width),
                            load_wire_scale(bytes + place.scale));
}

template <class T>
void sum_to(const SumRowsJob& shared, int64_t begin, int64_t end) {
  const SumRowsJob job = shared;  // on the stack, so that stores through T* cannot touch it
  for (int64_t b = begin / kWireBlock; b < end / kWireBlock; ++b) {
    const WirePlace place = wire_place(b, job.part);
    Vector sum[kVectors];
    for (int u = 0; u < kVectors; ++u) sum[u] = decoded(job.rows[0], place, u);
    for (int64_t r = 1; r < job.count; ++r) {
      for (int u = 0; u < kVectors; ++u) sum[u] = sum[u] + decoded(job.rows[r], place, u);
    }
    T* out = static_cast<T*>(job.out) + b * kWireBlock;
    for (int u = 0; u < kVectors; ++u, out += Vector::width) {
      (job.accumulate ? Vector::load(out) + sum[u] : sum[u]).store(out);
    }
  }
}

// Writes a block of a message.
ZERO_INLINE void encode_block(const Vector (&x)[kVectors], uint8_t* message, const WirePlace& place) {
  Vector::Bits largest = Vector::Bits::all(0);
  for (int u = 0; u < kVectors; ++u) largest = max_signed(largest, magnitude(bits_of(x[u])));
  const uint32_t scale = wire_scale<Scalar>(Scalar::Bits::all(largest.largest())).x;
  for (int u = 0; u < kVectors; ++u) wire_code(x[u], scale).store(message + place.codes + u * Vector::width);
  store_wire_scale(scale, message + place.scale);
}

template <class T>
void encode_of(const EncodeJob& shared, int64_t begin, int64_t end) {
  const EncodeJob job = shared;  // as above
  for (int64_t b = begin / kWireBlock; b < end / kWireBlock; ++b) {
    const T* values = static_cast<const T*>(job.values) + b * kWireBlock;
    const WirePlace place = wire_place(b, job.part);
    Vector x[kVectors];
    for (int u = 0; u < kVectors; ++u) x[u] = Vector::load(values + u * Vector::width);
    if (job.error) {
      for (int u = 0; u < kVectors; ++u) x[u] = x[u] + decoded(job.error, place, u);
    }
    encode_block(x, job.message, place);
    if (!job.error) continue;
    for (int u = 0; u < kVectors; ++u) x[u] = wire_rest(x[u], decoded(job.message, place, u));
    encode_block(x, job.error, place);
  }
}

}  // namespace

void sum_messages(const SumRowsJob& job, int64_t begin, int64_t end) {
  with_type(job.dtype, [&](auto out) { sum_to<decltype(out)>(job, begin, end); });
}

void encode(const EncodeJob& job, int64_t begin, int64_t end) {
  with_type(job.dtype, [&](auto value) { encode_of<decltype(value)>(job, begin, end); });
}

}  // namespace ZERO_ISA
}  // namespace zero
