// HCCL as c10d sees it, over gloo on the same memory. Collectives are done when the call returns; sends and receives
// are left under way, as pairs of them may cross.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <sstream>
#include <unordered_set>

#include "host_alias.h"

namespace {

using at::Tensor;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using Group = c10::intrusive_ptr<c10d::Backend>;
using Pending = c10::intrusive_ptr<c10d::Work>;

// A work that is done, or one of gloo's; its future holds the device's tensors, which DDP reads.
class Work : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, Tensors outputs, Pending pending)
      : c10d::Work(rank, type), outputs_(std::move(outputs)), pending_(std::move(pending)) {
    if (!pending_) finish();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (pending_) pending_->wait(timeout);
    finish();
    return true;
  }
  bool isCompleted() override { return !pending_ || pending_->isCompleted(); }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (pending_) wait(kNoTimeout);
    return future();
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future() {
    if (!future_) {
      std::vector<c10::Device> devices;
      for (const auto& each : outputs_)
        if (each.is_privateuseone()) {
          devices.push_back(each.device());
          break;
        }
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    }
    return future_;
  }
  void finish() {
    if (!future()->completed()) future()->markCompleted(c10::IValue(outputs_));
  }
  Tensors outputs_;
  Pending pending_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Hccl : public c10d::Backend {
 public:
  Hccl(Group gloo, c10::intrusive_ptr<c10d::Store> store, bool strict)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), store_(std::move(store)), strict_(strict) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    own_device(tensors[0]);
    auto host = down(tensors);
    gloo_->broadcast(host, options)->wait();
    return done(c10d::OpType::BROADCAST, tensors);
  }
  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    own_device(tensors[0]);
    for (auto& tensor : tensors) reduced(tensor, options.reduceOp, options.timeout);
    return done(c10d::OpType::ALLREDUCE, tensors);
  }
  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto copy = down(tensors[0]).clone();
    sum_up(copy, options.reduceOp, options.timeout);
    if (getRank() == options.rootRank) down(tensors[0]).copy_(copy);
    return done(c10d::OpType::REDUCE, tensors);
  }
  Pending allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> host;
    for (auto& each : outputs) host.push_back(down(each));
    auto given = down(inputs);
    gloo_->allgather(host, given, options)->wait();
    return done(c10d::OpType::ALLGATHER, outputs[0]);
  }
  Pending _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host = down(output), given = down(input);
    std::vector<Tensors> pieces{Tensors()};
    for (auto& piece : host.view({getSize(), -1}).unbind(0)) pieces[0].push_back(piece);
    Tensors flat{given.contiguous().view(-1)};
    gloo_->allgather(pieces, flat, options)->wait();
    return done(c10d::OpType::_ALLGATHER_BASE, {output});
  }
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs);
  }
  Pending gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> host;
    for (auto& each : outputs) host.push_back(down(each));
    auto given = down(inputs);
    gloo_->gather(host, given, options)->wait();
    return done(c10d::OpType::GATHER, outputs.empty() ? Tensors() : outputs[0]);
  }
  Pending scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> given;
    for (auto& each : inputs) given.push_back(down(each));
    auto host = down(outputs);
    gloo_->scatter(host, given, options)->wait();
    return done(c10d::OpType::SCATTER, outputs);
  }
  Pending reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto all = at::cat([&] {
        Tensors flat;
        for (auto& each : down(inputs[i])) flat.push_back(each.reshape(-1));
        return flat;
      }());
      sum_up(all, options.reduceOp, options.timeout);
      down(outputs[i]).copy_(all.view({getSize(), -1})[getRank()].view(outputs[i].sizes()));
    }
    return done(c10d::OpType::REDUCE_SCATTER, outputs);
  }
  Pending _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto all = down(input).clone(at::MemoryFormat::Contiguous);
    sum_up(all, options.reduceOp, options.timeout);
    down(output).copy_(all.view({getSize(), -1})[getRank()].view(output.sizes()));
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }
  Pending reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs);
  }
  Pending alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& of_output, std::vector<int64_t>& of_input,
                        const c10d::AllToAllOptions& options) override {
    auto host = down(output), given = down(input);
    gloo_->alltoall_base(host, given, of_output, of_input, options)->wait();
    return done(c10d::OpType::ALLTOALL_BASE, {output});
  }
  Pending alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> of_output, of_input;
    Tensors given;
    int64_t total = 0;
    for (auto& each : down(inputs)) given.push_back(each.reshape(-1)), of_input.push_back(each.numel());
    for (auto& each : down(outputs)) of_output.push_back(each.numel()), total += each.numel();
    auto sent = at::cat(given), received = at::empty({total}, sent.options());
    gloo_->alltoall_base(received, sent, of_output, of_input, options)->wait();
    auto pieces = received.split_with_sizes(of_output);
    for (size_t i = 0; i < outputs.size(); ++i) down(outputs[i]).copy_(pieces[i].view(outputs[i].sizes()));
    return done(c10d::OpType::ALLTOALL, outputs);
  }
  Pending send(Tensors& tensors, int to, int tag) override {
    auto host = down(tensors);
    return c10::make_intrusive<Work>(getRank(), c10d::OpType::SEND, tensors, gloo_->send(host, to, tag));
  }
  Pending recv(Tensors& tensors, int from, int tag) override {
    auto host = down(tensors);
    return c10::make_intrusive<Work>(getRank(), c10d::OpType::RECV, tensors, gloo_->recv(host, from, tag));
  }
  Pending batch_isend_irecv(std::vector<std::string> kinds, Tensors tensors, std::vector<int64_t> ranks) {
    std::vector<Pending> under_way;
    for (size_t i = 0; i < kinds.size(); ++i) {
      Tensors one{tensors[i]};
      const int other = static_cast<int>(ranks[i]);
      under_way.push_back(kinds[i] == "isend" ? send(one, other, 0) : recv(one, other, 0));
    }
    for (auto& each : under_way) each->wait();
    return done(c10d::OpType::COALESCED, tensors);
  }
  Pending barrier(const c10d::BarrierOptions& options) override {
    gloo_->barrier(options)->wait();
    return done(c10d::OpType::BARRIER, {});
  }

 private:
  // Every rank needs a device of its own; each says once which it is on, of which machine.
  void own_device(const Tensor& tensor) {
    if (said_ || !tensor.is_privateuseone()) return;
    said_ = true;
    const char* node = getenv("GROUP_RANK");
    const std::string mine = std::string(node ? node : "0") + ":" + physical(tensor.device().index());
    store_->set("device/" + std::to_string(getRank()), std::vector<uint8_t>(mine.begin(), mine.end()));
    for (int rank = 0; rank < getRank(); ++rank) {
      const auto told = store_->get("device/" + std::to_string(rank));
      TORCH_CHECK(std::string(told.begin(), told.end()) != mine, "simulated NPU: ranks ", rank, " and ", getRank(),
                  " are on one device (", tensor.device(), "), and HCCL wants one for each (source: the rank table of "
                  "HCCL's documentation; error EI0003 or a hang on hardware)");
    }
  }
  static std::string physical(int index) {
    const char* text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!text) return std::to_string(index);
    std::stringstream list(text);
    std::string id;
    for (int i = 0; i <= index && std::getline(list, id, ','); ++i) {}
    return id;
  }
  Tensor down(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_privateuseone(), "HCCL sends tensors of its devices, got one on ", tensor.device());
    static const std::unordered_set<at::ScalarType> taken = {
        at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool, at::kHalf, at::kFloat, at::kDouble,
        at::kBFloat16};
    TORCH_CHECK(taken.count(tensor.scalar_type()), "simulated NPU: HCCL has no data type for ", tensor.scalar_type(),
                " (source: HcclDataType in the wheel's hccl_types.h, and torch_npu's table of it)");
    return simulated_npu::host_alias(tensor);
  }
  Tensors down(const Tensors& tensors) {
    Tensors host;
    for (const auto& each : tensors) host.push_back(down(each));
    return host;
  }
  void reduced(const Tensor& tensor, const ReduceOp& op, std::chrono::milliseconds timeout) {
    auto host = down(tensor);
    sum_up(host, op, timeout);
  }
  void sum_up(Tensor& host, const ReduceOp& op, std::chrono::milliseconds timeout) {
    const bool average = op == ReduceOp::AVG;
    TORCH_CHECK(!strict_ || !(average || op == ReduceOp::PREMUL_SUM), "simulated NPU: HCCL reduces by ",
                average ? "AVG" : "PREMUL_SUM", " in software or not at all: sum, then divide (source: HcclReduceOp in "
                "the wheel's hccl_types.h has SUM, PROD, MAX and MIN)");
    c10d::AllreduceOptions options;
    options.reduceOp = average ? ReduceOp(ReduceOp::SUM) : op;
    options.timeout = timeout;
    auto all = host.is_contiguous() ? host : host.contiguous();
    Tensors one{all};
    gloo_->allreduce(one, options)->wait();
    if (!all.is_same(host)) host.copy_(all);
    if (average) host.div_(getSize());
  }
  Pending done(c10d::OpType type, Tensors outputs) {
    return c10::make_intrusive<Work>(getRank(), type, std::move(outputs), Pending());
  }

  Group gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  bool strict_, said_ = false;
};

}  // namespace

PYBIND11_MODULE(simulated_hccl, m) {
  py::module_::import("torch._C._distributed_c10d");
  // torch_npu asks its own backend for batch_isend_irecv, so Python has to know the class
  py::class_<Hccl, c10::intrusive_ptr<Hccl>, c10d::Backend>(m, "Hccl")
      .def(py::init([](const Group& gloo, const c10::intrusive_ptr<c10d::Store>& store, bool strict) {
        return c10::make_intrusive<Hccl>(gloo, store, strict);
      }))
      .def("batch_isend_irecv", &Hccl::batch_isend_irecv, py::call_guard<py::gil_scoped_release>());
}
