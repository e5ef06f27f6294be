#!/usr/bin/env bash
# The kernels under sanitizers: `make sanitize`, or one part of it: tests/sanitize.sh memory, tests/sanitize.sh races.
# Everything is built in build/sanitize; the installed pairmix stays as it is.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
CXX=${CXX:-g++}
bin=$PWD/.venv/bin
build=$PWD/build/sanitize
csrc=src/pairmix/csrc
mkdir -p "$build/package/pairmix"

start() { part=$1 && printf '\n== %s\n' "$part"; }
passed() { printf '== passed: %s\n' "$part"; }
trap 'printf "== FAILED: %s\n" "$part"' ERR

build_with_address_sanitizer() {
  "$bin/cmake" -S . -B "$build/cmake" -DPAIRMIX_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_COMPILER="$CXX" -DPython_EXECUTABLE="$bin/python" \
    -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" > "$build/configure.log"
  "$bin/cmake" --build "$build/cmake"
  "$bin/python" -m venv --without-pip "$build/venv"
  cp -r src/pairmix/. "$build"/cmake/_kernels*.so "$build/package/pairmix"
}

# An empty environment, with the packages of .venv as a plain path: an import hook of .venv itself would bring in the
# installed kernels instead. Python frees not everything at its end, so leaks say nothing. Tests ask for more memory than
# there is, which must be an error of the kernels, not of the sanitizer.
with_sanitized_kernels() {
  local library libraries=""
  for library in libasan.so libubsan.so libstdc++.so; do libraries+="$("$CXX" -print-file-name=$library) "; done
  PYTHONPATH=$build/package:$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    LD_PRELOAD=$libraries ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    "$build/venv/bin/python" "$@"
}

# Vectors of 16 bytes: of longer ones clang's ThreadSanitizer sees no access at all.
build_with_thread_sanitizer() {
  local compiler=$1 sources=$2 program=$3
  "$compiler" -std=gnu++17 -O1 -g -fopenmp -fsanitize=thread -Wno-psabi -DPAIRMIX_TARGET=baseline \
    -DPAIRMIX_VECTOR_BYTES=16 -I"$sources" tests/native/threads.cpp "$sources"/{memory,caches,plan,kernel}.cpp -o "$build/$program"
}

# gcc's OpenMP library is invisible to ThreadSanitizer, which then sees races where there are barriers. Clang's explains
# itself to it, through the tool Archer.
with_three_threads_a_call() {
  ARCHER_OPTIONS=verbose=1 TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 "$build/$1" 3
}

memory() {
  start "memory and undefined behaviour: the tests of the kernels"
  build_with_address_sanitizer
  with_sanitized_kernels -c '
import torch
from pairmix import _kernels
assert "build/sanitize" in _kernels.__file__, _kernels.__file__'
  # AddressSanitizer keeps what was freed for a while, which looks like growing memory. The reference has no kernels to
  # watch. A worker that dies says why on its own output, which must not be captured.
  with_sanitized_kernels -m pytest -q -s -x --max-worker-restart=0 tests/ops/test_parity.py tests/ops/test_cpu.py \
    tests/ops/test_recurrence.py tests/ops/test_feed_forward.py tests/ops/test_border.py \
    -k 'not memory_does_not_grow and not reference'
  passed

  start "memory and undefined behaviour: random layers"
  with_sanitized_kernels tests/fuzz.py --count 1000
  passed
}

races() {
  if ! clang++ -fopenmp -fsyntax-only -include omp.h -x c++ /dev/null 2> /dev/null; then
    start "races: calls from many threads, each on one"
    build_with_thread_sanitizer "$CXX" $csrc threads
    TSAN_OPTIONS=halt_on_error=1 "$build/threads" 1
    passed
    echo "== NOT CHECKED: races between the OpenMP threads of one call, for which apt-get install clang libomp-dev"
    return
  fi
  start "races: calls from many threads, each on three threads of OpenMP"
  build_with_thread_sanitizer clang++ $csrc threads
  with_three_threads_a_call threads
  passed

  start "races: kernels without their barriers are caught"
  rm -rf "$build/without_barriers"
  cp -r $csrc "$build/without_barriers"
  sed -i '/#pragma omp barrier/d' "$build"/without_barriers/*.h
  build_with_thread_sanitizer clang++ "$build/without_barriers" threads_without_barriers
  with_three_threads_a_call threads_without_barriers > "$build/without_barriers.log" 2>&1 || true
  grep -q "ThreadSanitizer: data race" "$build/without_barriers.log"
  passed
}

[ $# -gt 0 ] || set -- memory races
for check; do "$check"; done
