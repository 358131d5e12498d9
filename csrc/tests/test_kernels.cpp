// Every kernel, on every instruction set that runs here, with 1 and 2 threads, from aligned and from odd addresses,
// gives the bits that the scalar one gives, or for CRC-32 those of its definition, and touches nothing outside its
// arrays. `make sanitize` builds this with AddressSanitizer and UndefinedBehaviorSanitizer. Whether the scalar one is
// right is tested against plain torch and zlib, in tests/.
#include <exception>

#include "support.h"
#include "test_aio.h"

namespace test {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 255, 256, 257, 1023, 1025};
constexpr int64_t kTwoThreads = 33027;       // the least that two threads share is 2 x 16384
constexpr int64_t kLarge = (1 << 20) + 3;
constexpr int kDTypes[] = {zero::kF32, zero::kBF16, zero::kF16};
constexpr const char* kDTypeNames[] = {"fp32", "bf16", "fp16"};
constexpr const char* kFormatNames[] = {"fp32", "bf16", "8-bit"};

// The step.

struct Rule {
  const char* name;
  int formula;
  int states;
  bool positive[2];  // the state is a sum of squares
  zero::Hyper hyper;
  double count;  // of steps
};

constexpr int kW = zero::Hyper::kDecoupled, kC = zero::Hyper::kBiasCorrection, kN = zero::Hyper::kNesterov;
constexpr Rule kRules[] = {
    {"AdamW", zero::kAdam, 2, {false, true}, {1e-3, 0.9, 0.999, 1e-8, 0.1, 0, 0, 0, kW | kC}, 3},
    {"Adam with L2", zero::kAdam, 2, {false, true}, {1e-3, 0.4, 0.999, 1e-8, 0.1, 0, 0, 0, 0}, 3},
    {"Lion", zero::kLion, 1, {false, false}, {1e-4, 0.9, 0.99, 0, 0.1, 0, 0, 0, 0}, 3},
    {"SGD with momentum", zero::kMomentum, 1, {false, false}, {1e-2, 0, 0, 0, 0.1, 0.9, 0.1, 0, 0}, 3},
    {"SGD, Nesterov", zero::kMomentum, 1, {false, false}, {1e-2, 0, 0, 0, 0, 0.9, 0, 0, kN}, 1},
    {"SGD", zero::kSgd, 0, {false, false}, {1e-2, 0, 0, 0, 0.1, 0, 0, 0, 0}, 3},
    {"Adagrad", zero::kAdagrad, 1, {true, false}, {1e-2, 0, 0, 1e-10, 0.1, 0, 0, 0.1, 0}, 3},
};

enum Master { kAlone, kWithF32, kWithBF16, kWithF16, kRemainder };
constexpr Master kMasters[] = {kAlone, kWithF32, kWithBF16, kWithF16, kRemainder};
constexpr const char* kMasterNames[] = {"no parameter", "fp32 parameter", "bf16 parameter", "fp16 parameter",
                                        "remainder"};

int param_dtype(Master master) {
  constexpr int dtypes[] = {zero::kNone, zero::kF32, zero::kBF16, zero::kF16, zero::kBF16};
  return dtypes[master];
}

struct Case {
  const Rule& rule;
  Master master;
  int format;
  int grad_dtype;
  int64_t numel;
  Kind kind;
  bool marked = false;

  std::string text() const {
    return std::string(rule.name) + ", " + kMasterNames[master] + ", " + kFormatNames[format] + " moments, " +
           kDTypeNames[grad_dtype] + " gradient, " + std::to_string(numel) + " elements" +
           (kind == Kind::kHostile ? ", inf and NaN" : "") + (marked ? ", marked" : "");
  }
};

// All arrays of one step, in the order: master or remainder, parameter, gradient, states, scales, marks.
struct Shard {
  std::vector<Array> arrays;
};

Shard shard_of(const Case& c, Random& random) {
  const int64_t n = c.numel, blocks = (n + zero::kBlock - 1) / zero::kBlock;
  Shard made;
  std::vector<Array>& arrays = made.arrays;
  arrays.push_back(c.master == kRemainder ? random_bytes(n, 2, random) : numbers(n, zero::kF32, random, c.kind));
  const int dtype = param_dtype(c.master);
  arrays.push_back(dtype == zero::kNone ? Array(0, 2) : numbers(n, dtype, random, Kind::kSigned));
  arrays.push_back(numbers(n, c.grad_dtype, random, c.kind));
  for (int k = 0; k < 2; ++k) {
    const int64_t there = k < c.rule.states ? n : 0;
    const Kind kind = c.rule.positive[k] ? Kind::kPositive : Kind::kSigned;
    if (c.format == zero::kState8Bit) {
      arrays.push_back(random_bytes(there, 1, random));
    } else {
      arrays.push_back(numbers(there, c.format == zero::kStateBF16 ? zero::kBF16 : zero::kF32, random, kind));
    }
  }
  for (int k = 0; k < 2; ++k) {
    Array scales(c.format == zero::kState8Bit && k < c.rule.states ? blocks : 0, 4);
    for (int64_t b = 0; b < scales.numel(); ++b) {
      const uint32_t exponent = random.below(8) == 0 ? 0u : 100u + random.below(32);
      scales.as<uint32_t>()[b] = exponent << 23;
    }
    arrays.push_back(std::move(scales));
  }
  arrays.push_back(random_bytes(c.marked ? (n + 7) / 8 : 0, 1, random));
  return made;
}

// Runs the step on a copy of the shard and returns the copy.
Shard stepped(const Case& c, const Shard& shard, const Way& way) {
  Shard copy;
  for (size_t k = 0; k < shard.arrays.size(); ++k) {
    copy.arrays.emplace_back(shard.arrays[k], way.lead_of(static_cast<int>(k)));
  }
  const std::vector<Array>& a = copy.arrays;
  zero::StepJob job{};
  job.formula = c.rule.formula;
  job.coef = zero::make_coef(c.rule.formula, c.rule.hyper, c.rule.count, 0.37);
  job.master = c.master == kRemainder ? nullptr : a[0].as<float>();
  job.remainder = c.master == kRemainder ? a[0].as<uint16_t>() : nullptr;
  job.param = c.master == kAlone ? nullptr : a[1].data();
  job.param_dtype = param_dtype(c.master);
  job.grad = a[2].data();
  job.grad_dtype = c.grad_dtype;
  job.state_format = c.format;
  for (int k = 0; k < c.rule.states; ++k) {
    job.state[k] = a[static_cast<size_t>(3 + k)].data();
    job.scale[k] = c.format == zero::kState8Bit ? a[static_cast<size_t>(5 + k)].as<float>() : nullptr;
  }
  job.numel = c.numel;
  job.seed = zero::step_seed(12345, 3);
  job.first_block = 77;
  job.marks = c.marked ? a[7].data() : nullptr;
  zero::set_isa(way.isa.c_str());
  zero::step(job, way.threads);
  return copy;
}

int64_t test_step(const Case& c, const std::vector<Way>& all, Random& random) {
  const Shard shard = shard_of(c, random);
  const Shard wanted = stepped(c, shard, all.front());
  const Holds master = c.master == kRemainder ? Holds::kBits : Holds::kF32;
  const Holds param = c.master == kWithF32 ? Holds::kF32 : c.master == kWithF16 ? Holds::kF16 : Holds::kBits;
  const Holds state = c.format == zero::kStateF32 ? Holds::kF32 : Holds::kBits;
  const Holds bits = Holds::kBits;
  const std::pair<const char*, Holds> names[] = {{"master", master}, {"param", param},   {"grad", bits},
                                                 {"state0", state},  {"state1", state},  {"scale0", bits},
                                                 {"scale1", bits},   {"marks", bits}};
  for (const Way& way : all) {
    const Shard got = stepped(c, shard, way);
    for (size_t k = 0; k < got.arrays.size(); ++k) {
      same("step: " + c.text() + ": " + way.text() + ": " + names[k].first, got.arrays[k], wanted.arrays[k],
           names[k].second);
    }
  }
  return static_cast<int64_t>(all.size());
}

int64_t test_steps(const std::vector<Way>& all, Random& random) {
  int64_t count = 0, turn = 0;  // each size with marks and without them
  for (const Rule& rule : kRules) {
    for (const Master master : kMasters) {
      for (const int format : {zero::kStateF32, zero::kStateBF16, zero::kState8Bit}) {
        for (const int dtype : kDTypes) {
          for (const int64_t numel : kSizes) {
            count += test_step({rule, master, format, dtype, numel, Kind::kSigned, (++turn & 1) != 0}, all, random);
          }
          count += test_step({rule, master, format, dtype, 1025, Kind::kHostile, (++turn & 1) != 0}, all, random);
        }
        // How a shard is shared out depends on its format alone: every rule and every master meets each format.
        if (master == static_cast<Master>((&rule - kRules + format) % 5)) {
          for (const bool marked : {false, true}) {
            count += test_step({rule, master, format, zero::kBF16, kTwoThreads, Kind::kSigned, marked}, all, random);
          }
        }
      }
    }
  }
  for (const int format : {zero::kStateF32, zero::kState8Bit}) {
    count += test_step({kRules[0], kRemainder, format, zero::kBF16, kLarge, Kind::kSigned}, all, random);
  }
  return count;
}

// The sum of squares.

int64_t test_sum_squares(const std::vector<Way>& all, Random& random) {
  int64_t count = 0;
  const auto test = [&](int dtype, int64_t numel, Kind kind) {
    const Array x = numbers(numel, dtype, random, kind);
    zero::set_isa("scalar");
    const double wanted = zero::sum_squares(x.data(), dtype, numel, 1);
    for (const Way& way : all) {
      const Array moved(x, way.lead_of(0));
      zero::set_isa(way.isa.c_str());
      const double got = zero::sum_squares(moved.data(), dtype, numel, way.threads);
      same(std::string("sum_squares: ") + kDTypeNames[dtype] + ", " + std::to_string(numel) + " elements, " +
               way.text() + ": result", got, wanted);
      ++count;
    }
  };
  for (const int dtype : kDTypes) {
    for (const int64_t numel : kSizes) test(dtype, numel, Kind::kSigned);
    for (const int64_t numel : {zero::kNormBlock - 1, zero::kNormBlock, zero::kNormBlock + 1, kTwoThreads, kLarge}) {
      test(dtype, numel, Kind::kSigned);
    }
    test(dtype, 1025, Kind::kHostile);
  }
  return count;
}

// Packing and unpacking.

// Tensors of all sizes, in a flat buffer with a gap of three elements before each.
struct Spans {
  std::vector<Array> tensors;
  std::vector<zero::Span> spans;
  int64_t numel = 0;

  Spans(const std::vector<int64_t>& sizes, int dtype, const Way& way, Random random) {
    for (const int64_t size : sizes) {
      const int index = static_cast<int>(tensors.size());
      tensors.emplace_back(numbers(size, dtype, random, Kind::kHostile), way.lead_of(index));
      numel += 3;
      spans.push_back(zero::Span{tensors.back().data(), dtype, size, numel});
      numel += size;
    }
  }
};

Holds holds_of(int dtype) {
  return dtype == zero::kF32 ? Holds::kF32 : dtype == zero::kF16 ? Holds::kF16 : Holds::kBits;
}

int64_t test_bucket(const std::vector<int64_t>& sizes, int dtype, int flat_dtype, float scale, bool add,
                    const std::vector<Way>& all, const Random& random) {
  const auto packed = [&](const Way& way) {
    Spans made(sizes, dtype, way, random);
    Array flat(made.numel, static_cast<int>(zero::dtype_size(flat_dtype)), way.lead_of(0));
    zero::set_isa(way.isa.c_str());
    zero::pack(made.spans.data(), static_cast<int64_t>(sizes.size()), flat.data(), flat_dtype, scale, add, way.threads);
    return flat;
  };
  const Array flat = packed(all.front());
  for (const Way& way : all) {
    const std::string text = std::string(kDTypeNames[dtype]) + " tensors, " + kDTypeNames[flat_dtype] + " flat, " +
                             std::to_string(flat.numel()) + " elements, " + way.text() + ": ";
    // The gaps hold the guard in both, so a write into one is a difference.
    same("pack: " + text + "flat", packed(way), flat, holds_of(flat_dtype));
  }
  return static_cast<int64_t>(all.size());
}

int64_t test_buckets(const std::vector<Way>& all, Random& random) {
  const std::vector<int64_t> small(std::begin(kSizes), std::end(kSizes));
  int64_t count = 0;
  for (const int dtype : kDTypes) {
    for (const int flat_dtype : kDTypes) {
      for (const float scale : {1.0f, 0.37f}) {
        count += test_bucket({}, dtype, flat_dtype, scale, scale == 1.0f, all, random);
        count += test_bucket(small, dtype, flat_dtype, scale, scale == 1.0f, all, random);
        count += test_bucket({5, kTwoThreads, 1, 0, 77}, dtype, flat_dtype, scale, scale == 1.0f, all, random);
        random.next();
      }
      count += test_bucket({kLarge}, dtype, flat_dtype, 0.37f, false, {all.front(), all.back()}, random);
    }
  }
  return count;
}

// Sums of rows.

int64_t test_sum_rows(int64_t rows, int64_t numel, int dtype, bool accumulate, const std::vector<Way>& all,
                      const Random& random) {
  const auto summed = [&](const Way& way) {
    Random same_numbers = random;
    std::vector<Array> arrays;
    std::vector<const void*> pointers;
    for (int64_t r = 0; r < rows; ++r) {
      arrays.emplace_back(numbers(numel, dtype, same_numbers, Kind::kHostile), way.lead_of(static_cast<int>(r)));
      pointers.push_back(arrays.back().data());
    }
    Array out(numbers(numel, zero::kF32, same_numbers, Kind::kSigned), way.lead_of(5));
    // The sum may be written over one of its rows.
    const bool in_place = dtype == zero::kF32 && rows > 2;
    zero::SumRowsJob job{pointers.data(), rows, dtype, in_place ? arrays[1].as<float>() : out.as<float>(),
                         accumulate, 0};
    zero::set_isa(way.isa.c_str());
    zero::sum_rows(job, numel, way.threads);
    return in_place ? std::move(arrays[1]) : std::move(out);
  };
  const Array wanted = summed(all.front());
  for (const Way& way : all) {
    same("sum_rows: " + std::to_string(rows) + " rows of " + std::to_string(numel) + " " + kDTypeNames[dtype] + ", " +
             way.text() + ": out", summed(way), wanted, Holds::kF32);
  }
  return static_cast<int64_t>(all.size());
}

int64_t test_sums_of_rows(const std::vector<Way>& all, Random& random) {
  int64_t count = 0;
  for (const int dtype : kDTypes) {
    for (const bool accumulate : {false, true}) {
      for (const int64_t rows : {1, 2, 3, 4, 9}) {
        for (const int64_t numel : kSizes) count += test_sum_rows(rows, numel, dtype, accumulate, all, random);
        count += test_sum_rows(rows, kTwoThreads, dtype, accumulate, all, random);
        random.next();
      }
    }
    count += test_sum_rows(2, kLarge, dtype, false, {all.front(), all.back()}, random);
  }
  return count;
}

// Rows in 8 bits.

// The messages of some ranks, the error that the first of them leaves of its values, and their sum; in parts of `part`
// blocks.
std::pair<std::vector<Array>, Array> messages(int64_t rows, int64_t numel, int64_t part, int dtype, bool accumulate,
                                              const Way& way, Random random) {
  std::vector<Array> made;
  std::vector<const void*> pointers;
  zero::set_isa(way.isa.c_str());
  for (int64_t r = 0; r <= rows; ++r) {
    const Array values(numbers(numel, dtype, random, r == 1 ? Kind::kHostile : Kind::kSigned), way.lead_of(5));
    made.emplace_back(numel / zero::kWireBlock * zero::kWireRecord, 1, way.lead_of(static_cast<int>(r)));
    zero::EncodeJob job{values.data(), dtype, made.back().data(), r == rows ? made.front().data() : nullptr, part};
    zero::encode(job, numel, way.threads);
    if (r > 0) pointers.push_back(made.back().data());
  }
  Array out(numbers(numel, dtype, random, Kind::kSigned), way.lead_of(6));
  zero::sum_rows({pointers.data(), rows, dtype, out.data(), accumulate, part}, numel, way.threads);
  return {std::move(made), std::move(out)};
}

int64_t test_messages(const std::vector<Way>& all, Random& random) {
  int64_t count = 0;
  for (const int dtype : kDTypes) {
    for (const int64_t rows : {1, 2, 5}) {
      for (const int64_t numel : {0, 64, 128, 192, 1024, 33024}) {
        const bool accumulate = random.below(2) == 0;
        const int64_t blocks = numel / zero::kWireBlock, part = blocks % 4 == 0 ? blocks / 4 : blocks;
        const auto wanted = messages(rows, numel, part, dtype, accumulate, all.front(), random);
        for (const Way& way : all) {
          const std::string text = std::to_string(rows) + " x " + std::to_string(numel) + ", " + way.text() + ": ";
          const auto got = messages(rows, numel, part, dtype, accumulate, way, random);
          for (size_t r = 0; r < got.first.size(); ++r) {
            same("encode: " + text + "message " + std::to_string(r), got.first[r], wanted.first[r], Holds::kBits);
          }
          same("sum of messages: " + text + kDTypeNames[dtype], got.second, wanted.second, holds_of(dtype));
          count += 2 + rows;
        }
      }
    }
  }
  return count;
}

// Checksums.

// The definition, bit by bit.
uint32_t crc32_of(uint32_t value, const Array& bytes) {
  uint32_t state = ~value;
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    state ^= bytes.data()[i];
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1u ? 0xEDB88320u : 0u);
  }
  return ~state;
}

int64_t test_crc32(const std::vector<Way>& all, Random& random) {
  int64_t count = 0;
  const auto test = [&](int64_t numel) {
    const Array bytes = random_bytes(numel, 1, random);
    const uint32_t value = random.next(), wanted = crc32_of(value, bytes);
    for (const Way& way : all) {
      const Array copy(bytes, way.lead_of(0));
      zero::set_isa(way.isa.c_str());
      const uint32_t got = zero::active().crc32(value, copy.data(), numel);
      same("crc32: " + std::to_string(numel) + " bytes, " + way.text(), got, wanted);
      ++count;
    }
  };
  for (int64_t numel = 0; numel < 600; ++numel) test(numel);
  for (const int64_t numel : {int64_t{1023}, int64_t{1024}, int64_t{4097}, kTwoThreads}) test(numel);
  return count;
}

int run() {
  const std::vector<Way> all = ways();
  std::printf("instruction sets that run here:");
  for (const Way& way : all) {
    if (way.threads == 1) std::printf(" %s", way.isa.c_str());
  }
  std::printf("\n");
  Random random{20260101};
  int64_t count = 0;
  try {
    std::printf("files: %lld requests\n", static_cast<long long>(test_files()));
    count += test_sum_squares(all, random);
    count += test_buckets(all, random);
    count += test_sums_of_rows(all, random);
    count += test_messages(all, random);
    count += test_steps(all, random);
    count += test_crc32(all, random);
  } catch (const Failure& failure) {
    std::printf("FAILED: %s\n", failure.text.c_str());
    return 1;
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  std::printf("ok: %lld comparisons with the scalar kernels, all bitwise equal\n", static_cast<long long>(count));
  return 0;
}

}  // namespace
}  // namespace test

int main() { return test::run(); }
