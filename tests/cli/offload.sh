#!/bin/bash
# States in files and steps in backward, from the program: the same losses and checkpoints, what is
# printed, what is refused before anything begins, and that nothing stays behind. (RC-38: training,
# clipping and resuming with offload are those without.)
# ctest: timeout=300
set -u
. "$(dirname "$0")/checks.bash"
export OMP_WAIT_POLICY=PASSIVE

mkdir texts off
for i in 1 2 3 4 5 6 7 8 9; do
    echo "the cat sees a dog and the bird likes the old red cat but a small dog chases one bird $i"
done >texts/a
"$FSDP" prepare --out data --train-tokenizer 280 texts >out 2>err
check "data is prepared" is $? 0
cat >base.yaml <<'Y'
data: {dir: data}
model: {dim: 32, n_layers: 3, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, local_batch_size: 1, global_batch_size: 4, steps: 4}
lr_scheduler: {warmup_steps: 2, total_steps: 4}
job: {print_config: false}
metrics: {log_freq: 1}
Y
# run NAME ARGUMENTS: 2 ranks; losses and norms in NAME.losses.
run() {
    local name=$1
    shift
    "$FSDP" train -n 2 base.yaml --job.dump_folder "$name" "$@" >out 2>err
    code=$?
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
keep="--checkpoint.enable --checkpoint.interval 2"
files="--memory.offload file --optimizer.offload file --memory.offload_folder off --memory.offload_window 64K"
run memory $keep
check "in memory" is $code 0

# ---- files ----------------------------------------------------------------------------------------------
run file $keep $files
check "in files" is "$code" 0
check "the losses and norms" cmp memory.losses file.losses
for r in 0 1; do
    check "the checkpoint of rank $r" cmp memory/checkpoint/step-4/rank-0000$r-of-00002.safetensors \
        file/checkpoint/step-4/rank-0000$r-of-00002.safetensors
done
check "where they lie" has out '^offload: parameters and gradients in files in off$'
check "and the state" has out '^offload: optimizer state in files in off$'
check "the table" grep -qE '^in files +[0-9.]+ [KM]iB$' out
check "the waiting" grep -qE '^offload: [0-9.]+ GB read, waited [0-9.]+ s; [0-9.]+ GB written, waited [0-9.]+ s' out
check "nothing stays" is "$(ls -A off)" ""
run again $keep $files --training.steps 2
check "half of it" is "$code" 0
run again $keep $files
check "and the rest" is "$code" 0
check "the losses of a resumed run" cmp memory.losses again.losses
run own $files --memory.shared_gather false
check "own copies of gathered parameters" cmp memory.losses own.losses
run hybrid --parallelism.data_parallel_replicate_degree 2 $files
check "replicas" cmp memory.losses hybrid.losses
run state --optimizer.offload file --memory.offload_folder off
check "the state alone" cmp memory.losses state.losses
run cpu --training.enable_cpu_offload
check "to the CPU" cmp memory.losses cpu.losses
check "which is said" has out 'no effect: training.enable_cpu_offload: the device is the CPU'

# A rank that is killed leaves nothing either.
"$FSDP" train -n 2 base.yaml --job.dump_folder killed $files --training.steps 100000 >out 2>err &
pid=$!
until_true 60 test -s killed/metrics.jsonl
kill -9 $pid
wait $pid 2>/dev/null
until_true 20 test "$(ls -A off | wc -l)" = 0
check "nothing stays of a killed run" is "$(ls -A off)" ""

# ---- in backward ------------------------------------------------------------------------------------------
run late --training.max_norm 0
run early --training.max_norm 0 --optimizer.early_step_in_backward
check "steps in backward" is "$code" 0
sed 's/, "grad_norm[^,]*//' late.losses >a
sed 's/, "grad_norm[^,]*//' early.losses >b
check "the losses" cmp a b
check "are said" has out '^weights are updated during backward'
run early_file --training.max_norm 0 --optimizer.early_step_in_backward $files
sed 's/, "grad_norm[^,]*//' early_file.losses >b
check "in files as well" cmp a b
run blown --optimizer.lr 1e25 --training.max_norm 0 --training.steps 20 \
    --lr_scheduler.total_steps 20 --optimizer.early_step_in_backward
check "weights that blow up" is "$code" 1
check "a gradient that is not finite is not used" has err 'is not finite (in the shard of rank .* was not used'

# ---- refused -----------------------------------------------------------------------------------------------
# bad NAME TEXT ARGUMENTS
bad() {
    local name=$1 text=$2
    shift 2
    run wrong "$@"
    check "$name: exit code" is $code 1
    check "$name: what is said" has err "$text"
    check "$name: nothing is left" none wrong
}
E="--training.max_norm 0 --optimizer.early_step_in_backward"
bad "clipping" 'early_step_in_backward does not go together with training.max_norm' \
    --optimizer.early_step_in_backward
bad "a loss scale" 'early_step_in_backward does not go together with training.mixed_precision_param float16' \
    $E --training.mixed_precision_param float16
bad "skipping" 'early_step_in_backward does not go together with training.nonfinite skip' \
    $E --training.nonfinite skip
bad "sums of microbatches" 'early_step_in_backward does not go together with training.sync_each_microbatch' \
    $E --training.sync_each_microbatch
bad "no folder" 'memory.offload is file and memory.offload_folder is not set' --memory.offload file
bad "no folder for the state" 'optimizer.offload is file and memory.offload_folder is not set' \
    --optimizer.offload file
bad "a missing folder" "there is no folder 'nowhere'" $files --memory.offload_folder nowhere
bad "a folder that cannot be written" 'cannot make a file in the folder /proc/self' \
    $files --memory.offload_folder /proc/self
bad "two places" 'enable_cpu_offload puts all states into the host.s memory, and' \
    $files --training.enable_cpu_offload
(ulimit -f 1024 && "$FSDP" train base.yaml --job.dump_folder wrong $files --model.dim 64 \
    --model.ffn_dim 8192 >out 2>err)
check "a limit of file size" is "$? $(grep -c 'over the limit of file size' err)" "1 1"
check "a limit of file size: nothing is left" none wrong

# A small disk, where this user may make one: said before the first step, and nothing ends by a signal.
mkdir disk
if unshare -m mount -t tmpfs -o size=64k none disk 2>/dev/null; then
    export -f run
    export FSDP files
    FSDP_TEST_SMALL_DISK=$PWD/disk unshare -m bash -c 'mount -t tmpfs -o size=3m none disk
        run wrong $files --memory.offload_folder disk --model.dim 64 --model.ffn_dim 4096
        echo $code >code
        unit=$(dirname "$FSDP")/tests/unit/test_device_file
        [ -x "$unit" ] && "$unit" >unit 2>&1'
    check "a full disk" is "$(cat code)" 1
    check "is said" grep -q 'the folder disk has no room for .* more (.* are free).*No space' err
    check "before the first step" hasnt out '^step:'
    check "nothing is left" none wrong
    [ ! -f unit ] || check "blocks on a full disk" grep -q 'OK ] test_full_disk' unit
    check "a RAM disk is no disk" has err 'the folder disk is a RAM disk'
else
    echo "skip a full disk: no right to mount one"
fi
exit $failed
