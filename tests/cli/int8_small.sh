#!/bin/bash
# Gathers in int8 train like gathers in bfloat16: `small` for 200 steps, every logged loss within 1 %,
# with the tokens a second of both beside each other.
# ctest: long serial timeout=1800
set -u
. "$(dirname "$0")/checks.bash"

"$FSDP" prepare --out data --train-tokenizer 1024 --validation 'MPL*' /usr/share/common-licenses \
    >out 2>err
check "data is prepared" is $? 0

run() {
    "$FSDP" train -n 2 --data.dir data --model.flavor small --training.seq_len 256 \
        --training.local_batch_size 2 --training.global_batch_size 4 --training.steps 200 \
        --training.mixed_precision_param bfloat16 --optimizer.lr 3e-4 --lr_scheduler.warmup_steps 20 \
        --metrics.log_freq 10 --parallelism.fsdp_reshard_after_forward always \
        --parallelism.gather_dtype "$1" --job.dump_folder "$1" >out 2>err
    check "200 steps with gathers in $1" is $? 0
}
# The value of key $2 in each line of $1.
values() { grep -o "\"$2\": [0-9.e+-]*" "$1/metrics.jsonl" | sed 's/.*: //'; }
run param
run int8
paste <(values param loss) <(values int8 loss) >losses
cat losses
check "21 losses were logged" is "$(wc -l <losses)" 21
within() { awk '{ d = $2 / $1 - 1; if (d > 0.01 || d < -0.01) bad = 1 } END { exit bad }' losses; }
check "each is within 1 %" within
fell() { awk 'NR == 1 { a = $1 } END { exit !($1 < 0.8 * a) }' losses; }
check "the model learned something meanwhile" fell
paste <(values param tps) <(values int8 tps) |
    awk 'NR > 1 { a += $1; b += $2 } END { printf "tokens a second: int8 over bf16 %.2f\n", b / a }'
exit $failed
