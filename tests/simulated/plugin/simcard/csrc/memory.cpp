// Counted, capped device memory; nothing is cached, so what is allocated is what tensors hold.
#include "card.h"

#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace simcard {
namespace {

struct Account {
  size_t capacity = 0, current = 0, peak = 0, total_in = 0, total_out = 0;
  int64_t num_current = 0, num_out_of_memory = 0;
};

struct Block {
  size_t num_bytes;
  int device;
};

std::mutex lock;
std::vector<Account> accounts;
std::unordered_map<void*, Block> blocks;  // by address: torch's host kernels free memory by its address alone
thread_local int working_for = -1;

void release(void* memory) {
  {
    std::lock_guard<std::mutex> held(lock);
    const auto found = blocks.find(memory);
    if (found != blocks.end()) {
      auto& account = accounts[found->second.device];
      account.current -= found->second.num_bytes;
      account.total_out += found->second.num_bytes;
      account.num_current -= 1;
      blocks.erase(found);
      std::free(memory);
      return;
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
}

c10::CachingAllocator::Stat stat(int64_t current, int64_t peak, int64_t in, int64_t out) {
  c10::CachingAllocator::Stat made;
  made.current = current;
  made.peak = peak;
  made.allocated = in;
  made.freed = out;
  return made;
}

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    return allocate_on(current_device(), num_bytes, c10::Device(c10::DeviceType::PrivateUse1, current_device()));
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    const auto& account = accounts.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto bytes = stat(account.current, account.peak, account.total_in, account.total_out);
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*array)[0] = bytes;  // the sum over block sizes; nothing is kept by size
    }
    stats.allocation[0].current = stats.active[0].current = account.num_current;
    stats.num_ooms = account.num_out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    accounts.at(device).total_in = accounts.at(device).total_out = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    accounts.at(device).peak = accounts.at(device).current;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock);
    const auto& account = accounts.at(device);
    return {account.capacity - account.current, account.capacity};
  }
};

// The process's host allocator, except for threads that run a kernel: those get device memory. A CPU kernel at work
// for a device then puts its results and its workspace where the device's own kernel would.
struct HostDoor final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device host(c10::DeviceType::CPU);
    if (working_for >= 0) {
      return allocate_on(working_for, num_bytes, host);
    }
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(num_bytes);
    return {memory, memory, &release, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
};

CardAllocator the_allocator;
HostDoor the_door;

}  // namespace

c10::DataPtr allocate_on(int device, size_t num_bytes, c10::Device label) {
  if (num_bytes == 0) {
    return {nullptr, label};
  }
  {
    std::lock_guard<std::mutex> held(lock);
    auto& account = accounts.at(device);
    const size_t available = account.capacity - account.current;
    account.num_out_of_memory += num_bytes > available;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        num_bytes <= available,
        "simcard out of memory. Tried to allocate ", num_bytes, " bytes. Device ", device, " has a total capacity of ",
        account.capacity, " bytes of which ", available, " are free.");
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, num_bytes) == 0, "the host has no ", num_bytes, " bytes for simcard");
    account.current += num_bytes;
    account.peak = std::max(account.peak, account.current);
    account.total_in += num_bytes;
    account.num_current += 1;
    blocks[memory] = {num_bytes, device};
    return {memory, memory, &release, label};
  }
}

bool is_card_memory(void* memory) {
  std::lock_guard<std::mutex> held(lock);
  return blocks.count(memory) != 0;
}

c10::Allocator* card_allocator() { return &the_allocator; }
int num_devices() { return static_cast<int>(accounts.size()); }

void set_up_memory(int num_devices, size_t capacity_bytes) {
  accounts.resize(num_devices);
  for (auto& account : accounts) {
    account.capacity = capacity_bytes;
  }
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &the_allocator);
  c10::SetCPUAllocator(&the_door, 200);
}

AtWork::AtWork(int device) : outer_(working_for) { working_for = device; }
AtWork::~AtWork() { working_for = outer_; }

}  // namespace simcard
