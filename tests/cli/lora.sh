#!/bin/bash
# Adapters from `fsdp train`: save every epoch, resume, merge, start from others', generate; and what
# each mistake says.
# ctest: timeout=300
set -u
. "$(dirname "$0")/checks.bash"
export OMP_WAIT_POLICY=PASSIVE
source=${FSDP_SOURCE:-$here/../..}

mkdir texts
for i in 1 2 3 4 5 6 7 8; do
    echo "the cat sees a dog and the bird likes the old red cat but a small dog chases one bird $i"
done >texts/a
cat texts/a texts/a texts/a >texts/b
"$FSDP" prepare --out data --train-tokenizer 280 --validation a texts >out 2>err
check "data is prepared" is $? 0
cat >base.yaml <<'X'
data: {dir: data}
model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, local_batch_size: 2, global_batch_size: 4, steps: 8}
optimizer: {lr: 0.01}
lr_scheduler: {warmup_steps: 2}
checkpoint: {last_save_in_hf: true}
job: {dump_folder: base, print_config: false}
X
"$FSDP" train -n 2 base.yaml >out 2>err
check "a model to start from" is $? 0

# The file that is shipped, with the places of this test. 4 rows a step.
# lora NAME ARGUMENTS: a run in folder NAME; its losses and norms in NAME.losses.
lora() {
    local name=$1
    shift
    "$FSDP" train "$source/configs/lora.yaml" --job.dump_folder "$name" --model.hf_assets_path base/hf \
        --data.dir data --training.seq_len 16 --training.local_batch_size 1 --training.global_batch_size 4 \
        --training.steps "$steps" --lr_scheduler.total_steps 100 --checkpoint.interval "$epoch" \
        --validation.enable false --metrics.log_freq 1 --job.print_config false "$@" >out 2>err
    code=$?
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
rows=$((($("$FSDP" train base.yaml --check 2>err | sed -n 's/^#.* \([0-9]*\) training tokens.*/\1/p') - 1) / 16))
epoch=$(((rows + 3) / 4))
steps=$((2 * epoch))
check "an epoch has several steps" test "$epoch" -ge 2

# ---- RC-27: 4 ranks, 2 epochs, saved with each ------------------------------------------------------
lora run -n 4
check "two epochs on four ranks" is "$code $(grep -c '^checkpoint ' out)" "0 2"
check "adapters with each checkpoint" is "$(grep -c '^adapters saved as run/adapter' out)" 2
check "what is trained" has out '^adapters beside 14 layers: [0-9]* of [0-9]* parameters'
check "B alone has a gradient at first" has out '^adapters: 14 of 28 matrices have a gradient that is not zero in the first'
check "then all have" has out '^adapters: 28 of 28 matrices have a gradient that is not zero$'
check "peft's files" is "$(ls run/adapter | tr '\n' ' ')" "adapter_config.json adapter_model.safetensors "
check "peft's names" grep -aq 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' run/adapter/adapter_model.safetensors
check "the base is named" has run/adapter/adapter_config.json '"base_model_name_or_path": "base/hf"'
check "the base is not in it" test "$(stat -c %s run/adapter/adapter_model.safetensors)" -lt "$(stat -c %s base/hf/model.safetensors)"
lora two -n 2
check "the losses of two ranks" cmp run.losses two.losses
check "the adapters of two ranks" cmp run/adapter/adapter_model.safetensors two/adapter/adapter_model.safetensors

steps=$epoch
lora part -n 4
check "one epoch" is $code 0
steps=$((2 * epoch))
lora part -n 4
check "and one more" is "$code $(grep -c 'going on from part/checkpoint' out)" "0 1"
check "resumed: the same losses" cmp run.losses part.losses
check "resumed: the same adapters" cmp run/adapter/adapter_model.safetensors part/adapter/adapter_model.safetensors

files() { cat part/checkpoint/step-$1/*.safetensors | grep -ac "$2"; }
check "checkpoints hold the adapters" isnt "$(files $steps 'layers.0.mlp.up_proj.lora_A.weight')" 0
check "and not the base" is "$(files $steps 'embed_tokens')" 0
steps=$((2 * epoch + 1))
"$FSDP" train -n 2 base.yaml --job.dump_folder base2 --debug.seed 5 >out 2>err
lora part -n 2 --model.hf_assets_path base2/hf
check "going on beside another base" is "$code $(grep -c 'trained beside another base (fingerprint' err | sed 's/[1-9]/some/')" "1 some"
lora part -n 2 --checkpoint.initial_load_in_hf false
check "or none" is "$code $(grep -c 'it holds the trained parameters alone' err | sed 's/[1-9]/some/')" "1 some"
lora part -n 2 --lora.alpha 4
check "or with another scale" is "$code $(grep -c 'adapters: rank 8, alpha 16, rslora false; this run: rank 8, alpha 4, rslora false. Set the lora section' err | sed 's/[1-9]/some/')" "1 some"
lora part -n 2 --lora.enable false
check "or without adapters" is "$code $(grep -c 'adapters: rank .*; this run: none. Set the lora section' err | sed 's/[1-9]/some/')" "1 some"
lora part -n 2
check "on two ranks, beside the one that it was" is "$code $(grep -c 'going on from part/checkpoint' out)" "0 1"
steps=$((2 * epoch))

lora drop2 -n 2 --lora.dropout 0.3
lora drop4 -n 4 --lora.dropout 0.3
check "dropout: two ranks and four" cmp drop2.losses drop4.losses
check "dropout: other losses" isnt "$(cat drop2.losses)" "$(cat two.losses)"

# ---- what becomes of them -----------------------------------------------------------------------------
lora merged -n 4 --lora.merge --checkpoint.last_save_in_hf
check "merged at the end" is "$code $(grep -c '^adapters merged into the base' out)" "0 1"
check "the same adapters" cmp run/adapter/adapter_model.safetensors merged/adapter/adapter_model.safetensors
check "the folder has the base's names alone" is "$(grep -ac lora_ merged/hf/model.safetensors)" 0
check "and other weights" isnt "$(cksum <merged/hf/model.safetensors)" "$(cksum <base/hf/model.safetensors)"
ask() { "$FSDP" generate "$@" --prompt 'the cat' --tokens 8; }
ask base/hf --adapter merged/adapter >a 2>err
check "generate with adapters" is $? 0
ask merged/hf >b
check "is generate with the merged model" cmp a b

epoch=1000
steps=2
lora from -n 2 --lora.adapter_path run/adapter
check "starting from adapters" is "$code $(grep -c '^adapters of run/adapter beside 14' out)" "0 1"
check "all of them have a gradient at once" is "$(grep -c '28 of 28 matrices have a gradient' out)" 2
check "begins where they were" isnt "$(head -1 from.losses)" "$(head -1 run.losses)"
lora names -n 2 --lora.target_modules '[q_proj, v_proj]' --lora.rank 2 --lora.rslora
check "by name" is "$code $(grep -c '^adapters beside 4 layers' out) $(tr -d ' \n' <names/adapter/adapter_config.json | grep -c '"target_modules":\["q_proj","v_proj"\]')" "0 1 1"
lora pattern -n 2 --lora.target_modules null --lora.target_pattern '.*layers\.1\.mlp\.(up|down)_proj'
check "by pattern" is "$code $(grep -c '^adapters beside 2 layers' out) $(grep -c '"model.layers.1.mlp.up_proj"' pattern/adapter/adapter_config.json)" "0 1 1"
lora bf16 -n 2 --training.dtype bfloat16
check "a base kept in bfloat16" is $code 0

sed 's/hf_assets_path.*/x/' base.yaml >gpt2.yaml
"$FSDP" train -n 2 base.yaml --model.name gpt2 --model.n_kv_heads 0 --job.dump_folder gpt2 >out 2>err
lora gpt2lora -n 2 --model.hf_assets_path gpt2/hf --lora.merge --checkpoint.last_save_in_hf
check "GPT-2" is "$code $(grep -c '"fan_in_fan_out": true' gpt2lora/adapter/adapter_config.json)" "0 1"
ask gpt2/hf --adapter gpt2lora/adapter >a 2>err
ask gpt2lora/hf >b
check "GPT-2, merged" cmp a b

# ---- mistakes ---------------------------------------------------------------------------------------------
# bad NAME TEXT ARGUMENTS
bad() {
    local name=$1 text=$2
    shift 2
    rm -rf wrong
    lora wrong -n 2 "$@"
    check "$name: exit code" isnt $code 0
    check "$name: what is said" has err "$text"
    check "$name: nothing is left" none wrong
}
once() { check "$1: before any rank is started" is "$(grep -c . err)" 1; }
bad "a name that is not there" "no module is named 'qproj'; linear layers here: q_proj, k_proj" \
    --lora.target_modules '[qproj]'
once "a name that is not there"
bad "the head" 'An output head is computed with its loss' --lora.target_modules '[q_proj, lm_head]'
bad "names and a pattern" 'target_modules and target_pattern are both set' --lora.target_pattern x
bad "merged nowhere" 'would be written nowhere' --lora.merge
bad "a folder without adapters" 'switch lora.merge on' --checkpoint.last_save_in_hf
bad "no such adapters" 'lora.adapter_path: nowhere has no adapter_config.json' --lora.adapter_path nowhere
# config NAME KEY VALUE TEXT: an adapter_config.json with another value.
config() {
    rm -rf changed
    cp -r run/adapter changed
    sed -i "s/\"$2\": [^,]*/\"$2\": $3/" changed/adapter_config.json
    grep -q "\"$2\"" changed/adapter_config.json || sed -i "1s/{/{\"$2\": $3,/" changed/adapter_config.json
    bad "$1" "$4" --lora.adapter_path changed
    once "$1"
}
config "DoRA" use_dora true 'use_dora: found true, expected null, false or empty'
config "biases" bias '"all"' 'bias: found "all", expected "none"'
config "ranks by pattern" rank_pattern '{"x": 3}' 'rank_pattern: found'
config "an init that changes the base" init_lora_weights '"pissa"' 'init_lora_weights: found "pissa"'
config "not LoRA" peft_type '"IA3"' 'peft_type: found "IA3", expected "LORA"'
sed -i 's/"r": 8/"r": 4/; s/"peft_type": "IA3"/"peft_type": "LORA"/' changed/adapter_config.json
bad "another rank" "'base_model.*lora_A.weight' is F32 (8, 32) and the model wants (4, 32)" \
    --lora.adapter_path changed
head -c 900 run/adapter/adapter_model.safetensors >changed/adapter_model.safetensors
cp run/adapter/adapter_config.json changed
bad "a file that was cut" 'changed/adapter_model.safetensors' --lora.adapter_path changed
mkdir -p mine/adapter && echo mine >mine/adapter/README.md
lora mine -n 2
check "a folder of others' files in the way" is \
    "$code $(grep -c "mine/adapter: found 'README.md' there" err | sed 's/[1-9]/some/') $(ls mine)" "1 some adapter"
ask base/hf --adapter nowhere >out 2>err
check "generate: no such adapters" has err 'nowhere/adapter_config.json'

exit $failed
