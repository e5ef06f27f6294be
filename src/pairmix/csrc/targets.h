// The builds of the kernels, one for each instruction set, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace pairmix {

// The names of those that this machine can run, the best first.
std::vector<std::string> targets();

const Kernels& chosen_target();

// Throws for a name that is not one of targets().
void use_target(const std::string& name);

}  // namespace pairmix
