#!/bin/bash
# A run whose states are four times a limit of memory: in a memory control group of that limit it ends
# well with the losses of a run in memory, which that limit kills.
# ctest: slow timeout=300
set -u
. "$(dirname "$0")/checks.bash"

if grep -q '^FSDP_SANITIZE:STRING=.' "$FSDP_BUILD/CMakeCache.txt"; then
    echo "skip a limit of memory: a sanitizer needs several times the program's own"
    exit 0
fi
# Without the right to make a control group the numbers are checked by accounts alone, in
# tests/dist/test_offload_window.c.
group=
v1=$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)
v2=$(sed -n 's/^0:://p' /proc/self/cgroup)
if [ -n "$v1" ] && mkdir "/sys/fs/cgroup/memory$v1/fsdp-test-$$" 2>/dev/null; then
    group=/sys/fs/cgroup/memory$v1/fsdp-test-$$
    limit=memory.limit_in_bytes
elif [ -n "$v2" ] && mkdir "/sys/fs/cgroup$v2/fsdp-test-$$" 2>/dev/null; then
    group=/sys/fs/cgroup$v2/fsdp-test-$$
    limit=memory.max
fi
if [ -z "$group" ] || [ ! -w "$group/$limit" ]; then
    echo "skip a control group of memory: none can be made below that of this test"
    [ -z "$group" ] || rmdir "$group"
    exit 0
fi
trap 'rmdir "$group"; rm -rf "$dir"' EXIT
case $(stat -f -c %T .) in
tmpfs | ramfs)
    echo "skip: the folder of the test is a RAM disk, whose files are memory"
    exit 0
    ;;
esac

mkdir texts off
for i in 1 2 3 4 5 6 7 8 9; do
    echo "the cat sees a dog and the bird likes the old red cat but a small dog chases one bird $i"
done >texts/a
"$FSDP" prepare --out data --train-tokenizer 280 texts >out 2>err
check "data is prepared" is $? 0
cat >base.yaml <<'Y'
data: {dir: data}
model: {dim: 384, n_layers: 10, n_heads: 8, ffn_dim: 1024}
training: {seq_len: 16, local_batch_size: 1, global_batch_size: 1, steps: 2, mixed_precision_param: float32}
lr_scheduler: {warmup_steps: 2}
job: {print_config: false}
metrics: {log_freq: 1}
memory: {offload_folder: off, offload_window: 16M}
Y
# limited NAME ARGUMENTS: one rank in the group.
limited() {
    local name=$1
    shift
    (
        echo "$BASHPID" >"$group/cgroup.procs"
        exec "$FSDP" train base.yaml --job.dump_folder "$name" "$@"
    ) >out 2>err
    code=$?
    sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses" 2>/dev/null
}
"$FSDP" train base.yaml --job.dump_folder memory >out 2>err
check "in memory" is $? 0
sed 's/, "memory.*//' memory/metrics.jsonl >memory.losses
states=$(($(sed -n 's/^\([0-9]*\) parameters, memory planned.*/\1/p' out) * 16))
echo $((states / 4)) >"$group/$limit"
limited file --memory.offload file --optimizer.offload file
check "states of four times the limit" is "$code" 0
check "the losses of the run in memory" cmp memory.losses file.losses
check "the wait is printed" grep -qE '^offload: [0-9.]+ GB read, waited [0-9.]+ s' out
limited killed
check "which the limit kills" isnt "$code" 0
exit $failed
