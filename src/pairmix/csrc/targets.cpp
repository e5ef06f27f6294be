#include "targets.h"

#include <atomic>
#include <stdexcept>

namespace pairmix {
namespace {

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> kernels;
#if defined(PAIRMIX_X86)  // CMakeLists.txt asks for every feature that it compiles a target with
  __builtin_cpu_init();
  if (PAIRMIX_CAN_RUN_AVX512) kernels.push_back(&kernels_avx512);
  if (PAIRMIX_CAN_RUN_AVX2) kernels.push_back(&kernels_avx2);
#endif
  kernels.push_back(&kernels_baseline);
  return kernels;
}

const std::vector<const Kernels*> kAvailable = runnable();
std::atomic<const Kernels*> chosen = kAvailable.front();

}  // namespace

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : kAvailable) names.emplace_back(kernels->name);
  return names;
}

const Kernels& chosen_target() { return *chosen.load(); }

void use_target(const std::string& name) {
  for (const Kernels* kernels : kAvailable)
    if (name == kernels->name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("this machine cannot run the target " + name);
}

}  // namespace pairmix
