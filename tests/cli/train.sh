#!/bin/bash
# fsdp train and fsdp generate: equal losses over ranks and strategies, checkpoints, what a run
# leaves, and what each mistake says. Nothing depends on how fast the machine is.
# ctest: timeout=600
set -u
. "$(dirname "$0")/checks.bash"
. "$here/tiny.bash"

mkdir texts
text 1 1500 >texts/a
text 2 1500 >texts/b
text 3 300 >texts/valid
"$FSDP" prepare --out data --train-tokenizer 300 --validation valid texts >out 2>err
check "data is prepared" is $? 0

cat >tiny.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, local_batch_size: 2, global_batch_size: 8, steps: 5}
optimizer: {lr: 0.01}
lr_scheduler: {warmup_steps: 2, total_steps: 5}
metrics: {log_freq: 1}
job: {print_config: false}
X
# ---- the same numbers ------------------------------------------------------------------------------
run one -n 1 --threads 1
check "one rank" is "$code" 0
check "a line in torchtitan's form" grep -qE \
    '^step:  5  loss: [ 0-9.]{8}  grad_norm: [ 0-9.]{7}  memory: [0-9.]+GiB  tps: [0-9,]+  tflops: [0-9.]+  mfu: N/A$' out
check "as many JSON lines as steps" is "$(wc -l <one.losses)" 5
run again -n 1 --threads 1
check "one rank, twice" cmp one.losses again.losses
run threads -n 1 --threads 2
check "two threads" cmp one.losses threads.losses
run two -n 2
run twice -n 2
check "two ranks, twice" cmp two.losses twice.losses
run always -n 2 --parallelism.fsdp_reshard_after_forward always
check "everything freed after forward" cmp two.losses always.losses
run never -n 2 --parallelism.fsdp_reshard_after_forward never
check "SHARD_GRAD_OP" cmp two.losses never.losses
run none -n 2 --parallelism.data_parallel_replicate_degree 2
check "NO_SHARD" cmp two.losses none.losses
run ahead -n 2 --prefetch.limit 0
check "no prefetch" cmp two.losses ahead.losses
run private -n 2 --memory.shared_gather false
check "a gathered copy for each rank" cmp two.losses private.losses
run whole -n 2 --parallelism.fsdp_units model
check "the model as one unit" cmp two.losses whole.losses
run four -n 4
check "four ranks" cmp two.losses four.losses
run hybrid -n 4 --parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2
check "two replicas of two shards" cmp two.losses hybrid.losses
run f32 -n 2 --training.mixed_precision_param float32
check "float32 gives other numbers" isnt "$(cat two.losses)" "$(cat f32.losses)"
run f32none -n 2 --training.mixed_precision_param float32 \
    --parallelism.data_parallel_replicate_degree 2
check "NO_SHARD in float32" cmp f32.losses f32none.losses
run few -n 4 --training.global_batch_size 3 --training.local_batch_size 1
check "ranks without rows" is "$code $(wc -l <few.losses)" "0 5"
run sgd -n 2 --optimizer.name SGD --optimizer.momentum 0.9
check "SGD" is $code 0
run model -n 2 --model.name gpt2 --model.n_kv_heads 0
check "GPT-2" is $code 0

# ---- what is printed, and the table of bytes ---------------------------------------------------------
run said -n 2 --job.print_config true --validation.enable --validation.freq 5
check "the configuration" has out '^  global_batch_size: 8$'
check "its hash" has out '^configuration hash [0-9a-f]\{16\}$'
check "the mesh" has out '^mesh shard 2$'
check "and its hosts" has out 'rank 1: shard 1, host '
check "the table" has out '^optimizer .*KiB .*KiB .*KiB$'
planned=$(awk '/measured peak/ {on = 1} on && $1 == "optimizer" {print ($4 == $6), ($5 == $7)}' out)
check "planned bytes are the measured ones" is "$planned" "1 1"
check "validation" has out '^validate step:  5  loss: [ 0-9.]\{7\}  memory: '
check "the bigram model beside it" has out 'bigram model of the training text: [0-9.]*$'

if command -v script >/dev/null; then
    script -qec "'$FSDP' train -n 2 tiny.yaml --job.dump_folder bar" screen >/dev/null </dev/null
    check "a bar and the time left on a terminal" has screen '\[=*\] 5/5  00:00 left'
    check "and none elsewhere" is "$(grep -c left out)" 0
else
    echo "skip the bar on a terminal: there is no program 'script'"
fi

# ---- checkpoints ---------------------------------------------------------------------------------------
keep="--checkpoint.enable --checkpoint.interval 2 --checkpoint.keep_latest_k 2"
run whole_run -n 2 $keep --checkpoint.last_save_in_hf
check "a run with checkpoints" cmp two.losses whole_run.losses
check "the newest two are kept" is "$(echo $(ls whole_run/checkpoint))" "step-4 step-5"
check "one file a rank" is "$(ls whole_run/checkpoint/step-5 | grep -c rank-0000)" 2
check "a Hugging Face folder" is "$(echo $(ls whole_run/hf))" \
    "config.json generation_config.json model.safetensors tokenizer.json"
run whole_run -n 2 $keep
check "a finished run says so" is "$code $(grep -c 'is finished: 5 steps' out)" "0 1"
for ranks in 1 2 4; do
    run part$ranks -n 2 $keep --training.steps 3
    run part$ranks -n $ranks $keep
    check "resumed on $ranks ranks" is "$code $(grep -c '^going on from part.*/step-3' out)" "0 1"
    [ $ranks = 1 ] || check "with the same numbers" cmp two.losses part$ranks.losses
done
check "with the steps of one run" is "$(grep -c step part1.losses)" 5
run part2 -n 2 $keep --training.steps 7 --checkpoint.load_step 4
check "from an older one" is "$code $(wc -l <part2.losses)" "0 7"
check "what is not as before is said" has out 'training.steps: 5 and 7'
run part2 -n 2 $keep --training.steps 9 --checkpoint.load_step 1
check "a checkpoint that is not there" has err 'there is no part2/checkpoint/step-1; the newest'
run part4 -n 2 $keep --training.steps 9 --model.ffn_dim 40
check "a checkpoint of another model" has err 'of another shape (model.layers.0.mlp'
run part4 -n 2 $keep --training.steps 9 --optimizer.name SGD
check "a checkpoint of another optimizer" has err 'the state of another optimizer'
: >part4/checkpoint/step-5/rank-00000-of-00004.safetensors
run part4 -n 2 $keep --training.steps 9
check "a checkpoint that was cut" is "$code $(grep -c 'part4/checkpoint/step-5/rank-00000-of-00004.safetensors: found a file of 0 bytes' err | sed 's/[1-9]/some/')" \
    "1 some"
run nothing -n 2
run nothing -n 2 --training.steps 7
check "a finished run without checkpoint" has err 'left no checkpoint to go on from'

# ---- Ctrl-C ------------------------------------------------------------------------------------------------
"$FSDP" train -n 2 --grace 60 tiny.yaml --job.dump_folder long --training.steps 1000000000 \
    --checkpoint.enable --checkpoint.interval 1000000000 >out 2>err &
pid=$!
check "a long run starts" until_true 100 grep -q '"step": 3' long/metrics.jsonl
kill -INT $pid
wait $pid
check "Ctrl-C" is $? 130
check "its checkpoint" is "$(ls long/checkpoint | wc -l)" 1
steps=$(ls long/checkpoint | sed 's/step-//')
run long -n 2 --training.steps $((steps + 1)) --checkpoint.enable
check "goes on" is "$code $(tail -n 1 long.losses | grep -c "\"step\": $((steps + 1)),")" "0 1"

# ---- two jobs in one folder --------------------------------------------------------------------------
"$FSDP" train -n 2 tiny.yaml --job.dump_folder both --training.steps 1000000000 >out 2>err &
pid=$!
check "the first of two jobs starts" until_true 100 grep -q '"step": 3' both/metrics.jsonl
"$FSDP" train -n 2 tiny.yaml --job.dump_folder both >out2 2>err2
check "the second of two jobs" is "$? $(grep -c 'both: another process works in this folder' err2 | sed 's/[1-9]/some/')" \
    "1 some"
check "disturbs nothing" grep -q '"step": 3' both/metrics.jsonl
kill -INT $pid
wait $pid
check "and the first goes on until Ctrl-C" is $? 130

# ---- a folder goes in ------------------------------------------------------------------------------------------
sed '/^model:/d' tiny.yaml >hf.yaml
"$FSDP" train -n 2 hf.yaml --model.hf_assets_path whole_run/hf --job.dump_folder tuned \
    --checkpoint.last_save_in_hf >out 2>err
check "training a folder" is $? 0
first() { sed -n '1s/.*"loss": \([0-9.]*\),.*/\1/p' "$1"; }
check "begins where it was" awk -v a="$(first two.losses)" -v b="$(first tuned/metrics.jsonl)" \
    'BEGIN { exit !(b < a - 0.1) }'
"$FSDP" generate tuned/hf --prompt 'the cat' --tokens 8 >a 2>err
check "generate" is $? 0
"$FSDP" generate tuned/hf --prompt 'the cat' --tokens 8 --temperature 0 >b
check "greedy is the default" cmp a b
"$FSDP" generate tuned/hf --prompt 'the cat' -n 8 --temperature 1.5 --top-k 20 --top-p 0.9 --seed 3 >a
"$FSDP" generate tuned/hf --prompt 'the cat' -n 8 --temperature 1.5 --top-k 20 --top-p 0.9 --seed 3 >b
check "the same seed, the same text" cmp a b
"$FSDP" generate tuned/hf --prompt 'the cat' -n 8 --temperature 1.5 --seed 4 >b
check "another seed" isnt "$(cat a)" "$(cat b)"
"$FSDP" generate tuned/hf --prompt 'the cat' --tokens 100 >out 2>err
check "longer than the model's sequence" has err "more than the model's longest sequence, 16"
"$FSDP" generate nowhere --prompt x >out 2>err
check "a folder that is not there" has err "there is no folder 'nowhere'"
"$FSDP" generate tuned/hf >out 2>err
check "no prompt" is $? 2

cp -r whole_run/hf warn
sed -i '1s/{/{"zork": 3,/' warn/config.json
"$FSDP" train -n 2 hf.yaml --model.hf_assets_path warn --job.dump_folder warned >out 2>err
check "a key that nobody knows is a warning" is \
    "$? $(grep -c "^fsdp: warning: warn/config.json: the key 'zork' is not known" err)" "0 1"
"$FSDP" generate warn --prompt 'the cat' --tokens 2 >out 2>err
check "in generate too" is "$? $(grep -c "^fsdp: warning: .*'zork'" err)" "0 1"


# Dropout, inside attention too, draws for the sample, not for the rank.
run gpt2 -n 2 --model.name gpt2 --model.n_kv_heads 0 --checkpoint.last_save_in_hf
for rate in attn embd resid; do
    sed -i "s/\"${rate}_pdrop\": [0-9.]*/\"${rate}_pdrop\": 0.2/" gpt2/hf/config.json
done
for n in 1 2 4; do
    "$FSDP" train -n $n hf.yaml --model.hf_assets_path gpt2/hf --job.dump_folder drop$n >out 2>err
    sed 's/, "memory.*//' drop$n/metrics.jsonl >drop$n.losses
    check "dropout on $n ranks" is "$(wc -l <drop$n.losses)" 5
done
check "dropout: the losses of 2 ranks and 4" cmp drop2.losses drop4.losses
check "dropout: the first loss on 1 rank" awk -v a="$(first drop1/metrics.jsonl)" \
    -v b="$(first drop2/metrics.jsonl)" 'BEGIN { exit !(a - b < 1e-5 && b - a < 1e-5) }'
sed -i 's/_pdrop": 0.2/_pdrop": 0.0/' gpt2/hf/config.json
"$FSDP" train -n 2 hf.yaml --model.hf_assets_path gpt2/hf --job.dump_folder sure >out 2>err
check "dropout: without it another loss" isnt "$(first sure/metrics.jsonl)" "$(first drop2/metrics.jsonl)"

# ---- memory.limit ----------------------------------------------------------------------------------------------------
run limit -n 4 --model.ffn_dim 1024 --parallelism.data_parallel_replicate_degree 4 --memory.limit 3MiB
check "NO_SHARD does not fit" is $code 1
check "the table of what did not fit" has out '^optimizer '
check "why, and what to do" has err 'memory.limit is 3.00 MiB a rank, and this layout needs'
check "and nothing is left" none limit
run limit -n 4 --model.ffn_dim 1024 --memory.limit 3MiB
check "FULL_SHARD fits" is $code 0

# ---- mistakes: what is said, exit code, nothing left -------------------------------------------------------------------
# bad NAME TEXT ARGUMENTS
bad() {
    local name=$1 text=$2
    shift 2
    rm -rf wrong
    "$FSDP" train -n 2 tiny.yaml --job.dump_folder wrong "$@" >out 2>err
    check "$name: exit code" isnt $? 0
    check "$name: what is said" has err "$text"
    check "$name: once" is "$(grep -c -- "$text" err)" 1
    check "$name: nothing is left" none wrong
}
bad "unknown option" 'unknown option training.step; did you mean training.steps?' --training.step 3
bad "unknown section" 'did you mean training.steps' --trainig.steps 3
bad "known and not available" 'known and not available: tensor parallelism' \
    --parallelism.tensor_parallel_degree 2
bad "wrong type" "training.steps is 'many'; expected" --training.steps many
bad "out of range" "training.seq_len is '0'; expected" --training.seq_len 0
bad "no value" 'training.steps wants a value' --training.steps
bad "degrees" 'valid choices (replicate x shard): 1 x 2, 2 x 1' \
    --parallelism.data_parallel_shard_degree 3
bad "degrees that do not divide" 'valid choices (replicate x shard): 1 x 2, 2 x 1' \
    --parallelism.data_parallel_replicate_degree 3
bad "no data" "there is no folder 'nowhere'" --data.dir nowhere
bad "no model" 'no model is chosen' --model.dim 0
bad "heads" 'dim 32 is no multiple of n_heads 5' --model.n_heads 5
bad "vocabulary" "vocabulary is 100 and the tokenizer's 300" --model.vocab_size 100
bad "sequence" "made for sequences of at most 8 tokens" --model.max_seq_len 8
bad "short dataset" 'one row of training.seq_len 1000000 needs 1000001' --training.seq_len 1000000
bad "sizes and a folder" 'hf_assets_path is set, so the sizes are' --model.hf_assets_path whole_run/hf
bad "one checkpoint only" 'keep_latest_k is 1' --checkpoint.keep_latest_k 1
bad "a word" "unexpected 'three'" --training.steps 2 three --training.seq_len 8
printf 'training:\n  step: 3\n' >wrong.yaml
"$FSDP" train wrong.yaml >out 2>err
check "the place in the file" has err 'wrong.yaml:2:9: unknown option training.step'
printf 'training:\n  steps: 3\n steps: 4\n' >wrong.yaml
"$FSDP" train wrong.yaml >out 2>err
check "bad YAML" has err 'wrong.yaml:3'
"$FSDP" train missing.yaml >out 2>err
check "a missing file" has err 'missing.yaml'

mkdir -p cut && cp data/* cut
head -c 2000 data/train.tokens >cut/train.tokens
bad "a token file that was cut" 'cut/train.tokens' --data.dir cut
: >cut/train.tokens
bad "an empty dataset" 'cut/train.tokens' --data.dir cut
cp data/train.tokens cut/train.tokens
for at in 164 564 1064 2064 3064; do
    printf '\377\377' | dd of=cut/train.tokens bs=1 seek=$at conv=notrunc 2>/dev/null
done
"$FSDP" train -n 2 tiny.yaml --job.dump_folder wrong --data.dir cut --training.steps 200 >out 2>err
check "an id outside the vocabulary" isnt $? 0
check "with file, offset and id" has err 'cut/train.tokens.*65535'
rm -rf wrong
"$FSDP" prepare --out other --train-tokenizer 280 texts >out 2>err
rm cut/tokenizer.json && cp data/train.tokens cut/ && cp other/tokenizer.json cut/
bad "another tokenizer" 'they are not of one tokenizer' --data.dir cut
mkdir -p weights && cp whole_run/hf/* weights
head -c 3000 whole_run/hf/model.safetensors >weights/model.safetensors
"$FSDP" train -n 2 hf.yaml --model.hf_assets_path weights --job.dump_folder wrong >out 2>err
check "truncated weights" is "$? $(grep -c 'weights/model.safetensors' err | sed 's/[1-9]/some/')" \
    "1 some"
check "truncated weights: nothing is left" none wrong
cp whole_run/hf/model.safetensors weights
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' whole_run/hf/config.json >weights/config.json
"$FSDP" train -n 2 hf.yaml --model.hf_assets_path weights --job.dump_folder wrong >out 2>err
check "weights that are missing" is "$? $(grep -c ' 9 missing: model.layers.2.inp' err | sed 's/[1-9]/some/')" \
    "1 some"
check "weights that are missing: nothing is left" none wrong
cp whole_run/hf/config.json weights
rm weights/model.safetensors
"$FSDP" train -n 2 hf.yaml --model.hf_assets_path weights --job.dump_folder wrong >out 2>err
check "no weights" has err 'has neither model.safetensors nor'
check "no weights: nothing is left" none wrong

echo plain >plain
run plain/run -n 2
check "a folder that cannot be made" is "$code $(grep -c 'cannot create the folder plain' err | sed 's/[1-9]/some/')" \
    "1 some"
mkdir -p taken/hf && echo mine >taken/hf/notes.txt && echo mine >taken/checkpoint
run taken -n 2 --checkpoint.last_save_in_hf
check "a folder of others' files in the way" is \
    "$code $(ls taken | wc -l) $(grep -c "taken/hf: found 'notes.txt' there" err | sed 's/[1-9]/some/')" "1 2 some"
run taken -n 2 --checkpoint.enable
check "a file in the way" is \
    "$code $(ls taken | wc -l) $(grep -c 'create the folder taken/checkpoint; something' err | sed 's/[1-9]/some/')" \
    "1 2 some"
# A small disk, where this user may make one.
mkdir disk
if unshare -m mount -t tmpfs -o size=64k none disk 2>/dev/null; then
    export -f run
    export FSDP keep
    unshare -m bash -c 'mount -t tmpfs -o size=900k none disk
        "$FSDP" train -n 2 tiny.yaml --job.dump_folder disk/full $keep --training.steps 8 \
            --checkpoint.keep_latest_k 0 >out 2>err
        echo $? >code; ls -a disk/full/checkpoint >list'
    check "no space for a checkpoint" is "$(cat code)" 1
    check "is said" grep -q 'disk/full/checkpoint/step-[468].tmp/rank-0000[01].*No space' err
    check "the ones before it stay" has list '^step-2$'
    check "and nothing of it is left" is "$(grep -c tmp list)" 0
else
    echo "skip no space on the disk: no right to mount one"
fi
(ulimit -f 40 && run limited -n 1 --checkpoint.enable && exit "$code")
check "a limit of file size" is "$? $(grep -c 'step-5.tmp/rank-00000.*File too large' err)" "1 1"
check "leaves no half checkpoint" is "$(ls limited/checkpoint | wc -l)" 0
run blown -n 2 --optimizer.lr 1e25 --training.max_norm 0 --training.steps 20
check "a loss that is no number" is "$code $(grep -c 'no weight was changed' err | sed 's/[1-9]/some/')" \
    "1 some"
"$FSDP" run -n 2 sh -c '"$1" train tiny.yaml --job.dump_folder wrong --debug.seed $RANK' - "$FSDP" \
    >out 2>err
check "ranks that mean other things" has err 'debug.seed: 1 and 0'
check "leave nothing" none wrong

# ---- help --------------------------------------------------------------------------------------------------------------
"$FSDP" train --help >out
check "help lists the options" test "$(grep -c '^  --[a-z_]*\.[a-z0-9_]*$' out)" -gt 60
"$FSDP" train --print-defaults >defaults.yaml
"$FSDP" train defaults.yaml --data.dir data --check --model.flavor tiny --training.seq_len 64 >out 2>err
check "the default file is a valid one" is $? 0
"$FSDP" train -n 4 "${FSDP_SOURCE:-$here/../..}/configs/demo.yaml" --data.dir data --check >out 2>err
check "the demo's file is a valid one" is $? 0
"$FSDP" train >out 2>err
check "no file" is $? 2

exit $failed
