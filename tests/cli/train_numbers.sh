#!/bin/bash
# fsdp train, where numbers come from: parameter groups, accumulation, fp16 and its loss scale, the
# moving average, what is not finite. Nothing depends on how fast the machine is. (RC-26: what is not
# finite; RC-30: the rate is a function of the step on any number of ranks.)
# ctest: timeout=600
set -u
. "$(dirname "$0")/checks.bash"
. "$here/tiny.bash"

mkdir texts
text 1 1500 >texts/a
head -c 2000 texts/a >texts/valid
"$FSDP" prepare --out data --train-tokenizer 300 --validation valid texts >out 2>err
check "data is prepared" is $? 0

cat >tiny.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 4, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, local_batch_size: 2, global_batch_size: 8, steps: 6}
optimizer: {lr: 0.01}
lr_scheduler: {warmup_steps: 2, total_steps: 6}
metrics: {log_freq: 1}
job: {print_config: false}
X
rates() { sed 's/.*"lr": //' "$1.losses"; }
# near A B: the numbers of the losses differ by less than 1e-4 of themselves.
near() {
    paste -d' ' "$1.losses" "$2.losses" | awk '{ gsub(/[",:{]/, " ")
        n = NF / 2; for (i = 1; i <= n; i++) { a = $i; b = $(i + n); d = a - b
            if (d < 0) d = -d; if (d > 1e-4 * (a < 0 ? -a : a)) bad = 1 } } END { exit bad }'
}

# ---- the learning rate is a function of the step, on any number of ranks ------------------------
run one -n 1 --threads 1
run two -n 2
check "the global batch is the setting" grep -q \
    '^8 sequences a step: 2 ranks x 2 microbatches of at most 2; the loss is divided by the valid tokens of the step, 128$' out
run four -n 4
check "fewer microbatches on more ranks" grep -q '^8 sequences a step: 4 ranks x 1 microbatches' out
check "rates of one and two ranks" is "$(rates one)" "$(rates two)"
check "rates of one and four ranks" is "$(rates one)" "$(rates four)"
check "six of them" is "$(rates one | wc -l)" 6

run longer -n 2 --checkpoint.enable --training.steps 3 --lr_scheduler.total_steps 0
run longer -n 2 --checkpoint.enable --lr_scheduler.total_steps 0
check "a schedule of another length" is "$code" 1
check "is named, with both rates" grep -q \
    'warm-up 2 of 3 steps then, 2 of 6 now): the rate of step 4 would be 0.0075 instead of 0' err out
run longer -n 2 --checkpoint.enable --lr_scheduler.total_steps 0 --lr_scheduler.allow_change
check "and can be allowed" is "$code" 0
check "which is said" grep -q \
    'another learning rate schedule from here on: 0.0075 instead of 0 in step 4' out

# ---- accumulation -------------------------------------------------------------------------------
run each -n 2 --training.sync_each_microbatch
check "sums after each microbatch" is "$code" 0
check "the same but for rounding" near two each
run each4 -n 2 --training.sync_each_microbatch --training.local_batch_size 1
run late4 -n 2 --training.local_batch_size 1
check "four microbatches, either way" near late4 each4

hybrid='--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2
    --training.local_batch_size 1'
run hybrid -n 4 $hybrid
run hybrid-each -n 4 $hybrid --training.sync_each_microbatch
check "two replicas, either way" near hybrid hybrid-each
check "and they are those of four ranks" near hybrid four

# ---- parameter groups -----------------------------------------------------------------------------
cat >groups.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 4, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, local_batch_size: 2, global_batch_size: 8, steps: 6}
optimizer:
  lr: 0.01
  param_groups:
    - pattern: "*norm*"
      weight_decay: 0
    - {pattern: "*.embed_tokens.*|lm_head.*", lr: 0.005}
lr_scheduler: {warmup_steps: 2, total_steps: 6}
metrics: {log_freq: 1}
checkpoint: {enable: true, interval: 3}
job: {print_config: false}
X
"$FSDP" train groups.yaml --job.dump_folder groups -n 2 >out 2>err
check "groups" is $? 0
check "the table of groups" grep -qE '^\*norm\* +9 +288 +1 +0 ' out
check "a rate of its own" grep -qE '^\*\.embed_tokens\.\*\|lm_head\.\* +2 +[0-9]+ +0\.5 +0\.1 ' out
check "all others" grep -qE '^\(all others\) +28 ' out
"$FSDP" train groups.yaml --job.dump_folder half -n 2 --training.steps 3 >out 2>err
"$FSDP" train groups.yaml --job.dump_folder half -n 4 >out 2>err
check "groups go on from a checkpoint" \
    is "$(tail -1 half/metrics.jsonl | sed 's/, "memory.*//')" \
    "$(tail -1 groups/metrics.jsonl | sed 's/, "memory.*//')"
run group-typo -n 2 --optimizer.param_groups '[{pattern: "*nrom*", weight_decay: 0}]'
check "a pattern that takes nothing" is "$code" 1
check "is named" grep -q 'parameter group "\*nrom\*" takes no trainable parameter' err out

# ---- fp16 -----------------------------------------------------------------------------------------
run f16 -n 2 --training.mixed_precision_param float16
check "fp16" is "$code" 0
check "the dtypes are said" grep -q \
    '^weights, optimizer state: float32; gathered and computed: float16; ' out
check "fp16 is near bf16" is "$(sed -n '6s/.*"loss": \([0-9.]\{3\}\).*/\1/p' f16.losses)" \
    "$(sed -n '6s/.*"loss": \([0-9.]\{3\}\).*/\1/p' two.losses)"
over='--training.mixed_precision_param float16 --training.loss_scale 1e7 --training.steps 12
    --training.loss_scale_interval 5 --lr_scheduler.total_steps 12'
run over -n 2 $over
check "a loss scale that is too large" is "$code" 0
check "steps are left out, and the scale is halved" grep -q \
    '^step 1 left out: fp16 gradients overflowed; loss scale 1e+07 -> 5e+06' out
grep 'left out' out >over.out
run over4 -n 4 $over
check "the same decisions on four ranks" is "$(grep 'left out' out)" "$(cat over.out)"
run over-half -n 2 $over --checkpoint.enable --training.steps 7
run over-half -n 2 $over --checkpoint.enable
check "a loss scale goes on from a checkpoint" cmp over-half.losses over.losses
run over-all -n 2 --training.mixed_precision_param float16 --training.loss_scale 1e20 \
    --training.nonfinite_max_skips 3
check "no end of overflows" is "$code" 1
check "is said" grep -q 'step 4 is the 4th in a row' err out

# ---- what is not finite ---------------------------------------------------------------------------
run nan -n 4 --debug.inject_nonfinite forward:3:3:0:model.layers.2
check "a NaN in forward stops the run" is "$code" 1
check "rank, microbatch, samples and layer" grep -q \
    'step 3: the loss of rank 3, microbatch 0 (samples 22, 23) is nan: first in the output of model.layers.2; no weight was changed' \
    err out
for n in 1 2; do
    run nan-back-$n -n $n --debug.inject_nonfinite backward:$((n - 1)):3:1:model.layers.2
    check "a NaN in backward stops $n ranks" is "$code" 1
    check "$n ranks: whose, which microbatch, where" grep -qE \
        "step 3: the gradient norm is nan: first in rank $((n - 1)), microbatch 1 \(samples [0-9, ]+\), in the gradient of model.layers.2.mlp.down_proj.weight; no weight" \
        err out
done
run skip2 -n 2 --training.nonfinite skip --debug.inject_nonfinite backward:1:3:1:model.layers.1
check "a step is left out" is "$code" 0
check "and counted" grep -q '^step 3 left out (1 so far): the gradient norm is nan' out
run skip4 -n 4 --training.nonfinite skip --debug.inject_nonfinite forward:1:3:0:model.layers.0
check "four ranks leave it out" is "$code" 0
# The same step was left out, so the same weights are there afterwards.
check "the weights are those of the other steps" is "$(tail -3 skip2.losses)" "$(tail -3 skip4.losses)"
check "JSON has no NaN" is "$(sed -n 3p skip4.losses | grep -c '"loss": null, "grad_norm": null')" 1
run skip-none -n 2 --training.nonfinite skip --training.nonfinite_max_skips 0 \
    --debug.inject_nonfinite forward:1:3:0:model.layers.0
check "none may be left out" is "$code" 1
run bad-injection -n 2 --debug.inject_nonfinite sideways:1:3
check "an injection that is none" grep -q 'expected forward or backward' err out
while read -r where text; do
    run bad-injection -n 2 --debug.inject_nonfinite "$where"
    check "$where is refused" is "$code" 1
    check "$where is explained" grep -q "$text" err out
done <<'X'
forward:9:1:0:model.layers.0 there is no rank 9; expected 0 to 1 in this run
forward:0:0:0:model.layers.0 there is no step 0; expected 1 to 6 in this run
forward:0:7:0:model.layers.0 there is no step 7; expected 1 to 6 in this run
backward:0:1:2:model.layers.0 there is no microbatch 2; expected 0 to 1 in this run
forward:1:2:1:lm_head step 2, microbatch 1 of rank 1 there was no call of its own of .* lm_head
backward:0:1:0:model.layers step 1, microbatch 0 of rank 0 there was no call of its own of .* model.layers,
X

# Steps in backward: what is not finite is not used, and no checkpoint is made of the rest.
early='--optimizer.early_step_in_backward true --training.max_norm 0 --checkpoint.enable
    --checkpoint.interval 1'
run early-all -n 2 $early
check "a norm that is not known" grep -qE '^step:  6  loss: .* grad_norm:     N/A  memory' out
check "is null" is "$(sed -n 6p early-all.losses | grep -c '"grad_norm": null')" 1
for n in 1 2; do
    run early-$n -n $n $early --debug.inject_nonfinite backward:$((n - 1)):3:0:model.layers.1
    check "steps in backward: a NaN stops $n ranks" is "$code" 1
    check "$n ranks: which parameter" grep -q \
        'step 3: the gradient of model.layers.1.* is not finite (in the shard of rank .*) and was not used; optimizer.early' \
        err out
    check "$n ranks: nothing of that step is saved" is "$(ls early-$n/checkpoint)" "$(printf 'step-1\nstep-2')"
done
run early-2 -n 2 $early
check "it goes on from the last checkpoint" is "$code" 0
check "with the same bits" is "$(tail -4 early-2.losses)" "$(tail -4 early-all.losses)"
run early-loss -n 2 $early --debug.inject_nonfinite forward:1:3:1:model.layers.1
check "a loss that is not finite changes nothing" grep -q \
    'first in the output of model.layers.1; no weight was changed. .* and optimizer.early_step_in_backward false' err out

# ---- replicas -------------------------------------------------------------------------------------
run replicas -n 4 --parallelism.data_parallel_replicate_degree 2 \
    --parallelism.data_parallel_shard_degree 2 --debug.check_replicas 1
check "replicas are compared, and are the same" is "$code" 0
check "that changes nothing" cmp replicas.losses four.losses

# ---- the moving average ----------------------------------------------------------------------------
ema='--training.ema_decay 0.9 --validation.enable --validation.freq 3'
run ema -n 4 $ema --validation.ema --checkpoint.last_save_in_hf --checkpoint.export_ema
check "a moving average" is "$code" 0
check "is exported beside the weights" is "$(ls ema/hf-ema)" "$(ls ema/hf)"
check "with other numbers" isnt "$(cksum <ema/hf-ema/model.safetensors)" \
    "$(cksum <ema/hf/model.safetensors)"
run ema-plain -n 4 $ema
check "training does not look at it" is "$(grep -v validation ema.losses)" \
    "$(grep -v validation ema-plain.losses)"
check "validation does" isnt "$(grep validation ema.losses)" "$(grep validation ema-plain.losses)"
run ema-half -n 4 $ema --validation.ema --checkpoint.enable --training.steps 3
run ema-half -n 2 $ema --validation.ema --checkpoint.enable --checkpoint.last_save_in_hf \
    --checkpoint.export_ema
check "it goes on from a checkpoint, to the bit" \
    is "$(cksum <ema-half/hf-ema/model.safetensors)" "$(cksum <ema/hf-ema/model.safetensors)"
run ema-half -n 2 --checkpoint.enable --training.steps 9
check "a checkpoint with an average and a run without" is "$code" 1
check "is named" grep -q 'it holds a moving average of the weights, and this run has none' err out
run ema-off -n 2 --validation.enable --validation.ema
check "an option without effect" grep -q 'validation.ema is set and training.ema_decay is 0' err out

exit $failed
