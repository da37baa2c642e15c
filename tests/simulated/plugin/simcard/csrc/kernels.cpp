// Kernels of the card: the host's own, run on the card's memory. One boxed function serves every operator that the
// host has a kernel of; each is registered by name, so that an operator left out is missing as on any other device.
#include "card.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>
#include <sstream>
#include <unordered_map>

namespace simcard {
namespace {

using c10::DeviceType;
using torch::jit::Stack;

constexpr auto kCard = DeviceType::PrivateUse1;
constexpr double kWrongFactor = 1.0 + 1e-3;

bool on_card(const at::Tensor& x) { return x.defined() && x.device().type() == kCard; }

const c10::DispatchKeySet kBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// `base`: the keys of what this is a view of; a view in inference mode of a tensor from outside is none of inference.
at::Tensor tensor_of(
    c10::Storage storage, c10::DispatchKey key, const at::Tensor& like,
    std::optional<c10::DispatchKeySet> base = std::nullopt) {
  auto made = base.has_value()
      ? at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, std::move(storage), *base - kBits, like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

c10::Storage alias_of(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr data(const_cast<void*>(storage.data()), owner, drop, c10::Device(DeviceType::CPU));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), true};
}

// One call of a host kernel on card tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {}

  void run(const c10::OperatorHandle& target, bool is_wrong) {
    enter();
    {
      AtWork work(device_);
      target.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
      if (is_wrong) {
        spoil();
      }
    }
    sync();
    leave();
  }

 private:
  void enter() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      visit((*stack_)[first + i], [&](const at::Tensor& x) { note_device(x); });
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack_)[first + i];
      if (value.isDevice() && value.toDevice().type() == kCard) {
        const auto asked = value.toDevice();
        device_ = device_ < 0 ? (asked.has_index() ? asked.index() : current_device()) : device_;
        value = c10::Device(DeviceType::CPU);
      }
    }
    device_ = device_ < 0 ? current_device() : device_;
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack_)[first + i];
      if (value.isGenerator() || (value.isNone() && is_generator(arguments[i]))) {
        value = host_generator(value.isNone() ? default_generator(device_) : value.toGenerator());
      } else {
        value = mapped(value, [&](const at::Tensor& x) { return to_host(x, i); });
      }
    }
  }

  static bool is_generator(const c10::Argument& argument) { return argument.name() == "generator"; }

  void note_device(const at::Tensor& x) {
    if (!on_card(x)) {
      return;
    }
    TORCH_CHECK(
        device_ < 0 || device_ == x.device().index(),
        "Expected all tensors to be on the same device, but found at least two devices, simcard:", device_, " and ",
        x.device(), "! (when running ", op_.schema().name(), ")");
    device_ = x.device().index();
  }

  at::Tensor to_host(const at::Tensor& x, size_t place) {
    if (!x.defined()) {
      return x;
    }
    if (!on_card(x)) {
      // A number may stay on the host; so may the positions of an indexing operator, after its first argument.
      const bool is_index = place > 0 && op_.schema().name().find("index") != std::string::npos;
      TORCH_CHECK(
          x.dim() == 0 || is_index,
          "Expected all tensors to be on the same device, but found at least two devices, simcard:", device_, " and ",
          x.device(), "! (when running ", op_.schema().name(), ")");
      return x;
    }
    auto* storage = x.storage().unsafeGetStorageImpl();
    auto found = aliases_.find(storage);
    if (found == aliases_.end()) {
      found = aliases_.emplace(storage, alias_of(x.storage())).first;
      originals_.emplace(found->second.unsafeGetStorageImpl(), x.storage());
      bases_.emplace(found->second.unsafeGetStorageImpl(), x.key_set());
    }
    auto alias = tensor_of(found->second, c10::DispatchKey::CPU, x);
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    inputs_.emplace_back(x, alias);
    return alias;
  }

  void spoil() {
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      visit((*stack_)[i], [](const at::Tensor& x) {
        if (x.defined() && (x.is_floating_point() || x.is_complex())) {
          at::Tensor(x).mul_(kWrongFactor);
        }
      });
    }
  }

  // What the kernel resized, it resized on the alias.
  void sync() {
    for (auto& [original, alias] : inputs_) {
      auto storage = original.storage();
      if (alias.storage().data() != storage.data() || alias.storage().nbytes() != storage.nbytes()) {
        const size_t num_bytes = alias.storage().nbytes();
        storage.set_data_ptr_noswap(take(alias.storage()));
        storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
      }
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
          alias.storage_offset() != original.storage_offset()) {
        original.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      }
    }
  }

  void leave() {
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      (*stack_)[i] = mapped((*stack_)[i], [&](const at::Tensor& x) { return to_card(x); });
    }
  }

  at::Tensor to_card(const at::Tensor& x) {
    if (!x.defined()) {
      return x;
    }
    for (const auto& [original, alias] : inputs_) {
      if (alias.is_same(x)) {
        return original;
      }
    }
    auto* storage = x.storage().unsafeGetStorageImpl();
    auto found = originals_.find(storage);
    if (found == originals_.end()) {
      c10::Storage made(
          c10::Storage::use_byte_size_t(), storage->nbytes(), take(x.storage()), card_allocator(), true);
      found = originals_.emplace(storage, std::move(made)).first;
      kept_.push_back(x.storage());
    }
    const auto base = bases_.find(storage);
    const auto keys = base == bases_.end() ? std::nullopt : std::make_optional(base->second);
    return tensor_of(found->second, c10::DispatchKey::PrivateUse1, x, keys);
  }

  // The memory out of a host storage, as the card's; copied where the kernel had it from elsewhere.
  c10::DataPtr take(const c10::Storage& storage) {
    const c10::Device card(kCard, static_cast<c10::DeviceIndex>(device_));
    const size_t num_bytes = storage.nbytes();
    auto data = storage.set_data_ptr(c10::DataPtr(nullptr, c10::Device(DeviceType::CPU)));
    if (data.get() == nullptr || is_card_memory(data.get())) {
      data.unsafe_set_device(card);
      return data;
    }
    auto copied = allocate_on(device_, num_bytes, card);
    std::memcpy(copied.get(), data.get(), num_bytes);
    return copied;
  }

  template <typename F>
  static void visit(const c10::IValue& value, F&& look) {
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        visit(item, look);
      }
    }
  }

  template <typename F>
  static c10::IValue mapped(const c10::IValue& value, F&& change) {
    if (value.isTensor()) {
      return change(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& item : value.toTensorList()) {
        list.push_back(change(item));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& item : value.toOptionalTensorList()) {
        list.push_back(item.has_value() ? std::optional<at::Tensor>(change(*item)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  int device_ = -1;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_;    // by the card's storage
  std::unordered_map<c10::StorageImpl*, c10::Storage> originals_;  // by the host's storage
  std::unordered_map<c10::StorageImpl*, c10::DispatchKeySet> bases_;  // keys of the card's tensor, by the same
  std::vector<std::pair<at::Tensor, at::Tensor>> inputs_;
  std::vector<c10::Storage> kept_;  // so that no address is met twice
};

void kernel(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(op, false); }
void wrong_kernel(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(op, true); }
void host_kernel(const c10::OperatorHandle& op, Stack* stack) { at::native::cpu_fallback(op, stack); }

// torch asks a backend of its own for convolutions under a name of their own.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static const auto target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Call(op, stack).run(target, false);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  const auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), card_allocator(), key, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  const auto key = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), card_allocator(), key,
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  const bool is_inside = on_card(source) && on_card(target);
  auto to = on_card(target) ? host_alias(target) : target;
  auto from = on_card(source) ? host_alias(source) : source;
  std::optional<AtWork> work;
  if (is_inside) {
    work.emplace(target.device().index());
  }
  to.copy_(from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(
    at::Tensor& x, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return x;
}

using Gaps = std::map<std::string, std::string>;  // operator without namespace and overload -> kind

Gaps parse_gaps(const std::string& text) {
  Gaps gaps;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const auto at = word.find(':');
    const auto kind = word.substr(0, at);
    TORCH_CHECK(
        at != std::string::npos && (kind == "missing" || kind == "host" || kind == "wrong"),
        "SIMCARD_GAPS: '", word, "', expected missing:NAME, host:NAME or wrong:NAME, commas between them");
    gaps[word.substr(at + 1)] = kind;
  }
  return gaps;
}

std::string base_name(const std::string& name) {  // aten::add_ -> add
  auto base = name.substr(name.find("::") + 2);
  if (!base.empty() && base.back() == '_') {
    base.pop_back();
  }
  return base;
}

}  // namespace

at::Tensor host_alias(const at::Tensor& x) {
  return tensor_of(alias_of(x.storage()), c10::DispatchKey::CPU, x);
}

std::vector<std::string> register_kernels(const std::string& text) {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static const std::set<std::string> by_hand = {
      "empty", "empty_strided", "_copy_from", "_copy_from_and_resize", "set", "is_pinned", "_pin_memory", "from_file"};
  const auto gaps = parse_gaps(text);
  std::set<std::string> planted;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    const auto base = base_name(name.name);
    if (by_hand.count(base)) {
      continue;
    }
    const auto gap = gaps.find(base);
    const auto kind = gap == gaps.end() ? std::string() : gap->second;
    if (!kind.empty()) {
      planted.insert(base);
    }
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (kind == "host") {
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&host_kernel>());
    } else if (kind == "wrong") {
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&wrong_kernel>());
    } else if (kind.empty()) {
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    }
  }
  for (const auto& [name, kind] : gaps) {
    TORCH_CHECK(planted.count(name), "SIMCARD_GAPS: no operator '", name, "' with a kernel of its own");
  }
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  return {planted.begin(), planted.end()};
}

}  // namespace simcard
