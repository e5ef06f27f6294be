// PyTorch's tensors, read and made without its headers: through DLPack.
//
// PyTorch 2.10 and later hand out a table of C functions for this, which take tens of nanoseconds. Before that it goes
// through Python, with capsules.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

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
using DLTensor = nb::dlpack::dltensor;

// As the DLPack standard has them.
struct ManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  DLTensor tensor;
};
struct UnversionedManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(UnversionedManagedTensor*);
};
struct ExchangeApi {
  uint32_t major, minor;
  void *previous, *allocate, *to_managed_tensor;
  int (*to_object)(ManagedTensor*, void** object);
  int (*read)(void* object, DLTensor*);
  void* current_stream;
};

// What the tensor is, for as long as it lives; capsules are kept alive here.
class TensorView {
 public:
  // One that cannot be read, such as a tensor without data, has no dtype that the kernels know.
  TensorView(nb::handle object, const ExchangeApi* api) : exists_(!object.is_none()) {
    tensor_.device.device_type = -1;
    if (!exists_) return;
    if (api) {
      if (api->read(object.ptr(), &tensor_)) PyErr_Clear();
      return;
    }
    try {
      capsule_ = object.attr("detach")().attr("__dlpack__")();
      const void* managed = PyCapsule_GetPointer(capsule_.ptr(), "dltensor");
      if (managed) tensor_ = static_cast<const UnversionedManagedTensor*>(managed)->tensor;
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
    if (tensor_.device.device_type != nb::device::cpu::value || lanes != 1 || is_freed()) return {};
    if (code == kFloat && bits == 32) return Dtype::float32;
    if (code == kFloat && bits == 64) return Dtype::float64;
    if (code == kBFloat && bits == 16) return Dtype::bfloat16;
    if (code == kFloat && bits == 16) return Dtype::float16;
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

  static constexpr uint8_t kFloat = 2, kBFloat = 4;

 private:
  // Whether there should be numbers, and is no memory: somebody has shrunk its storage.
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
Owned<Managed>* owned_memory(Pool& pool, std::vector<int64_t> sizes, Dtype dtype) {
  static constexpr nb::dlpack::dtype types[] = {
      {TensorView::kFloat, 32, 1}, {TensorView::kFloat, 64, 1}, {TensorView::kBFloat, 16, 1}, {TensorView::kFloat, 16, 1}};
  auto owned = std::make_unique<Owned<Managed>>();
  owned->tensor.dtype = types[static_cast<int>(dtype)];
  owned->tensor.device = {nb::device::cpu::value, 0};
  owned->sizes = std::move(sizes);
  owned->tensor.ndim = static_cast<int32_t>(owned->sizes.size());
  owned->tensor.shape = owned->sizes.data();
  owned->bytes = bytes_of(owned->sizes, owned->tensor.dtype.bits / 8);
  owned->tensor.data = pool.take(owned->bytes);
  owned->context = &pool;
  owned->deleter = [](Managed* self) {
    auto* all = static_cast<Owned<Managed>*>(self);
    static_cast<Pool*>(all->context)->give_back(all->tensor.data, all->bytes);
    delete all;
  };
  return owned.release();
}

inline NewTensor new_tensor(Pool& pool, std::vector<int64_t> sizes, Dtype dtype, const ExchangeApi* api) {
  if (api) {
    auto* owned = owned_memory<ManagedTensor>(pool, std::move(sizes), dtype);
    owned->major = 1, owned->minor = 0;
    void *data = owned->tensor.data, *object;
    if (api->to_object(owned, &object)) throw nb::python_error();
    return {nb::steal(static_cast<PyObject*>(object)), data};
  }
  auto* owned = owned_memory<UnversionedManagedTensor>(pool, std::move(sizes), dtype);
  void* data = owned->tensor.data;
  // A capsule that no tensor takes over would leak its memory; torch takes over the ones it is given.
  const nb::object capsule = nb::steal(PyCapsule_New(owned, "dltensor", nullptr));
  return {nb::module_::import_("torch.utils.dlpack").attr("from_dlpack")(capsule), data};
}

}  // namespace pairmix
