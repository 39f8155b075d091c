#!/bin/bash
# The demo shows what the README says of it: a model that beats the bigram model, a finished run that
# says so, a folder that generates, and a limit at which replicas do not fit and shards do.
# ctest: long serial timeout=900
set -u
: "${FSDP_SOURCE:?names the source}"
out=$(mktemp)
trap 'rm -f "$out"' EXIT
cd / || exit 1 # from any folder
"$FSDP_SOURCE/scripts/demo.sh" >"$out" 2>&1
code=$?
failed=0
need() { grep -q -- "$1" "$out" || { echo "FAIL the demo does not show: $1"; failed=1; }; }
[ $code -eq 0 ] || { echo "FAIL exit code $code"; failed=1; }
need '^step: *400 .*loss:.*grad_norm:.*memory:.*tps:.*tflops:.*mfu: N/A'
need 'is finished: 400 steps'
need 'model saved as Hugging Face folder'
need 'memory.limit is .* a rank, and this layout needs'
need 'full-shard'
sed -n 's/^validation loss \([0-9.]*\) nats.*text: \([0-9.]*\)$/\1 \2/p' "$out" |
    awk '{ n++; if ($1 >= $2) bad = 1 } END { exit n < 1 || bad }' ||
    { echo "FAIL the validation loss is not below the bigram model's"; failed=1; }
[ $failed -eq 0 ] || tail -n 40 "$out"
exit $failed
