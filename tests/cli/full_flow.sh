#!/bin/bash
# configs/full-flow.yaml, shortened: every part of it acts, a run that is stopped goes on with the same
# losses, and no option of it is without effect. And what is said of options that do nothing.
# ctest: timeout=300
set -u
. "$(dirname "$0")/checks.bash"
export OMP_WAIT_POLICY=PASSIVE
source=${FSDP_SOURCE:-$here/../..}

"$FSDP" prepare --out data --train-tokenizer 300 --validation 'BSD' /usr/share/common-licenses/BSD \
    /usr/share/common-licenses/GPL-2 >out 2>err
check "data is prepared" is $? 0
# run NAME ARGUMENTS: 4 ranks, a small part of its steps.
run() {
    local name=$1
    shift
    "$FSDP" train -n 4 "$source/configs/full-flow.yaml" --data.dir data --job.dump_folder "$name" \
        --training.seq_len 32 --training.steps 6 --lr_scheduler.warmup_steps 2 --checkpoint.interval 3 \
        --validation.freq 3 --validation.steps 2 --metrics.log_freq 1 --job.print_config false "$@" >out 2>err
    code=$?
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
run flow
check "the whole flow" is $code 0
check "hybrid mesh" has out '^mesh replicate 2 x shard 2$'
check "strategy" has out '^strategy: HYBRID_SHARD, 2 replicas of 2 shards'
check "two microbatches" has out '16 sequences a step: 4 ranks x 2 microbatches of at most 2'
check "mixed precision" has out 'computes in bfloat16, gradients travel in float32'
check "checkpoints" is "$(ls flow/checkpoint | tr '\n' ' ')" "step-3 step-6 "
check "a Hugging Face folder" test -f flow/hf/model.safetensors
check "validation" is "$(grep -c '^validate step: ' out)" 2
check "it learns" awk -F'[:,]' '/grad_norm/ { n++; if (n == 1) a = $4; b = $4 } END { exit !(b < a - 0.5) }' flow.losses
check "nothing in the file is without effect" hasnt out '^no effect'
check "norms have a group of their own" has out 'norm'

run held --activation_checkpoint.mode none
check "recomputing changes no bit" cmp flow.losses held.losses
peak() { grep '^activations' "$1" | tail -1 | awk '{ print $(NF-1) * ($NF == "MiB" ? 1024 : 1) }'; }
cp out held.out
run again
check "twice the same" cmp flow.losses again.losses
check "recomputing holds fewer activations" awk -v a="$(peak out)" -v b="$(peak held.out)" 'BEGIN { exit !(a < 0.7 * b) }'
run flat --parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree 4
check "flat instead of hybrid: the same losses" cmp flow.losses flat.losses
run part --training.steps 3 --lr_scheduler.total_steps 6
run part
check "in two goes" is "$code $(grep -c 'going on from part/checkpoint/step-3' out)" "0 1"
check "resumed: the same losses" is "$(grep grad_norm flow.losses)" "$(grep grad_norm part.losses)"

# ---- options that do nothing --------------------------------------------------------------------------------
idle() { grep '^no effect' out | sed 's/^no effect: //'; }
run idle --training.steps 1 --lora.rank 4 --lr_scheduler.decay_ratio 0 --training.loss_scale 8
check "said, a line each" is "$(idle)" "lr_scheduler.decay_type: the schedule does not decay: decay_ratio is 0, or the warm-up takes all of it
lr_scheduler.min_lr_factor: the schedule does not decay: decay_ratio is 0, or the warm-up takes all of it
lora.rank: lora.enable is off
training.loss_scale: training.mixed_precision_param is not float16"
"$FSDP" train "$source/configs/full-flow.yaml" --data.dir data --check \
    --parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree 1 >out 2>err
check "by --check too" is "$? $(idle)" "0 prefetch.limit: nothing is gathered: parallelism.data_parallel_shard_degree is 1"
"$FSDP" train -n 4 flow/config.yaml --check >out 2>err
check "not of a file that a run wrote" is "$? $(idle)" "0 "
for file in "$source"/configs/*.yaml; do
    case $file in */lora.yaml) folder="--model.hf_assets_path flow/hf --training.seq_len 32" ;; *) folder= ;; esac
    # shellcheck disable=SC2086
    "$FSDP" train -n 4 "$file" --data.dir data $folder --check >out 2>err
    check "$(basename "$file") is a valid file without idle options" is "$? $(idle)" "0 "
done

exit $failed
