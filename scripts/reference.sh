#!/bin/sh
# reference.sh: writes docs/reference.md anew from the option tables, with a built program.
#
#   scripts/reference.sh [program]      default: build/fsdp
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
program=${1:-$top/build/fsdp}
{
    printf '# Every option of `fsdp train`\n\n'
    printf 'Written from the option tables by `scripts/reference.sh`; a test fails when it is out of '
    printf 'date.\n\n'
    "$program" train --print-options
} > "$top/docs/reference.md.tmp"
mv "$top/docs/reference.md.tmp" "$top/docs/reference.md"
