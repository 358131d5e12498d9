// The structure of the sum of squares, which is fixed, so that no instruction set, thread count or chip changes its
// bits: blocks of 4096 elements, in each block 16 fp64 lanes (element i goes to lane i % 16) folded as a tree; then
// 1024 lanes (block b goes to lane b % 1024, in order) folded as a tree.
#pragma once

#include <cstdint>

namespace zero {

inline constexpr int64_t kNormBlock = 4096;
inline constexpr int kNormLanes = 16;
inline constexpr int kNormSums = 1024;

}  // namespace zero
