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

bool is_ordinary(nb::handle object) {
  static const nb::object tensor = nb::module_::import_("torch").attr("Tensor");
  static const nb::object parameter = nb::module_::import_("torch").attr("nn").attr("Parameter");
  static const nb::object is_neg = nb::str("is_neg");
  if (object.is_none()) return true;
  if (!object.type().is(tensor) && !object.type().is(parameter)) return false;
  return !nb::cast<bool>(nb::steal(PyObject_CallMethodNoArgs(object.ptr(), is_neg.ptr())));
}

bool are_ordinary(nb::tuple objects) {
  for (const nb::handle object : objects)
    if (!is_ordinary(object)) return false;
  return true;
}

}  // namespace pairmix
