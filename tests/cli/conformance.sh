#!/bin/bash
# docs/conformance.md is what tests/conformance/rows.def says now.
set -eu
table=$FSDP_BUILD/tests/conformance/conformance_table
[ -x "$table" ] || { echo "no conformance tests in this build"; exit 77; }
diff <(grep -E '^(\||## )' "$FSDP_SOURCE/docs/conformance.md") \
    <("$table" --markdown | grep -E '^(\||## )') || {
    echo "docs/conformance.md is out of date: run scripts/conformance.sh"
    exit 1
}
