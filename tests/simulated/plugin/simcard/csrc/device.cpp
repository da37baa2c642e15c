// Devices as torch asks about them: guard, streams and events that are done when they are asked, generators, hooks.
#include "card.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

namespace simcard {
namespace {

constexpr auto kCard = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;

thread_local int current = 0;
thread_local std::vector<c10::StreamId> streams;
std::atomic<c10::StreamId> next_stream{1};

c10::StreamId& stream_of(int device) {
  streams.resize(std::max<size_t>(streams.size(), num_devices()), 0);
  return streams.at(device);
}

// Work is finished when the call returns: a stream is a name, an event the time at which it was recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kCard, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < num_devices()) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kCard, index), stream_of(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    const int index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kCard, index), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& place = stream_of(stream.device_index());
    const c10::Stream before(c10::Stream::UNSAFE, stream.device(), place);
    place = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto span = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(span).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }
};

// Draws as the host's engine does from the same seed, with a state of its own.
struct CardGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit CardGenerator(int device, at::Generator engine = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kCard, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(engine)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return at::Generator(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  CardGenerator* clone_impl() const override { return new CardGenerator(device().index(), inner.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<CardGenerator>(device < 0 ? current : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kCard, static_cast<c10::DeviceIndex>(current)}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto grown = allocate_on(storage.device().index(), num_bytes, storage.device());
    std::memcpy(grown.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

}  // namespace

int current_device() { return current; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "no simcard device ", device, ", there are ", num_devices());
  current = device;
}

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < num_devices(); ++i) {
      made.push_back(at::make_generator<CardGenerator>(i));
    }
    return made;
  }();
  return generators.at(device);
}

at::Generator host_generator(const at::Generator& generator) { return generator.get<CardGenerator>()->inner; }

void manual_seed_all(uint64_t seed) {
  for (int i = 0; i < num_devices(); ++i) {
    at::Generator(default_generator(i)).set_current_seed(seed);
  }
}

void register_device() {
  static Guard guard;
  c10::impl::DeviceGuardImplRegistrar registrar(kCard, &guard);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace simcard
