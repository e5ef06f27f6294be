#include "tensors.h"

namespace pairmix {
namespace {

const DLPackExchangeAPI* in_use = nullptr;

}  // namespace

const DLPackExchangeAPI* exchange_api() { return in_use; }

bool use_exchange_api(bool wanted) {
  in_use = nullptr;
  const nb::object capsule = nb::getattr(nb::module_::import_("torch").attr("Tensor"), "__dlpack_c_exchange_api__", nb::none());
  if (!wanted || capsule.is_none()) return false;
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw nb::python_error();
  if (api->header.version.major == 1 && api->dltensor_from_py_object_no_sync) in_use = api;
  return in_use != nullptr;
}

}  // namespace pairmix
