#!/bin/bash
# Which fields mean which strategy, what is printed of it, and the grain of units: the same losses,
# bytes as planned, warnings with the bytes of this model.
# ctest: timeout=300
set -u
. "$(dirname "$0")/checks.bash"
export OMP_WAIT_POLICY=PASSIVE

mkdir texts
for i in 1 2 3 4 5 6 7 8 9; do
    echo "the cat sees a dog and the bird likes the old red cat but a small dog chases one bird $i"
done >texts/a
"$FSDP" prepare --out data --train-tokenizer 280 texts >out 2>err
check "data is prepared" is $? 0
cat >base.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 4, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, local_batch_size: 1, global_batch_size: 4, steps: 3, mixed_precision_param: float32}
lr_scheduler: {warmup_steps: 2}
job: {print_config: false}
X
# run NAME ARGUMENTS: 4 ranks; losses and norms in NAME.losses.
run() {
    local name=$1
    shift
    rm -rf "$name"
    "$FSDP" train -n 4 base.yaml --job.dump_folder "$name" "$@" >out 2>err
    code=$?
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
R=--parallelism.data_parallel_replicate_degree
S=--parallelism.data_parallel_shard_degree
A=--parallelism.fsdp_reshard_after_forward
U=--parallelism.fsdp_units

# ---- names -------------------------------------------------------------------------------------------------
run full
check "FULL_SHARD" has out '^strategy: FULL_SHARD, 1 replica of 4 shards; gathered parameters are freed after forward but'
# named NAME TEXT ARGUMENTS
named() {
    local name=$1 text=$2
    shift 2
    run other "$@"
    check "$name" is "$code $(grep -c "^strategy: $text" out)" "0 1"
    check "$name: the losses" cmp full.losses other.losses
    check "$name: unsharded bytes as planned" grep -qE '^unsharded .* ([0-9.]+ [KMi]*B) +\1$' out
}
named "always" 'FULL_SHARD, .*; gathered parameters are freed after forward; ' $A always
named "FSDP2's True" 'FULL_SHARD, .*; gathered parameters are freed after forward; ' $A true
named "never" 'SHARD_GRAD_OP, .*; gathered parameters stay for backward; ' $A never
named "FSDP2's False" 'SHARD_GRAD_OP, ' $A false
named "a number" 'FULL_SHARD, .*; after forward gathered parameters are cut over 2 ranks; ' $A 2
named "all ranks" 'FULL_SHARD, .*; gathered parameters are freed after forward but for the root' $A 4
named "one rank" 'SHARD_GRAD_OP, ' $A 1
named "HYBRID_SHARD" 'HYBRID_SHARD, 2 replicas of 2 shards; gathered parameters are freed' $R 2 $S 2
named "hybrid ZeRO-2" 'hybrid ZeRO-2, 2 replicas of 2 shards; gathered parameters stay' $R 2 $S 2 $A never
check "the mesh" has out '^mesh replicate 2 x shard 2$'
check "its shard groups" grep -qE '^  shard groups: 0 1 \(.*\), 2 3 \(.*\); inside a host each$' out
check "its replicate groups" grep -qE '^  replicate groups: 0 2 \(.*\), 1 3 \(.*\); inside a host each$' out
run none $R 4
check "NO_SHARD" has out '^strategy: NO_SHARD, 4 replicas of 1 shard; every rank holds everything; computes in float32'
check "NO_SHARD: the losses" cmp full.losses none.losses
"$FSDP" train base.yaml --job.dump_folder alone >out 2>err
check "one rank alone" has out '^strategy: one rank, nothing is cut; computes in float32, units: block'

# Two hosts by name, ranks dealt to them in turns.
"$FSDP" run -n 4 bash -c 'export FSDP_HOST_ID=host$((RANK % 2)); exec "$0" train base.yaml --job.dump_folder turns \
    --parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2' "$FSDP" >out 2>err
check "a shard axis across hosts" has out 'shard groups: 0 1 (host0, host1), 2 3 (host0, host1); they cross hosts'
check "the mesh that would be right" has out 'Right would be replicate 2 x shard 2 over the ranks in the order 0 2 1 3'

# ---- the grain ------------------------------------------------------------------------------------------------
for units in linear model '*.mlp|*.self_attn' '*.layers.?|*.mlp' '*.embed_tokens'; do
    named "units: $units" "FULL_SHARD, .*units: $(printf %s "$units" | sed 's/[*.?|]/[&]/g')\$" $U "$units" $A always
done
run linear $U linear
check "linear is fine" grep -qE '^parallelism.fsdp_units linear is fine: 29 gathers a forward of [0-9.]+ KiB on average, and one below 64.00 KiB mostly waits .* with block it would be 5 of ' out
run model $U model
check "model is not fine" hasnt out 'is fine'
large="--model.dim 128 --model.ffn_dim 384 --model.n_layers 8"
run large $large
check "block in larger ones is neither" hasnt out 'fsdp_units .* is '
run large $large $U model
check "model is coarse there" grep -qE '^parallelism.fsdp_units model is coarse: of the model.s [0-9.]+ MiB 100 % are whole at once, with block it would be [0-9]+ % \([0-9.]+ MiB and [0-9.]+ [KM]iB a rank\)$' out
run large $large $U model $A never
check "not where all stay whole" hasnt out 'is coarse'
run large $large $U model $R 4
check "nor where nothing is cut" hasnt out 'is coarse'

# ---- mistakes -----------------------------------------------------------------------------------------------------
bad() {
    local name=$1 text=$2
    shift 2
    run wrong "$@"
    check "$name: exit code" isnt $code 0
    check "$name: what is said" has err "$text"
    check "$name: before any rank is started" is "$(grep -c . err)" 1
    check "$name: nothing is left" none wrong
}
bad "no such word" "fsdp_reshard_after_forward is 'sometimes'; expected default, always, never, or a number" $A sometimes
bad "no divisor" 'fsdp_reshard_after_forward is 3, which does not divide data_parallel_shard_degree 4; valid: 1, 2, 4' $A 3
bad "more than there are" 'valid: 1, 2, 4' $A 8
bad "no such units" "no module's name fits 'blocks'; expected block, linear, model, or a pattern.*'model.layers.0' is" $U blocks
bad "the head" "'lm_\*' takes lm_head, which is computed with its loss" $U 'lm_*'
bad "no units" 'parallelism.fsdp_units is empty' $U ''

exit $failed
