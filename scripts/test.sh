#!/bin/bash
# test.sh: installs what is missing, builds, and runs the tests.
#
#   scripts/test.sh           release build, all tests, both sanitizer builds, the source's checks
#   scripts/test.sh --quick   release build and its tests that are not slow: under two minutes
#   scripts/test.sh --long    all of the first, and the tests that take long
#
# The program is build/fsdp afterwards. The last thing printed is CTest's summary of everything.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

mode=default
case ${1:-} in
"") ;;
--quick) mode=quick ;;
--long) mode=long ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

jobs=$(nproc)
say() { printf '\n== %s\n' "$*"; }

say "packages"
sh scripts/install_deps.sh

# Configures and builds one preset.
build() {
    local preset=$1
    say "build: $preset"
    cmake --preset "$preset" -DFSDP_WERROR=ON >"build/$preset.configure.log" 2>&1 || {
        cat "build/$preset.configure.log"
        return 1
    }
    grep -E '^-- (part|room|test) ' "build/$preset.configure.log" || true
    cmake --build --preset "$preset" -j "$jobs"
}

mkdir -p build
build release

if [ "$mode" = quick ]; then
    say "tests: release, those that are not slow"
    exec ctest --preset release -j "$jobs" -LE 'slow|long' --no-tests=error
fi

build asan
build tsan

# One run over the three builds, so that there is one summary. The sanitizers' tests have the
# build's name in front.
mkdir -p build/all
echo 'subdirs(".." "../asan" "../tsan")' >build/all/CTestTestfile.cmake
skip=(-LE long)
[ "$mode" = long ] && skip=()
say "tests: release, address and undefined-behaviour sanitizers, thread sanitizer"
exec ctest --test-dir build/all -j "$jobs" "${skip[@]}" --output-on-failure --no-tests=error
