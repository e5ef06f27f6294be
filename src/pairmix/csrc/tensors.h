// PyTorch's tensors, read and made without its headers: through DLPack.
//
// PyTorch 2.10 and later hand out a table of C functions for this, which take tens of nanoseconds. Before that it goes
// through Python, with capsules.
#pragma once

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace pairmix {

namespace nb = nanobind;

// The table of C functions, if torch has one and it is in use.
const DLPackExchangeAPI* exchange_api();
// Returns whether there is one.
bool use_exchange_api(bool wanted);

// Whether it is None or a tensor proper: a subclass may stand for something else, and so do the numbers of a negated view.
bool is_ordinary(nb::handle object);
bool are_ordinary(nb::tuple objects);

// What the tensor is, for as long as it lives; capsules are kept alive here.
class TensorView {
 public:
  // One that cannot be read, such as a tensor without data, has no dtype that the kernels know.
  explicit TensorView(nb::handle object) : exists_(!object.is_none()) {
    tensor_.device.device_type = DLDeviceType(0);
    if (!exists_) return;
    if (const DLPackExchangeAPI* api = exchange_api()) {
      if (api->dltensor_from_py_object_no_sync(object.ptr(), &tensor_)) PyErr_Clear();
      return;
    }
    try {
      capsule_ = object.attr("detach")().attr("__dlpack__")();
      const void* managed = PyCapsule_GetPointer(capsule_.ptr(), "dltensor");
      if (managed) tensor_ = static_cast<const DLManagedTensor*>(managed)->dl_tensor;
    } catch (nb::python_error&) {
    }
    PyErr_Clear();
  }

  bool exists() const { return exists_; }
  void* data() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }
  int32_t dimensions() const { return tensor_.ndim; }
  int64_t size(int32_t dimension) const { return tensor_.shape[dimension]; }
  int64_t stride(int32_t dimension) const { return tensor_.strides ? tensor_.strides[dimension] : dense(dimension); }
  const int64_t* shape() const { return tensor_.shape; }

  // None if the kernels cannot read it.
  std::optional<Dtype> dtype() const {
    const auto [code, bits, lanes] = tensor_.dtype;
    if (tensor_.device.device_type != kDLCPU || lanes != 1 || is_freed()) return {};
    if (code == kDLFloat && bits == 32) return Dtype::float32;
    if (code == kDLFloat && bits == 64) return Dtype::float64;
    if (code == kDLBfloat && bits == 16) return Dtype::bfloat16;
    if (code == kDLFloat && bits == 16) return Dtype::float16;
    return {};
  }

  bool is_dense(const std::vector<int64_t>& shape) const {
    if (tensor_.ndim != static_cast<int32_t>(shape.size()) || !std::equal(shape.begin(), shape.end(), tensor_.shape))
      return false;
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;
    for (int32_t k = 0; k < tensor_.ndim; ++k)
      if (tensor_.shape[k] > 1 && stride(k) != dense(k)) return false;
    return true;
  }

 private:
  // Whether there should be numbers but there is no memory: the storage was shrunk.
  bool is_freed() const { return !tensor_.data && std::find(shape(), shape() + dimensions(), 0) == shape() + dimensions(); }

  int64_t dense(int32_t dimension) const {
    int64_t stride = 1;
    for (int32_t k = tensor_.ndim - 1; k > dimension; --k) stride *= tensor_.shape[k];
    return stride;
  }

  DLTensor tensor_{};
  bool exists_;
  nb::object capsule_;
};

// A new tensor, and where its numbers are. Its death gives the memory back to the pool.
struct NewTensor {
  nb::object object;
  void* data;
};

template <class Managed>
struct Owned : Managed {
  std::vector<int64_t> sizes;
  int64_t bytes;
};

inline int64_t bytes_of(const std::vector<int64_t>& sizes, int64_t bytes) {
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  for (const int64_t size : sizes)
    if (!is_empty && __builtin_mul_overflow(bytes, size, &bytes)) {
      std::string shape;
      for (const int64_t each : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(each);
      throw std::runtime_error("a result of shape (" + shape + ") has more bytes than can be counted");
    }
  return is_empty ? 0 : bytes;
}

template <class Managed>
Owned<Managed>* owned_memory(std::vector<int64_t> sizes, Dtype dtype) {
  static constexpr DLDataType types[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 16, 1}};
  auto owned = std::make_unique<Owned<Managed>>();
  owned->dl_tensor.dtype = types[static_cast<int>(dtype)];
  owned->dl_tensor.device = {kDLCPU, 0};
  owned->sizes = std::move(sizes);
  owned->dl_tensor.ndim = static_cast<int32_t>(owned->sizes.size());
  owned->dl_tensor.shape = owned->sizes.data();
  owned->bytes = bytes_of(owned->sizes, owned->dl_tensor.dtype.bits / 8);
  owned->dl_tensor.data = results_pool().take(owned->bytes);
  owned->deleter = [](Managed* self) {
    auto* all = static_cast<Owned<Managed>*>(self);
    results_pool().give_back(all->dl_tensor.data, all->bytes);
    delete all;
  };
  return owned.release();
}

inline NewTensor new_tensor(std::vector<int64_t> sizes, Dtype dtype) {
  if (const DLPackExchangeAPI* api = exchange_api()) {
    auto* owned = owned_memory<DLManagedTensorVersioned>(std::move(sizes), dtype);
    owned->version = {1, 0};
    void *data = owned->dl_tensor.data, *object;
    if (api->managed_tensor_to_py_object_no_sync(owned, &object)) throw nb::python_error();
    return {nb::steal(static_cast<PyObject*>(object)), data};
  }
  auto* owned = owned_memory<DLManagedTensor>(std::move(sizes), dtype);
  void* data = owned->dl_tensor.data;
  // A capsule that no tensor takes over would leak its memory; torch takes over the ones it is given.
  const nb::object capsule = nb::steal(PyCapsule_New(owned, "dltensor", nullptr));
  return {nb::module_::import_("torch.utils.dlpack").attr("from_dlpack")(capsule), data};
}

// The tensors that a call returns, in order; None for those that are not needed.
struct Results {
  nb::list objects;

  // Where its numbers are to be written; null if it is not needed.
  void* add(bool needed, std::vector<int64_t> shape, Dtype dtype) {
    if (!needed) {
      objects.append(nb::none());
      return nullptr;
    }
    NewTensor tensor = new_tensor(std::move(shape), dtype);
    objects.append(std::move(tensor.object));
    return tensor.data;
  }
};

}  // namespace pairmix
