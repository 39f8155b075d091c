#!/bin/bash
# headers.sh: each public header stands alone, as strict C17 and C++17, and libfsdp exports what the
# headers declare, no more and no less.
set -euo pipefail

if grep -q '^FSDP_SANITIZE:STRING=.' "$FSDP_BUILD/CMakeCache.txt"; then
    echo "once is enough: the release build's test does this"
    exit 77
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
include=$FSDP_SOURCE/include
failed=0

for header in "$include"/fsdp/*.h; do
    name=$(basename "$header")
    echo "#include <fsdp/$name>" >"$tmp/one.c"
    cp "$tmp/one.c" "$tmp/one.cc"
    for compiler in "${CC:-cc} -std=c17 -Wstrict-prototypes $tmp/one.c" "${CXX:-c++} -std=c++17 $tmp/one.cc"; do
        # shellcheck disable=SC2086
        $compiler -fsyntax-only -pedantic -Wall -Wextra -Werror -I "$include" || {
            echo "FAIL $name: $compiler"
            failed=1
        }
    done
    # fsdp.h is the whole interface.
    [ "$name" = fsdp.h ] || grep -q "#include \"$name\"" "$include/fsdp/fsdp.h" || {
        echo "FAIL fsdp.h does not include $name"
        failed=1
    }
done

cat "$include"/fsdp/*.h | tr '\n' ' ' | grep -oE 'FSDP_API[^;]*;' | sed -E 's/ *\(.*//' |
    grep -oE 'fsdp_[a-z0-9_]+$' | sort -u >"$tmp/declared"
nm -D --defined-only "$FSDP_BUILD/libfsdp.so" | awk '{ print $3 }' | sed 's/@.*//' |
    sort -u >"$tmp/exported"
[ "$(wc -l <"$tmp/declared")" -gt 200 ] || {
    echo "FAIL only $(wc -l <"$tmp/declared") functions were found in the headers"
    failed=1
}
if ! diff "$tmp/declared" "$tmp/exported"; then
    echo "FAIL the headers (<) and libfsdp.so (>) differ"
    failed=1
fi
exit $failed
