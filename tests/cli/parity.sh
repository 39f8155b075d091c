#!/bin/bash
# fsdp parity: every model and every FSDP2 run on 1, 2, 3, 4 and 8 ranks, each strategy, and exit
# codes. With a sanitizer the slowest part is taken down to three models on 3 ranks.
# ctest: slow timeout=300
set -u
: "${FSDP:?names the program under test}" "${FSDP_TEST_DATA:?names the folder of data}"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0
unset RANK WORLD_SIZE LOCAL_RANK
data=$FSDP_TEST_DATA

# parity CODE NAME WORDS...: the command must exit with CODE.
parity() {
    local want=$1 name=$2 code
    shift 2
    "$FSDP" parity "$@" >"$dir/out" 2>"$dir/err"
    code=$?
    [ $code = "$want" ] && return
    echo "FAIL $name: exit code $code, expected $want"
    sed 's/^/     /' "$dir/out" "$dir/err"
    failed=1
}
has() { grep -q -- "$2" "$dir/$1" || { echo "FAIL: $1 lacks '$2'"; cat "$dir/$1"; failed=1; }; }

models=$(ls "$data/models")
ranks="1 2 3 4 8"
[ -n "${ASAN_OPTIONS:-}" ] && models="llama-tied qwen3 gpt2" && ranks=3
for n in $ranks; do
    for m in $models; do
        parity 0 "$m on $n" "$data/models/$m" -n $n --threads 1
        has out "all within their bounds"
    done
    for run in "$data"/fsdp2/*; do
        m=$(sed -n 's/^ "model": "\(.*\)",$/\1/p' "$run/run.json")
        parity 0 "${run##*/} on $n" "$run" --model "$data/models/$m" -n $n --threads 1
    done
done
for s in grad_op none; do
    parity 0 "llama, $s" "$data/models/llama" -n 4 --threads 1 --strategy $s
    parity 0 "fs2-acc4, $s" "$data/fsdp2/fs2-acc4" "--model=$data/models/llama" -n 2 --strategy=$s
done
parity 0 "two threads" "$data/models/gpt2" --threads 2

parity 1 "beyond its bound" "$data/models/llama" -n 2 --tolerance 1e-6
has out "BEYOND ITS BOUND"
parity 1 "no folder of that name" "$dir/nowhere"
has err "nothing to compare"
parity 1 "weights of another model" "$data/fsdp2/fs4" --model "$data/models-v4/llama" -n 2
has err "model.safetensors"
parity 2 "no folder"
parity 2 "two folders" a b
parity 2 "unknown option" "$data/models/llama" --fast
parity 2 "tolerance of 0" "$data/models/llama" --tolerance 0
parity 2 "unknown strategy" "$data/models/llama" --strategy some
has err "full, grad_op or none"
parity 0 "help" --help
has out "--tolerance K"
[ $failed = 0 ] && echo "parity holds"
exit $failed
