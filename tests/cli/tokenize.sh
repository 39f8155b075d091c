#!/bin/bash
# fsdp tokenize and fsdp prepare: ids and text byte for byte, exit codes, and the files made.
set -euo pipefail

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
t=$FSDP_TEST_DATA/tokenizers

fail() {
    echo "FAILED: $*"
    exit 1
}
# same WHAT GOT WANTED
same() {
    [ "$2" = "$3" ] || fail "$1: got '$2', wanted '$3'"
}
# refused CODE WORD COMMAND...
refused() {
    local code=$1 word=$2 got=0
    shift 2
    "$@" >"$tmp/out" 2>"$tmp/err" </dev/null || got=$?
    same "exit code of $*" "$got" "$code"
    grep -qF -- "$word" "$tmp/err" || fail "$*: no '$word' in: $(cat "$tmp/err")"
    [ ! -s "$tmp/out" ] || fail "$*: wrote to standard output"
}

same ids "$(printf 'Hello, world!' | "$FSDP" tokenize "$t/llama3")" "0 710 14 569 3"
same no-special "$(printf 'Hello, world!' | "$FSDP" tokenize "$t/llama3" --no-special)" "710 14 569 3"
same file "$(printf 'Hello, world!' | "$FSDP" tokenize "$t/llama3/tokenizer.json")" "0 710 14 569 3"
same special "$(printf '<|begin|>special<|end|> in text' | "$FSDP" tokenize "$t/gpt2")" "0 687 1 293 557"
same empty "$(printf '' | "$FSDP" tokenize "$t/gpt2")" ""
same decode "$(printf '0 710\n14 569 3\n' | "$FSDP" tokenize "$t/llama3" --decode)" "<|begin|>Hello, world!"
same decode-no-special "$(echo 0 710 14 569 3 | "$FSDP" tokenize --decode --no-special "$t/llama3")" \
    "Hello, world!"

# Byte for byte: newlines at the end, tabs, what is not ASCII.
printf '  a\tb\n\nc\r\n\xc3\xa9 \xe6\xbc\xa2\n\n' >"$tmp/text"
for form in gpt2 llama3 smollm llama2; do
    "$FSDP" tokenize "$t/$form" --no-special <"$tmp/text" >"$tmp/ids"
    "$FSDP" tokenize "$t/$form" --decode <"$tmp/ids" >"$tmp/back"
    cmp "$tmp/text" "$tmp/back" || fail "$form does not give the text back"
done

refused 2 "no folder" "$FSDP" tokenize
refused 2 "--odd" "$FSDP" tokenize "$t/gpt2" --odd
refused 2 "one folder" "$FSDP" tokenize "$t/gpt2" "$t/llama3"
refused 1 "$tmp/none" "$FSDP" tokenize "$tmp/none"
echo '1 2 x3' >"$tmp/ids"
code=0
"$FSDP" tokenize "$t/gpt2" --decode <"$tmp/ids" 2>"$tmp/err" || code=$?
same "exit code of a bad id" "$code" 1
grep -q 'word 3 .*x3' "$tmp/err" || fail "a bad id is not named: $(cat "$tmp/err")"
echo '1 2 99999999' >"$tmp/ids"
code=0
"$FSDP" tokenize "$t/gpt2" --decode <"$tmp/ids" >"$tmp/back" 2>"$tmp/err" || code=$?
same "exit code of an id outside the vocabulary" "$code" 1
grep -q 'word 3 .*is 99999999, which is outside the vocabulary of' "$tmp/err" ||
    fail "an id outside the vocabulary is not named: $(cat "$tmp/err")"
[ ! -s "$tmp/back" ] || fail "a text with an id left out was printed"
"$FSDP" tokenize --help | grep -q -- --decode || fail "no help of tokenize"

# prepare: a family held out, by the name of a link.
mkdir "$tmp/in"
for i in 1 2 3 4 5 6 7 8; do echo "the cat number $i sat on the mat of the house"; done >"$tmp/in/a-1"
echo "an owl sat on the roof of the house" >"$tmp/in/owl-2"
ln -s a-1 "$tmp/in/a"
ln -s owl-2 "$tmp/in/owl"
"$FSDP" prepare --out "$tmp/data" --train-tokenizer 270 --validation owl "$tmp/in" >"$tmp/said"
grep -q '^train .*1 files' "$tmp/said" || fail "prepare said: $(cat "$tmp/said")"
grep -q '^validation .*1 files' "$tmp/said" || fail "prepare said: $(cat "$tmp/said")"
for f in train.tokens validation.tokens tokenizer.json tokenizer_config.json prepare.json; do
    [ -s "$tmp/data/$f" ] || fail "prepare made no $f"
done
"$FSDP" tokenize "$tmp/data" <"$tmp/text" | "$FSDP" tokenize "$tmp/data" --decode >"$tmp/back"
cmp "$tmp/text" "$tmp/back" || fail "the trained tokenizer does not give the text back"
# The same bytes again, and with the tokenizer given.
cp -r "$tmp/data" "$tmp/first"
"$FSDP" prepare --out "$tmp/data" --train-tokenizer=270 --validation owl "$tmp/in" >/dev/null
diff -r "$tmp/first" "$tmp/data" || fail "a second run made other files"
"$FSDP" prepare --out "$tmp/given" --tokenizer "$tmp/data" --validation 'owl*' "$tmp/in" >/dev/null
cmp "$tmp/data/train.tokens" "$tmp/given/train.tokens"
cmp "$tmp/data/tokenizer.json" "$tmp/given/tokenizer.json"

refused 2 "--out" "$FSDP" prepare --train-tokenizer 300 "$tmp/in"
refused 2 "either" "$FSDP" prepare --out "$tmp/x" "$tmp/in"
refused 2 "at least 257" "$FSDP" prepare --out "$tmp/x" --train-tokenizer 12 "$tmp/in"
refused 2 "value behind it" "$FSDP" prepare "$tmp/in" --out
refused 2 "no files" "$FSDP" prepare --out "$tmp/x" --train-tokenizer 300
refused 1 "dog*" "$FSDP" prepare --out "$tmp/x" --train-tokenizer 300 --validation 'dog*' "$tmp/in"
refused 1 "tokens at most" "$FSDP" prepare --out "$tmp/x" --train-tokenizer 9000 "$tmp/in"
refused 1 "$tmp/none" "$FSDP" prepare --out "$tmp/x" --train-tokenizer 300 "$tmp/none"
[ ! -e "$tmp/x/train.tokens" ] || fail "a failed prepare left a token file"
"$FSDP" prepare --help | grep -q -- --validation || fail "no help of prepare"
