// A CUDA device on a processor, for a torch that was built without CUDA: its memory is the host's. Loaded before torch
// is imported (site/sitecustomize.py), which then keeps tensors on "cuda:0" apart from those on the CPU as ever, and runs
// what has no kernel of its own here by the CPU's. What this cannot see: what streams do at the same time (it has none
// that do), how a GPU rounds, and what torch's own CUDA kernels do otherwise than those of the CPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using torch::jit::Stack;
constexpr auto kCuda = c10::DeviceType::CUDA;
const c10::Device kDevice(kCuda, 0);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nullptr;
    if (nbytes && posix_memalign(&address, 512, nbytes)) throw std::bad_alloc();
    return {address, address, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
Memory memory;

// One stream, on which everything is done when it is asked for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device() != kDevice) return tensor;
  auto options = tensor.options().device(at::kCPU);
  auto alias = at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
  return tensor.is_neg() ? alias._neg_view() : alias;
}

Tensor& copy_(Tensor& self, const Tensor& other, bool) {
  if (self.numel()) on_host(self).copy_(on_host(other));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) { return const_cast<Tensor&>(to).copy_(self); }

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  return const_cast<Tensor&>(to.resize_(self.sizes())).copy_(self);
}

// Other memory of another size behind all tensors that share this one's; what both have room for is kept.
void resize_storage(const Tensor& self, int64_t nbytes) {
  auto& storage = self.unsafeGetTensorImpl()->unsafe_storage();
  auto fresh = memory.allocate(nbytes);
  if (const size_t kept = std::min<size_t>(nbytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  const size_t nbytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (nbytes > impl->storage().nbytes()) resize_storage(self, nbytes);
  return self;
}

void by_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  const bool mixed = name.find("index") != std::string::npos;  // which may take its indices from the CPU
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t index = first; index < stack->size(); ++index) {
    const c10::IValue& value = (*stack)[index];
    if (mixed || !value.isTensor() || !value.toTensor().defined() || !value.toTensor().dim()) continue;
    TORCH_CHECK(value.toTensor().device() == kDevice, name, ": Expected all tensors to be on the same device, but got ",
                value.toTensor().device(), " beside ", kDevice);
  }
  if (name == "aten::native_batch_norm")  // which writes into two of its arguments, and its schema does not say so
    for (c10::IValue* value : {&(*stack)[first + 3], &(*stack)[first + 4]})
      if (value->isTensor()) *value = on_host(value->toTensor());
  at::native::cpu_fallback(op, stack);
}

// What gloo does with tensors on a GPU.
void by_gloo(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (size_t index = stack->size() - count; index < stack->size(); ++index) {
    c10::IValue& value = (*stack)[index];
    if (value.isTensor()) {
      value = on_host(value.toTensor());
    } else if (value.isTensorList()) {
      value = c10::fmap(value.toTensorVector(), on_host);
    } else if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      c10::List<std::vector<Tensor>> rows;
      for (const c10::IValue& row : value.toListRef()) rows.push_back(c10::fmap(row.toTensorVector(), on_host));
      value = rows;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void not_by_gloo(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": gloo sends from host memory, and this tensor is on a GPU");
}

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
REGISTER_ALLOCATOR(kCuda, &memory)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
}

TORCH_LIBRARY(stand_in, m) { m.def("resize_storage(Tensor self, int nbytes) -> ()", &resize_storage); }

TORCH_LIBRARY_IMPL(c10d, AutogradCUDA, m) {
  for (const char* name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "reduce_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_gloo>());
  for (const char* name : {"send", "recv_", "recv_any_source_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&not_by_gloo>());
}
