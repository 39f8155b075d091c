#!/bin/bash
# fsdp without a command's work: help, version, wrong command lines.
set -u
. "$(dirname "$0")/checks.bash"

run() { "$FSDP" "$@" >out 2>err; code=$?; }

run
check "no command: 2" is $code 2
check "nothing on standard output" is "$(cat out)" ""
for flag in --help -h help; do
    run $flag
    check "$flag: 0" is "$code $(cat err)" "0 "
    check "$flag names the commands" has out '^  run  '
done
# Every command of the table explains itself, in both ways.
commands=$("$FSDP" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p' | grep -v '^help$\|^version$')
check "there are commands" test -n "$commands"
for c in $commands; do
    run "$c" --help
    check "$c --help: 0" is "$code $(cat err)" "0 "
    check "$c --help says how it is used" has out "usage: fsdp $c"
    cp out first
    run help "$c"
    check "help $c is the same" cmp out first
done
for flag in --version -V version; do
    run $flag
    check "$flag" has out '^fsdp [0-9]*\.[0-9]*\.[0-9]*$'
done
run rnu
check "an unknown command: 2" is $code 2
check "the nearest name is offered" has err "unknown command 'rnu'; did you mean 'run'"
run help rnu
check "also behind help" has err "did you mean 'run'"
run completely-different
check "nothing is offered that is not near" is "$(grep -c 'did you mean' err)" 0
if [ -w /dev/full ]; then
    "$FSDP" --help >/dev/full 2>err
    check "a full disk is a failure" is $? 1
fi
"$FSDP" run -n 1 sh -c 'exit 3' <&- 2>err
check "without standard input" is $? 3
"$FSDP" run -n 1 sh -c 'exit 4' >&- 2>&-
check "without standard output and error" is $? 4

exit $failed
