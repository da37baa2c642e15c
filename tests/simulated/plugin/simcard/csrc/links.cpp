// How cards talk, and what Python calls: collectives over another backend of torch, on the same memory seen from the
// host.
#include "card.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace simcard {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

class Links final : public c10d::Backend {
 public:
  explicit Links(c10::intrusive_ptr<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "simlink"; }
  Work broadcast(Tensors& x, const c10d::BroadcastOptions& options) override {
    auto seen = view(x);
    return host_->broadcast(seen, options);
  }
  Work allreduce(Tensors& x, const c10d::AllreduceOptions& options) override {
    auto seen = view(x);
    return host_->allreduce(seen, options);
  }
  Work reduce(Tensors& x, const c10d::ReduceOptions& options) override {
    auto seen = view(x);
    return host_->reduce(seen, options);
  }
  Work allgather(std::vector<Tensors>& out, Tensors& x, const c10d::AllgatherOptions& options) override {
    auto seen_out = view(out);
    auto seen = view(x);
    return host_->allgather(seen_out, seen, options);
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& x, const c10d::AllgatherOptions& options) override {
    auto seen_out = view(out), seen = view(x);
    return host_->_allgather_base(seen_out, seen, options);
  }
  Work gather(std::vector<Tensors>& out, Tensors& x, const c10d::GatherOptions& options) override {
    auto seen_out = view(out);
    auto seen = view(x);
    return host_->gather(seen_out, seen, options);
  }
  Work scatter(Tensors& out, std::vector<Tensors>& x, const c10d::ScatterOptions& options) override {
    auto seen_out = view(out);
    auto seen = view(x);
    return host_->scatter(seen_out, seen, options);
  }
  Work reduce_scatter(Tensors& out, std::vector<Tensors>& x, const c10d::ReduceScatterOptions& options) override {
    auto seen_out = view(out);
    auto seen = view(x);
    return host_->reduce_scatter(seen_out, seen, options);
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& x, const c10d::ReduceScatterOptions& options) override {
    auto seen_out = view(out), seen = view(x);
    return host_->_reduce_scatter_base(seen_out, seen, options);
  }
  Work alltoall_base(
      at::Tensor& out, at::Tensor& x, std::vector<int64_t>& out_sizes, std::vector<int64_t>& sizes,
      const c10d::AllToAllOptions& options) override {
    auto seen_out = view(out), seen = view(x);
    return host_->alltoall_base(seen_out, seen, out_sizes, sizes, options);
  }
  Work alltoall(Tensors& out, Tensors& x, const c10d::AllToAllOptions& options) override {
    auto seen_out = view(out), seen = view(x);
    return host_->alltoall(seen_out, seen, options);
  }
  Work send(Tensors& x, int to, int tag) override {
    auto seen = view(x);
    return host_->send(seen, to, tag);
  }
  Work recv(Tensors& x, int from, int tag) override {
    auto seen = view(x);
    return host_->recv(seen, from, tag);
  }
  Work recvAnysource(Tensors& x, int tag) override {
    auto seen = view(x);
    return host_->recvAnysource(seen, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }

 private:
  static at::Tensor view(const at::Tensor& x) {
    TORCH_CHECK(x.device().type() == c10::DeviceType::PrivateUse1, "simlink moves simcard tensors, found ", x.device());
    return host_alias(x);
  }
  static Tensors view(const Tensors& list) {
    Tensors seen;
    for (const auto& x : list) {
      seen.push_back(view(x));
    }
    return seen;
  }
  static std::vector<Tensors> view(const std::vector<Tensors>& lists) {
    std::vector<Tensors> seen;
    for (const auto& list : lists) {
      seen.push_back(view(list));
    }
    return seen;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
};

}  // namespace
}  // namespace simcard

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("start", [](int num_devices, size_t capacity_bytes, const std::string& gaps) {
    simcard::set_up_memory(num_devices, capacity_bytes);
    simcard::register_device();
    return simcard::register_kernels(gaps);
  });
  module.def("manual_seed_all", &simcard::manual_seed_all);
  module.def("current_device", &simcard::current_device);
  module.def("set_device", &simcard::set_current_device);
  module.def("num_devices", &simcard::num_devices);
  module.def("links", [](c10::intrusive_ptr<c10d::Backend> host) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<simcard::Links>(std::move(host));
  });
}
