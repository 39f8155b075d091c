#!/bin/bash
# activation_checkpoint of fsdp train: losses and norms of every mode are those of none, what is kept
# and computed again is said, and so are mistakes.
# ctest: timeout=300
set -u
. "$(dirname "$0")/checks.bash"
awk 'BEGIN { srand(3); split("the a one cat dog bird sees likes chases red small old", w)
    for (i = 0; i < 1500; i++) printf "%s%s", w[int(rand() * 12) + 1], (i % 9 == 8) ? ".\n" : " " }' >text
"$FSDP" prepare --out data --train-tokenizer 300 text >out 2>err
check "data is prepared" is $? 0
cat >tiny.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 4, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 32, local_batch_size: 2, global_batch_size: 8, steps: 3}
metrics: {log_freq: 1}
job: {print_config: false}
X
run() {
    local name=$1
    shift
    "$FSDP" train tiny.yaml --job.dump_folder "$name" "$@" >"$name.out" 2>err
    code=$?
    cp "$name.out" out
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
ac=--activation_checkpoint
run none -n 2
check "none" is "$code" 0
check "none says nothing" hasnt none.out activation_checkpoint
run full -n 2 $ac.mode full
check "full" cmp none.losses full.losses
check "full says what is kept" grep -qE \
    '^activation_checkpoint full; 4 of 4 blocks recomputed in backward, [0-9.e+]+ FLOPs a microbatch, [0-9.]+ % of the model.s$' out
check "full keeps inputs alone" grep -qE '^  blocks 0 to 3: kept [0-9.]+ KiB: its input$' out
run second -n 2 $ac.mode selective
check "every second block" cmp none.losses second.losses
check "which blocks" has out '^  block 0: not recomputed'
check "every second is recomputed" has out '2 of 4 blocks recomputed'
run fifth -n 2 $ac.mode selective $ac.selective_ac_option 5
check "every fifth of four" cmp none.losses fifth.losses
check "is none, which is said" has out \
    "no effect: activation_checkpoint.mode: selective_ac_option 5 is more than the model's 4 blocks"
run op -n 2 $ac.mode selective $ac.selective_ac_option op
check "by op" cmp none.losses op.losses
check "the kept ops are named" has out \
    'blocks 0 to 3: kept .*: its input and the outputs of self_attn.q_proj, self_attn.v_proj, attention, mlp.gate_proj$'
run budget -n 2 $ac.mode memory_budget $ac.memory_budget 0.8
check "a budget" cmp none.losses budget.losses
check "a budget says what it found" grep -qE \
    '^activation_checkpoint memory_budget of 0.8: activations peak at .* without, at .* with all blocks recomputed, and at most at ' out
run whole -n 2 $ac.mode full --parallelism.fsdp_units model
run plain -n 2 --parallelism.fsdp_units model
check "one unit" cmp plain.losses whole.losses
run late -n 2 $ac.mode full $ac.early_stop false
check "to the end" cmp none.losses late.losses
run little -n 2 $ac.mode memory_budget $ac.memory_budget 0.02
check "too small a budget" is "$code" 1
check "too small a budget says what can be" grep -qE 'memory_budget is 0.02: .* raise it to 0\.[0-9]{2}' err
run wrong -n 1 $ac.selective_ac_option often
check "a wrong option" has err "expected op, or a number k from 1"
run wrong -n 1 $ac.mode some
check "a wrong mode" has err "expected none, full, selective or memory_budget"
run wrong -n 1 $ac.preserve_rng_state true
check "what is always so" has err "dropout is always replayed exactly"
"$FSDP" bench recompute -n 2 --batch 1 --seq 8 --steps 1 >out 2>err
check "the benchmark runs, with equal losses" is $? 0
check "the benchmark has each mode" is "$(grep -cE '^(none|selective 2|selective op|full) .*x.*%.*%$' out)" 4
exit $failed
