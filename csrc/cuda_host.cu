// Host memory that the device reads and writes by itself.
#include "cuda_common.cuh"

namespace zero {
namespace cuda {

void host_register(void* address, int64_t nbytes, int device) {
  enter(Where{device, nullptr});
  // Portable: pinned for every device of the process, whichever one is current when a copy is made.
  check(cudaHostRegister(address, static_cast<size_t>(nbytes), cudaHostRegisterPortable), "cudaHostRegister",
        Where{device, nullptr});
}

void host_unregister(void* address, int device) {
  enter(Where{device, nullptr});
  check(cudaHostUnregister(address), "cudaHostUnregister", Where{device, nullptr});
}

}  // namespace cuda
}  // namespace zero
