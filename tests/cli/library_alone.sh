#!/bin/bash
# library_alone.sh: libfsdp builds where none of the parts is that only the program needs.
# ctest: slow timeout=900
set -euo pipefail

if grep -q '^FSDP_SANITIZE:STRING=.' "$FSDP_BUILD/CMakeCache.txt"; then
    echo "once is enough: the release build's test does this"
    exit 77
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# Without pkg-config none of jansson, libfyaml, pcre2, utf8proc, libdeflate and xxhash is found.
cmake -G Ninja -S "$FSDP_SOURCE" -B "$tmp" -DCMAKE_BUILD_TYPE=Debug \
    -DPKG_CONFIG_EXECUTABLE=/bin/false -DFSDP_BUILD_TESTS=OFF >"$tmp/log"
grep -q 'part jansson.*not found' "$tmp/log"
cmake --build "$tmp" >"$tmp/build.log" || {
    tail -40 "$tmp/build.log"
    exit 1
}
test -e "$tmp/libfsdp.so"
if readelf -d "$tmp/libfsdp.so" | grep -E 'jansson|fyaml|pcre|utf8proc|deflate|xxhash'; then
    echo "libfsdp needs a library that it should not"
    exit 1
fi
