#!/usr/bin/env bash
# The kernels under sanitizers: `make sanitize`. Everything is built in build/sanitize; the installed pairmix stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/sanitize
bin=$PWD/.venv/bin
CXX=${CXX:-c++}
mkdir -p $build

part() { printf '\n== %s\n' "$1"; }

build_with_address_sanitizer() {
  "$bin/cmake" -S . -B $build/cmake -DPAIRMIX_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_COMPILER="$CXX" -DPython_EXECUTABLE="$bin/python" -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)"
  "$bin/cmake" --build $build/cmake
  mkdir -p $build/package/pairmix
  cp -r src/pairmix/. $build/cmake/_kernels*.so $build/package/pairmix
}

# Python outside of .venv, with the packages of .venv on its path: there the editable install has no import hook that would
# bring in the other build.
with_sanitized_kernels() {
  local packages
  packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Python does not free all it has at exit. Torch's libraries throw exceptions, which libstdc++ must be loaded for.
  LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so) $("$CXX" -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    PYTHONPATH="$PWD/$build/package:$packages" \
    "$("$bin/python" -c 'import sys; print(sys._base_executable)')" "$@"
}

part "building the kernels with AddressSanitizer and UndefinedBehaviorSanitizer"
build_with_address_sanitizer
with_sanitized_kernels -c 'import torch; from pairmix import _kernels; print(_kernels.__file__)'
