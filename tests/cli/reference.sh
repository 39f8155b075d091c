#!/bin/bash
# docs/reference.md is what the option tables say now.
set -eu
"$FSDP" train --print-options | diff -u <(tail -n +5 "$FSDP_SOURCE/docs/reference.md") - || {
    echo "docs/reference.md is out of date: run scripts/reference.sh"
    exit 1
}
