#!/bin/bash
# demo.sh: installs what is missing, builds, and shows the program on text that every Debian machine
# has: four processes train a language model of which each holds a quarter, the model continues a
# sentence, and the same training without sharding is refused for want of memory.
#
#   scripts/demo.sh             everything
#   scripts/demo.sh --quick     ten steps instead of all
#
# It may be run from any folder, and again: each run has a folder of its own under outputs/.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

steps=()
case ${1:-} in
"") ;;
--quick) steps=(--training.steps 10) ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

say() { printf '\n== %s\n' "$*"; }
# What runs is shown, so that it can be typed by hand.
show() {
    printf '$'
    printf ' %q' "$@"
    printf '\n'
}

say "packages"
sh scripts/install_deps.sh

say "build: build/fsdp, a minute or two the first time"
if [ ! -f build/build.ninja ]; then
    mkdir -p build
    cmake --preset release -DFSDP_WERROR=OFF >build/release.configure.log 2>&1 || {
        cat build/release.configure.log
        exit 1
    }
fi
cmake --build build --target fsdp -j "$(nproc)" -- --quiet
fsdp=build/fsdp

texts=/usr/share/common-licenses
data=outputs/licenses
say "data: $texts as tokens; the Mozilla licences are kept for validation"
if [ -f "$data/prepare.json" ]; then
    echo "$data is there already"
else
    prepare=("$fsdp" prepare --out "$data" --train-tokenizer 1024 --validation 'MPL*' "$texts")
    show "${prepare[@]}"
    "${prepare[@]}"
fi

# A folder that no other run has, also when two start in the same second.
mkdir -p outputs
n=1
until mkdir "outputs/demo-$n" 2>/dev/null; do n=$((n + 1)); done
run=outputs/demo-$n

say "training: four ranks, FULL_SHARD"
train=("$fsdp" train -n 4 configs/demo.yaml --job.dump_folder "$run" "${steps[@]}")
show "${train[@]}"
"${train[@]}"

say "the same command again: the run is finished"
train+=(--job.print_config false)
show "${train[@]}"
"${train[@]}"

say "what the model learned"
for prompt in "This License" "You may convey"; do
    show "$fsdp" generate "$run/hf" --prompt "$prompt" --tokens 40 --temperature 0.7 --top-p 0.9
    printf '%s' "$prompt"
    "$fsdp" generate "$run/hf" --prompt "$prompt" --tokens 40 --temperature 0.7 --top-p 0.9
done

# Between what a rank needs with its quarter and what it needs with all.
limit=22MiB
say "why one shards: $limit a rank, and every rank has the whole model (NO_SHARD)"
short=(--memory.limit "$limit" --training.steps 5 --job.print_config false
    --checkpoint.enable false --checkpoint.last_save_in_hf false --validation.enable false)
whole=("$fsdp" train -n 4 configs/demo.yaml --job.dump_folder "$run-no-shard" "${short[@]}"
    --job.description "the demo's model on four ranks, NO_SHARD" --parallelism.data_parallel_replicate_degree 4 --parallelism.data_parallel_shard_degree 1)
show "${whole[@]}"
if "${whole[@]}"; then
    echo "demo.sh: that should not have fitted" >&2
    exit 1
fi
echo "(refused before it began, as it should be)"

say "the same limit, and each rank has a quarter (FULL_SHARD)"
cut=("$fsdp" train -n 4 configs/demo.yaml --job.dump_folder "$run-full-shard" "${short[@]}"
    --job.description "the demo's model on four ranks, FULL_SHARD")
show "${cut[@]}"
"${cut[@]}"

say "done: the run is in $run, its model in $run/hf"
