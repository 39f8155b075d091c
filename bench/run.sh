#!/bin/sh
# run.sh: all benchmarks, one after another; see README.md beside it.
#
#   bench/run.sh [folder for the results; bench/results]
#
# FSDP           the program (build/fsdp)
# RANKS, STEPS   of the training step (2 ranks, 8 steps)
# MODELS         of the training step (tiny small)
# PEER_PYTHON    a python with torch, and
# PEER_SCRIPT    a script that trains the same model and prints one JSON line with the keys of
#                `fsdp bench step`: it then runs in turn with ours, PAIRS times (5)
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/results}
FSDP=${FSDP:-$here/../build/fsdp}
RANKS=${RANKS:-2}
STEPS=${STEPS:-8}
MODELS=${MODELS:-tiny small}
PAIRS=${PAIRS:-5}
PEER_PYTHON=${PEER_PYTHON:-}
PEER_SCRIPT=${PEER_SCRIPT:-}

if [ ! -x "$FSDP" ]; then
    echo "run.sh: $FSDP is not there; build it first (scripts/test.sh), or name it by FSDP=" >&2
    exit 1
fi
if [ -n "$PEER_SCRIPT" ] && [ ! -x "$(command -v "$PEER_PYTHON")" ]; then
    echo "run.sh: PEER_SCRIPT is given, but PEER_PYTHON=$PEER_PYTHON is no program" >&2
    exit 1
fi
mkdir -p "$out" || exit 1
failed=0

# Runs a benchmark, shows it and keeps it in a file.
table() {
    file=$out/$1
    shift
    echo
    echo "== $*"
    "$@" > "$file" 2> "$file.err" || { failed=1; cat "$file.err"; }
    cat "$file"
}

# The median of one key over the JSON lines of a file.
median() {
    sed -n "s/.*\"$1\": \([-0-9.e+]*\).*/\1/p" "$2" | sort -g |
        awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)]; else print "none" }'
}

# One model and dtype: pairs of ours and the peer's, in turn.
step() {
    model=$1 dtype=$2 ours=$out/step_$1_$2.json peer=$out/peer_$1_$2.json
    : > "$ours"
    : > "$peer"
    pairs=1
    [ -n "$PEER_SCRIPT" ] && pairs=$PAIRS
    i=0
    while [ $i -lt "$pairs" ]; do
        i=$((i + 1))
        "$FSDP" bench step -n "$RANKS" --threads 1 --model "$model" --strategy full \
            --dtype "$dtype" --batch 2 --seq 512 --steps "$STEPS" >> "$ours" 2> "$ours.err" ||
            { failed=1; cat "$ours.err"; }
        [ -n "$PEER_SCRIPT" ] || continue
        "$PEER_PYTHON" "$PEER_SCRIPT" --ranks "$RANKS" --threads 1 --model "$model" \
            --strategy full --dtype "$dtype" --batch 2 --seq 512 --steps "$STEPS" \
            >> "$peer" 2> "$peer.err" || { failed=1; tail -5 "$peer.err"; }
    done
    rate=$(median tokens_per_s "$ours")
    line="$model $dtype: $rate tokens/s, step over floor $(median step_over_floor "$ours")"
    if [ -n "$PEER_SCRIPT" ]; then
        other=$(median tokens_per_s "$peer")
        ratio=$(echo "$rate $other" | awk '$2 > 0 { printf "%.2f", $1 / $2 }')
        line="$line; peer $other tokens/s, ratio ${ratio:-none} (medians of $pairs pairs)"
    fi
    echo "$line" | tee -a "$out/step.txt"
}

for threads in 1 2; do
    table "kernels_$threads.txt" "$FSDP" bench kernels --threads $threads
done
for dtype in f32 bf16; do
    table "gemm_$dtype.txt" "$FSDP" bench gemm -n "$RANKS" --threads 1 --dtype $dtype
done
table comm.txt "$FSDP" bench comm -n "$RANKS" --threads 1
echo
echo "== training step, $RANKS ranks of 1 thread, FULL_SHARD, batch 2 a rank, sequence 512"
: > "$out/step.txt"
for model in $MODELS; do
    for dtype in f32 bf16; do
        step "$model" "$dtype"
    done
done
exit $failed
