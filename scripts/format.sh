#!/bin/sh
# format.sh: puts all sources in the form that tools/check_format asks for. Headers are laid out by
# hand: their tables are wider than clang-format's idea of them.
set -eu
cd "$(dirname "$0")/.."
for folder in src tests examples bench fuzz; do
    [ ! -d "$folder" ] || find "$folder" -name '*.c' -exec clang-format -i {} +
done
