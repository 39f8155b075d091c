#!/bin/bash
# fsdp run: ranks that are killed, launchers that are killed, Ctrl-C. See launch.sh.
# ctest: timeout=240
set -u
. "$(dirname "$0")/checks.bash"

# A job's processes carry a word in their environment by which they are found.
tagged() {
    local p
    for p in /proc/[0-9]*; do
        [ "${p#/proc/}" != $$ ] && tr '\0' '\n' 2>/dev/null <"$p/environ" |
            grep -qx "JOB_TAG=$1" && ! grep -q '^State:.[ZX]' "$p/status" && echo "${p#/proc/}"
    done 2>/dev/null
}
gone() { [ -z "$(tagged "$1")" ]; }
ready() { [ "$(cat "$1"/ready-* 2>/dev/null | wc -l)" = "$2" ]; }

# A rank that says it is there, with its process number, and waits; so does a child of it.
cat >rank.sh <<'X'
#!/bin/bash
sleep 1000 &
echo $$ >"$1/tmp-$RANK" && mv "$1/tmp-$RANK" "$1/ready-$RANK"
wait
X
# One that ends calmly when asked, and counts how often.
cat >calm.sh <<'X'
#!/bin/bash
trap 'echo asked by INT; exit 0' INT
trap 'echo asked by TERM; exit 0' TERM
echo $$ >"$1/tmp-$RANK" && mv "$1/tmp-$RANK" "$1/ready-$RANK"
while :; do sleep 0.05; done
X
# One that does not listen.
cat >deaf.sh <<'X'
#!/bin/bash
trap '' INT TERM
echo $$ >"$1/tmp-$RANK" && mv "$1/tmp-$RANK" "$1/ready-$RANK"
while :; do sleep 0.05; done
X
chmod +x rank.sh calm.sh deaf.sh

# start TAG N SCRIPT [options]: a job in the background; $launcher is its process.
start() {
    local tag=$1 n=$2 script=$3
    shift 3
    mkdir "$tag"
    JOB_TAG=$tag "$FSDP" run -n "$n" "$@" "./$script" "$tag" >"$tag/out" 2>"$tag/err" &
    launcher=$!
    until_true 30 ready "$tag" "$n" || { echo "FAIL job $tag does not start"; exit 1; }
}
finish() { wait "$launcher"; code=$?; cp "$1/out" out; cp "$1/err" err; }

# ---- a rank dies --------------------------------------------------------------------------------
start one 4 rank.sh
kill -KILL "$(cat one/ready-2)"
begin=$SECONDS
finish one
check "the others end within 2 s (limit here: 10)" test $((SECONDS - begin)) -lt 10
check "exit code of SIGKILL" is $code 137
check "the killed rank is named first" is "$(grep -v ' ranks x ' err | head -n 1)" \
    "fsdp: rank 2 failed first: killed by signal 9 (SIGKILL, Killed)"
check "no process is left" until_true 10 gone one

start two 3 deaf.sh
kill -SEGV "$(cat two/ready-0)"
finish two
check "deaf ranks are killed" has err 'killing 2 ranks that did not end within 1 s: 1 2'
check "the cause stays the cause" is $code 139

# ---- the launcher dies --------------------------------------------------------------------------
start three 4 rank.sh
check "ranks and their children run" test "$(tagged three | wc -l)" -ge 8
kill -KILL $launcher
wait $launcher 2>/dev/null
check "no rank and no child of one survives" until_true 10 gone three

start four 2 deaf.sh
kill -ABRT $launcher
wait $launcher 2>/dev/null
check "nor after another signal" until_true 10 gone four

# ---- Ctrl-C and SIGTERM -------------------------------------------------------------------------
start five 3 calm.sh
kill -INT $launcher
finish five
check "SIGINT: 130" is $code 130
check "each rank was asked once" is "$(grep -c 'asked by INT' out)" 3
start six 3 calm.sh
kill -TERM $launcher
finish six
check "SIGTERM: 143" is $code 143
check "SIGTERM goes on as SIGTERM" is "$(grep -c 'asked by TERM' out)" 3
start seven 2 deaf.sh --grace 0.2
kill -INT $launcher
finish seven
check "after the grace time they are killed" has err 'killing 2 ranks that did not end within 0.2 s'
check "still 130" is $code 130
start eight 2 deaf.sh --grace 1000
kill -INT $launcher
until_true 30 grep -q SIGINT eight/err
kill -INT $launcher
finish eight
check "a second Ctrl-C kills" is $code 130
check "and nothing is left" until_true 10 gone eight

# ---- a paused job and a reader that does not read -----------------------------------------------
start nine 2 calm.sh
kill -STOP "$(cat nine/ready-1)"
kill -KILL "$(cat nine/ready-0)"
finish nine
check "a stopped rank does not hold the job up" is $code 137
mkfifo slow
mkdir ten
exec 9<>slow
JOB_TAG=ten "$FSDP" run -n 2 sh -c 'echo $$ >ten/tmp-$RANK; mv ten/tmp-$RANK ten/ready-$RANK
    exec yes' >slow 2>ten/err &
launcher=$!
until_true 30 ready ten 2
sleep 0.3
kill -KILL "$(cat ten/ready-1)"
check "a death is seen while output is stuck" until_true 10 grep -q 'rank 1 failed first' ten/err
check "and acted on" until_true 10 test -z "$(pgrep -P $launcher yes)"
cat <&9 >/dev/null &
reader=$!
wait $launcher
check "the code is that of the rank" is $? 137
exec 9>&-
kill $reader

# ---- two jobs at once ---------------------------------------------------------------------------
start left 2 calm.sh
left=$launcher
start right 2 rank.sh
right=$launcher
link() { stat -Lc %i "/proc/$1/fd/$(tr '\0' '\n' <"/proc/$1/environ" |
    sed -n 's/^FSDP_SHM_FD=//p')"; }
a=$(link "$(cat left/ready-0)") b=$(link "$(cat right/ready-0)")
check "two jobs have two segments" test "$a" != "$b"
kill -KILL "$(cat right/ready-1)"
wait $right
check "one fails" is $? 137
kill -0 "$(cat left/ready-0)" && kill -INT $left
wait $left
check "the other does not notice" is $? 130

exit $failed
