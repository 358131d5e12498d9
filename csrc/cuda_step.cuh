// The step for one format of the states; each is compiled alone (cuda_step.cu), cuda_dispatch.cu picks one.
#pragma once

#include "cuda_kernels.cuh"

namespace zero {
namespace cuda {

template <int format>
void step_in(const StepJob& job, const Where& where);

template <>
void step_in<kStateF32>(const StepJob& job, const Where& where);
template <>
void step_in<kStateBF16>(const StepJob& job, const Where& where);
template <>
void step_in<kState8Bit>(const StepJob& job, const Where& where);

}  // namespace cuda
}  // namespace zero
