#!/bin/bash
# install.sh: what cmake --install puts down can be used by pkg-config and by find_package(fsdp),
# and libfsdp exports its public names alone.
set -euo pipefail

if grep -q '^FSDP_SANITIZE:STRING=.' "$FSDP_BUILD/CMakeCache.txt"; then
    echo "a sanitized library is not for installing"
    exit 77
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

cmake --install "$FSDP_BUILD" --prefix "$tmp/prefix" >/dev/null
library=$(find "$tmp/prefix" -name libfsdp.so)
libdir=$(dirname "$library")
test -x "$tmp/prefix/bin/fsdp"
readelf -d "$library" | grep -q 'SONAME.*libfsdp.so.0'
if nm -D --defined-only "$library" | awk '{ print $3 }' | grep -vE '^fsdp_[a-z0-9]'; then
    echo "libfsdp exports names that are not public"
    exit 1
fi

mkdir "$tmp/user"
cat >"$tmp/user/user.c" <<'END'
#include <fsdp/fsdp.h>
int main(void)
{
    return fsdp_error() != FSDP_OK || fsdp_world_size() != 1;
}
END
cat >"$tmp/user/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(user C)
find_package(fsdp REQUIRED)
add_executable(user user.c)
target_link_libraries(user fsdp::fsdp)
END

# shellcheck disable=SC2046
cc "$tmp/user/user.c" -o "$tmp/user/by_pkg_config" -Wl,-rpath,"$libdir" \
    $(PKG_CONFIG_PATH="$libdir/pkgconfig" pkg-config --cflags --libs fsdp)
"$tmp/user/by_pkg_config"

cmake -S "$tmp/user" -B "$tmp/user/build" -DCMAKE_PREFIX_PATH="$tmp/prefix" >/dev/null
cmake --build "$tmp/user/build" >/dev/null
"$tmp/user/build/user"
