#!/bin/bash
# training.reproducible: losses, norms and weights of 20 steps are the same bytes on 1, 2, 4 and 8
# ranks, flat and hybrid; parallelism.gather_dtype int8 trains alike and moves fewer bytes.
# ctest: timeout=600
set -u
. "$(dirname "$0")/checks.bash"

mkdir texts
awk 'BEGIN { srand(1); split("the a one cat dog bird sees likes chases red small old and but", w)
    for (i = 0; i < 1500; i++) { k = int(rand() * 14) + 1
        printf "%s%s", w[k], (i % 9 == 8) ? ".\n" : " "; if (k < 4) printf "%s ", w[4 + int(rand() * 3)] } }' >texts/a
cp texts/a texts/valid
"$FSDP" prepare --out data --train-tokenizer 300 --validation valid texts >out 2>err
check "data is prepared" is $? 0

cat >tiny.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 48, tied: true}
training: {seq_len: 16, local_batch_size: 2, global_batch_size: 12, steps: 20, reproducible: true}
optimizer: {lr: 0.01}
lr_scheduler: {warmup_steps: 2}
metrics: {log_freq: 1}
checkpoint: {last_save_in_hf: true}
job: {print_config: false}
X
# run NAME ARGUMENTS: a run in folder NAME; its losses and norms in NAME.losses.
run() {
    local name=$1
    shift
    "$FSDP" train tiny.yaml --job.dump_folder "$name" "$@" >out 2>err
    code=$?
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
differs() { ! cmp -s "$1" "$2"; }
within() { awk -v a="$1" -v b="$2" -v most="$3" 'BEGIN { d = a / b - 1; exit !(d < most && d > -most) }'; }
# same NAME TEXT: the run NAME has the numbers of the run "one".
same() {
    check "$2" is "$code" 0
    check "$2: losses and norms" cmp one.losses "$1.losses"
    check "$2: weights" cmp one/hf/model.safetensors "$1/hf/model.safetensors"
}

# Six microbatches: a rank of four has two or none, of eight one or none.
run one -n 1 --threads 1
check "one rank" is "$code" 0
check "as many JSON lines as steps" is "$(wc -l <one.losses)" 20
run two -n 2
same two "two ranks"
run four -n 4
same four "four ranks"
run eight -n 8
same eight "eight ranks"
run hybrid -n 4 --parallelism.data_parallel_replicate_degree 2
same hybrid "2 x 2"
run copies -n 2 --parallelism.data_parallel_replicate_degree 2 --memory.shared_gather false
same copies "two replicas"
run otherwise -n 2 --training.reproducible false
check "without it the ranks are seen" differs one.losses otherwise.losses

run three -n 3
check "three ranks are refused" is "$code" 1
check "and why" grep -q "training.reproducible with 3 ranks" err
run half -n 1 --training.mixed_precision_reduce bfloat16
check "sums below float32 are refused" grep -q "set training.mixed_precision_reduce" err
run each -n 1 --training.sync_each_microbatch
check "a sum a microbatch is refused" grep -q "training.sync_each_microbatch at once" err

# ---- int8 ----------------------------------------------------------------------------------------
run int8 -n 1 --parallelism.gather_dtype int8
cp one.losses exact.losses
cp int8.losses one.losses
cp int8/hf/model.safetensors one/hf/model.safetensors
check "int8 is seen" differs one.losses exact.losses
run eight8 -n 4 --parallelism.gather_dtype int8
same eight8 "int8 on four ranks as on one"
last() { tail -1 "$1" | sed 's/.*"loss": *\([0-9.]*\).*/\1/'; }
check "its loss is near" within "$(last int8.losses)" "$(last exact.losses)" 0.03

exit $failed
