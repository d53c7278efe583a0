// One kernel for every aten operator of the device: run the CPU's kernel on the same memory.
//
// An NPU tensor's memory is host memory here (ascendcl.cpp), so its CPU alias costs nothing; what an operator returns
// anew is allocated on the device and copied there. The kernel refuses what the device refuses, counts what it runs, and
// leaves the host's random state alone. Which operators it replaces is decided in Python (simulator/install.py).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "host_alias.h"

extern "C" int simulated_npu_is_pinned(const void*);
extern "C" int simulated_npu_saturates();
extern "C" long simulated_npu_waits();

namespace {

using at::Tensor;
using simulated_npu::host_alias;
using Stack = torch::jit::Stack;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// ---------------------------------------------------------------- counters

std::mutex lock;
std::unordered_map<std::string, int64_t> counts;  // operators run, "sync <why>", "fallback <operator>"

void count(const std::string& what) {
  std::lock_guard<std::mutex> held(lock);
  ++counts[what];
}

std::string full_name(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Operators whose result the host has to look at before it can go on: the size of what they return, or a value.
const std::unordered_set<std::string> kLooksAtValues = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::repeat_interleave.Tensor", "aten::repeat_interleave.self_Tensor", "aten::is_nonzero", "aten::one_hot"};

// Products of the cube units, which sum fp16 in fp32. The CPU's own fp16 sums so too, thirty times as slowly.
const std::unordered_set<std::string> kProducts = {
    "aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out", "aten::bmm", "aten::bmm.out", "aten::baddbmm",
    "aten::baddbmm.out", "aten::matmul", "aten::matmul.out", "aten::linear", "aten::convolution",
    "aten::convolution_overrideable", "aten::convolution_backward", "aten::convolution_backward_overrideable",
    "aten::matmul_backward", "aten::linear_backward", "aten::_convolution"};

// torch_npu's takes the loss scale and the flag of a skipped update, and looks at neither (op-plugin,
// FusedAdamWKernelNpuOpApi.cpp). The wheel of 2.13.0 knows no other operator that could: of aclnnFusedAdamw, which takes
// both, it has not even the name.
const std::string kFusedAdamw = "aten::_fused_adamw_";

bool takes_fp16(const Stack& stack, size_t n) {
  for (const auto& value : torch::jit::last(stack, n))
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kHalf) return true;
  return false;
}

// ---------------------------------------------------------------- refusals

bool strict = true;

// Ask Python's policy about an operator, the dtypes and the numbers of dimensions of its tensors; asked once for each
// combination.
void judge(const c10::OperatorHandle& op, const std::string& name, const std::vector<Tensor>& tensors) {
  static std::unordered_set<std::string> approved;
  std::string key = name + (strict ? "!" : "");
  for (const auto& each : tensors) {
    key += char('0' + static_cast<int>(each.scalar_type()));
    key += char('0' + 2 * each.dim() + each.is_privateuseone());
  }
  {
    std::lock_guard<std::mutex> held(lock);
    if (approved.count(key)) return;
  }
  c10::List<std::string> dtypes, devices;
  c10::List<int64_t> dims;
  for (const auto& each : tensors) {
    dtypes.push_back(c10::toString(each.scalar_type()));
    devices.push_back(each.is_privateuseone() ? "npu" : "cpu");
    dims.push_back(each.dim());
  }
  static auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("simulated_npu::judge", "");
  Stack stack{name, dtypes, devices, dims, strict};
  handle.callBoxed(&stack);
  if (stack.back().toBool()) {
    std::lock_guard<std::mutex> held(lock);
    approved.insert(key);
  }
}

// ---------------------------------------------------------------- aliases and results

int64_t extent(const Tensor& tensor) {  // elements from the first to the last
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return tensor.numel() ? last + 1 : 0;
}

Tensor to_device(const Tensor& tensor, c10::Device device) {
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).pinned_memory(false));
  if (tensor.numel()) std::memcpy(made.data_ptr(), tensor.data_ptr(), extent(tensor) * tensor.element_size());
  return made;
}

struct Pair {
  Tensor device, host;
  bool half = false;  // the host's is an fp32 copy of a half tensor
};

// The arguments of one call: device tensors replaced by host aliases, and what has to come back.
struct Call {
  const c10::OperatorHandle& op;
  const std::string name;
  bool widen;  // compute halves in fp32: some CPU kernels take no halves
  std::vector<Pair> pairs;
  std::vector<Tensor> seen;
  std::optional<c10::Device> device;
  at::ScalarType narrow = at::kFloat;

  Call(const c10::OperatorHandle& op, std::string name, bool widen) : op(op), name(std::move(name)), widen(widen) {}

  Tensor host(const Tensor& tensor, bool out) {
    if (!tensor.defined()) return tensor;
    seen.push_back(tensor);
    if (!tensor.is_privateuseone()) return tensor;
    if (!device) device = tensor.device();
    for (const auto& pair : pairs)
      if (pair.device.is_same(tensor)) return pair.host;
    Pair pair{tensor, Tensor(), false};
    pair.host = out && tensor.numel() == 0 ? at::empty({0}, tensor.options().device(at::kCPU)) : host_alias(tensor);
    const auto type = tensor.scalar_type();
    if (widen && (type == at::kHalf || type == at::kBFloat16)) {
      pair.half = true;
      narrow = type;
      pair.host = pair.host.to(at::kFloat);
    }
    pairs.push_back(pair);
    return pair.host;
  }

  c10::IValue host(const c10::IValue& value, const c10::Argument& argument) {
    const bool out = argument.is_out();
    if (value.isTensor()) return host(value.toTensor(), out);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) list.push_back(host(each, out));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(host(*each, out)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      if (!device) device = value.toDevice();
      return c10::Device(at::kCPU);
    }
    return value;
  }

  Tensor back(const Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& pair : pairs)
      if (result.is_same(pair.host)) return pair.device;
    if (!device) return result;
    for (const auto& pair : pairs) {  // a view of an argument
      if (pair.half || !result.has_storage() || !pair.host.numel()) continue;
      if (result.storage().data() != pair.host.storage().data()) continue;
      const auto skip = (static_cast<char*>(result.data_ptr()) - static_cast<char*>(pair.host.data_ptr())) /
                        static_cast<int64_t>(result.element_size());
      return at::empty({0}, pair.device.options())
          .set_(pair.device.storage(), pair.device.storage_offset() + skip, result.sizes(), result.strides());
    }
    const bool narrowed = widen && narrow != at::kFloat && result.scalar_type() == at::kFloat;
    return to_device(narrowed ? result.to(narrow) : result, *device);
  }

  c10::IValue back(const c10::IValue& value) const {
    if (value.isTensor()) return back(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) list.push_back(back(each));
      return list;
    }
    return value;
  }

  // What was written into an argument that is no alias (an empty out tensor, a widened half) goes to the device.
  void write_back() const {
    const auto& arguments = op.schema().arguments();
    const bool writes = std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& each) {
      return each.alias_info() && each.alias_info()->isWrite();
    });
    if (!writes) return;
    for (const auto& pair : pairs) {
      const bool grown = pair.device.sizes() != pair.host.sizes();
      if (grown) pair.device.resize_(pair.host.sizes());
      if ((grown || pair.half) && pair.host.numel()) host_alias(pair.device).copy_(pair.host);
    }
  }
};

void same_device(const Call& call) {
  const bool indexing = call.name.rfind("aten::index", 0) == 0 || call.name.rfind("aten::_index", 0) == 0;
  for (const auto& each : call.seen) {
    if (each.is_privateuseone() ? each.device() == *call.device : each.dim() == 0 || indexing) continue;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *call.device,
                " and ", each.device(), "! (in ", call.name, ")");
  }
}

// ---------------------------------------------------------------- randomness

at::Generator host_generator(at::Generator of_device) {
  std::lock_guard<std::mutex> held(of_device.mutex());
  const uint64_t seed = of_device.current_seed(), offset = of_device.get_offset();
  of_device.set_offset(offset + 4);
  return at::detail::createCPUGenerator((seed * 0x9E3779B97F4A7C15ull) ^ (offset * 0xD1B54A32D192ED03ull + 1));
}

at::Generator of_device(const c10::Device& device) {
  auto index = device.has_index() ? device.index() : c10::impl::getDeviceGuardImpl(kDevice)->getDevice().index();
  return at::globalContext().defaultGenerator(c10::Device(kDevice, index));
}

// Give the CPU's default generator another state for a while; operators without a generator argument draw from it.
struct Borrowed {
  at::Generator ours = at::detail::getDefaultCPUGenerator();
  Tensor kept;
  explicit Borrowed(const at::Generator& lent) : kept(ours.get_state()) { ours.set_state(lent.get_state()); }
  ~Borrowed() { ours.set_state(kept); }
};

// ---------------------------------------------------------------- the kernel

std::atomic<bool> overflow{false};  // the float status register: an fp16 result had to be saturated

bool overflowed(bool clear) { return clear ? overflow.exchange(false) : overflow.load(); }

void saturate(const c10::IValue& value) {
  const auto clamp = [](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone() || tensor.scalar_type() != at::kHalf || !tensor.numel()) return;
    auto alias = host_alias(tensor);
    if (!at::isfinite(alias).all().item<bool>()) overflow = true;
    alias.copy_(at::nan_to_num(alias, 0.0, 65504.0, -65504.0));
  };
  if (value.isTensor()) clamp(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& each : value.toTensorList()) clamp(each);
}

bool saturates() {
  static const char* text = getenv("SIMULATED_NPU_SATURATE");
  static const bool asked = text && *text == '1';
  return asked || simulated_npu_saturates() == 1;
}

void run(const c10::OperatorHandle& op, const std::string& name, Stack* stack, bool widen) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  Stack given(stack->end() - n, stack->end());
  Call call(op, name, widen);
  Stack host;
  std::optional<at::Generator> drawn;
  bool factory = false;
  for (size_t i = 0; i < n; ++i) {
    const auto& argument = schema.arguments()[i];
    if (given[i].isDevice() && given[i].toDevice().type() == kDevice) factory = true;
    if (argument.name() == "pin_memory" && factory) {
      host.emplace_back();
    } else if (given[i].isGenerator()) {
      drawn = host_generator(given[i].toGenerator());
      host.emplace_back(*drawn);
    } else {
      host.push_back(call.host(given[i], argument));
    }
    if (name == kFusedAdamw && (argument.name() == "grad_scale" || argument.name() == "found_inf")) host.back() = {};
  }
  if (!call.seen.empty()) {
    TORCH_CHECK(call.device, name, " was called for the device, and none of its tensors is there");
    same_device(call);
    judge(op, name, call.seen);
  }
  if (!drawn && op.hasTag(at::Tag::nondeterministic_seeded)) {
    drawn = host_generator(of_device(call.device.value_or(c10::Device(kDevice))));
    for (size_t i = 0; i < n; ++i)
      if (host[i].isNone() && schema.arguments()[i].name() == "generator") host[i] = *drawn;
  }
  {
    std::optional<Borrowed> borrowed;
    if (drawn) borrowed.emplace(*drawn);
    at::AutoDispatchBelowAutograd below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(&host);
  }
  call.write_back();
  torch::jit::drop(*stack, n);
  for (const auto& each : host) {
    stack->push_back(call.back(each));
    if (saturates()) saturate(stack->back());
  }
}

bool lacks_halves(const std::string& text) {
  return text.find("not implemented for 'Half'") != std::string::npos ||
         text.find("not implemented for 'BFloat16'") != std::string::npos;
}

// How many elements a mask picks the device tells only when asked.
bool indexed_by_mask(const std::string& name, const Stack& stack) {
  if (name != "aten::index.Tensor" && name.rfind("aten::index_put", 0) && name.rfind("aten::_index_put", 0)) return false;
  for (const auto& argument : stack) {
    if (!argument.isList()) continue;
    for (const c10::IValue& each : argument.toListRef())
      if (each.isTensor() && each.toTensor().defined() &&
          (each.toTensor().scalar_type() == at::kBool || each.toTensor().scalar_type() == at::kByte))
        return true;
  }
  return false;
}

void host_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto name = full_name(op);
  count(name);
  if (kLooksAtValues.count(name) || indexed_by_mask(name, *stack)) count("sync " + name);
  try {
    run(op, name, stack, kProducts.count(name) && takes_fp16(*stack, op.schema().arguments().size()));
  } catch (const c10::Error& error) {
    if (!lacks_halves(error.what_without_backtrace())) throw;
    run(op, name, stack, true);
  }
}

// An operator without a kernel on the device: torch_npu computes it on the host, with two copies and a wait.
void fallback_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto name = full_name(op);
  count("fallback " + name);
  count("sync " + name);
  TORCH_CHECK(!strict, "simulated NPU: ", name,
              " has no kernel on the device and falls back to the CPU (source: the wheel registers none)");
  try {
    run(op, name, stack, false);
  } catch (const c10::Error& error) {
    if (!lacks_halves(error.what_without_backtrace())) throw;
    run(op, name, stack, true);
  }
}

// ---------------------------------------------------------------- copies

// DDP sends the table of its buckets, int32, from pageable memory when it rebuilds them, once: a wait that is nobody's.
void check_pinned(const Tensor& host, const char* direction) {
  if (!host.numel() || simulated_npu_is_pinned(host.data_ptr())) return;
  count("sync a non-blocking copy of pageable memory");
  TORCH_CHECK(!strict || host.scalar_type() == at::kInt,
              "simulated NPU: a non-blocking copy ", direction, " pageable host memory (source: torch_npu's copy waits for "
              "the stream unless the host tensor is pinned)");
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  count("aten::copy_");
  const bool from_host = source.is_cpu(), to_host = self.is_cpu();
  if (from_host || to_host) {
    const auto& host = from_host ? source : self;
    if (non_blocking) check_pinned(host, from_host ? "from" : "to");
    else if (host.numel()) count(from_host ? "sync copy to the device" : "sync copy to the host");
    count(from_host ? "copy to the device" : "copy to the host");
  }
  if (strict) judge(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""), "aten::copy_", {self, source});
  auto into = to_host ? self : host_alias(self);
  auto from = from_host ? source : host_alias(source);
  at::AutoDispatchBelowAutograd below;
  if (self.numel()) into.copy_(from);
  if (saturates()) saturate(self);
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& into) {
  if (into.sizes() != self.sizes()) into.resize_(self.sizes());
  auto target = into;
  return copy(target, self, false);
}

Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pin, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  // an absent pin_memory and a device: what the host receives is pageable, so nothing can be left under way
  const bool to_host = device && device->is_cpu();
  return at::compositeexplicitautograd::_to_copy(self, dtype, layout, device, pin,
                                                 non_blocking && !(to_host && !strict), format);
}

at::Scalar item(const Tensor& self) {
  count("aten::_local_scalar_dense");
  count("sync a value read by the host");
  return host_alias(self).item();
}

std::string counters() {
  std::lock_guard<std::mutex> held(lock);
  std::string text = "{\"sync a wait for stream, event or device\": " + std::to_string(simulated_npu_waits());
  for (const auto& [name, number] : counts) text += ", \"" + name + "\": " + std::to_string(number);
  return text + "}";
}

std::vector<std::unique_ptr<torch::Library>> libraries;

void replace(const c10::List<std::string>& names, bool falls_back) {
  for (const std::string& full : names) {
    const auto colon = full.find("::");
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, full.substr(0, colon),
                                                    c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    auto function = falls_back ? torch::CppFunction::makeFromBoxedFunction<&fallback_kernel>()
                               : torch::CppFunction::makeFromBoxedFunction<&host_kernel>();
    library->impl(full.substr(colon + 2).c_str(), std::move(function));
    libraries.push_back(std::move(library));
  }
}

void install(c10::List<std::string> replaced, c10::List<std::string> fallbacks, bool is_strict) {
  struct Quiet : c10::WarningHandler {  // of each kernel that is overridden
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  strict = is_strict;
  replace(replaced, false);
  replace(fallbacks, true);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                                                  __LINE__);
  library->impl("copy_", copy);
  library->impl("_copy_from_and_resize", copy_from_and_resize);
  library->impl("_to_copy", to_copy);
  library->impl("_local_scalar_dense", item);
  libraries.push_back(std::move(library));
}

void set_strict(bool is_strict) { strict = is_strict; }

}  // namespace

TORCH_LIBRARY(simulated_npu, m) {
  m.def("judge(str op, str[] dtypes, str[] devices, int[] dims, bool strict) -> bool");
  m.def("install(str[] replaced, str[] fallbacks, bool strict) -> ()", install);
  m.def("set_strict(bool strict) -> ()", set_strict);
  m.def("counters() -> str", counters);
  m.def("overflowed(bool clear) -> bool", overflowed);
  m.def("count(str what) -> ()", [](std::string what) { count(what); });
  m.def("host(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return host_alias(tensor); });
  m.def("to_device(Tensor tensor, Device device) -> Tensor",
        [](const Tensor& tensor, c10::Device device) { return to_device(tensor, device); });
}
