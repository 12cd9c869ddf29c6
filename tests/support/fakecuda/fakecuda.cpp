// What PyTorch asks of CUDA while it traces fake tensors: that CUDA exists, which device is current, and which attention
// kernel it would take.  All three are answered here as on a machine with one H100.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

// ---- Attention: the entries of at::SDPBackend

constexpr int64_t kMath = 0, kFlash = 1, kEfficient = 2;
std::atomic<int64_t> chosen{kFlash};

int64_t choose_backend(const at::Tensor& query, const at::Tensor&, const at::Tensor& value,
                       const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  if (query.dim() != 4) {
    return kMath;  // all fused kernels take four dimensions
  }
  const int64_t backend = chosen.load();
  if (mask.has_value() && mask->defined() && mask->sym_stride(-1) != 1) {
    return kMath;  // no fused kernel reads such a mask
  }
  // PyTorch's flash kernel reads no mask, and one head dimension only.
  const bool flash = !mask.has_value() && query.sym_size(-1) == value.sym_size(-1);
  return backend == kFlash && !flash ? kEfficient : backend;
}

// ---- Device: one, always current

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Device device() { return c10::Device(c10::kCUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
};

// ---- Hooks: a few virtual functions of the live CUDAHooks object are replaced in a copy of its table.  The object itself is
// created by PyTorch and cannot be exchanged; its class differs between CPU and CUDA builds, its interface does not.

using Hooks = at::CUDAHooksInterface;

bool answer_yes(const Hooks*) { return true; }
bool answer_yes_for_device(const Hooks*, c10::DeviceIndex) { return true; }
void do_nothing(const Hooks*) {}

// Index in the virtual table (Itanium C++ ABI: a pointer to a virtual member holds 1 + its byte offset).
template <class Member>
size_t index_of(Member member) {
  struct {
    uintptr_t pointer;
    ptrdiff_t adjustment;
  } parts;
  static_assert(sizeof parts == sizeof member);
  std::memcpy(&parts, &member, sizeof parts);
  return (parts.pointer - 1) / sizeof(void*);
}

void replace_hooks() {
  constexpr size_t kBefore = 2;     // offset to top and type information precede the table
  constexpr size_t kEntries = 160;  // more than the interface has; what lies behind the table is copied and never used
  auto** const table = *reinterpret_cast<void***>(const_cast<Hooks*>(&at::detail::getCUDAHooks()));
  auto** const copy = new void*[kBefore + kEntries];  // lives as long as the process
  std::memcpy(copy, table - kBefore, (kBefore + kEntries) * sizeof(void*));
  auto** const replaced = copy + kBefore;
  replaced[index_of(&Hooks::hasCUDA)] = reinterpret_cast<void*>(&answer_yes);
  replaced[index_of(&Hooks::isBuilt)] = reinterpret_cast<void*>(&answer_yes);
  replaced[index_of(&Hooks::hasPrimaryContext)] = reinterpret_cast<void*>(&answer_yes_for_device);
  replaced[index_of(&Hooks::init)] = reinterpret_cast<void*>(&do_nothing);
  *reinterpret_cast<void***>(const_cast<Hooks*>(&at::detail::getCUDAHooks())) = replaced;
}

}  // namespace

extern "C" void fakecuda_install() {
  replace_hooks();
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, new OneDevice());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_backend);
}

extern "C" void fakecuda_choose(int64_t backend) { chosen = backend; }
