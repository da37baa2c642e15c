// A simulated accelerator behind torch's PrivateUse1 door: what its parts share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace simcard {

// Device memory is host memory that is counted and capped per device. `allocate_on` throws c10::OutOfMemoryError.
void set_up_memory(int num_devices, size_t capacity_bytes);
c10::DataPtr allocate_on(int device, size_t num_bytes, c10::Device label);
bool is_card_memory(void* memory);
c10::Allocator* card_allocator();
int num_devices();

// The current device of this thread.
int current_device();
void set_current_device(int device);

// While one exists, whatever this thread allocates on the host comes out of `device`'s memory: a kernel at work.
class AtWork {
 public:
  explicit AtWork(int device);
  ~AtWork();
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;

 private:
  int outer_;
};

// The same memory as a CPU tensor, which keeps the original alive.
at::Tensor host_alias(const at::Tensor& x);

void register_device();  // guard, hooks, generators
void manual_seed_all(uint64_t seed);
at::Generator host_generator(const at::Generator& generator);  // the engine inside one of ours
const at::Generator& default_generator(int device);

// `gaps` as in SIMCARD_GAPS; returns the operators that were planted with one. Throws for one that is not there.
std::vector<std::string> register_kernels(const std::string& gaps);

}  // namespace simcard
