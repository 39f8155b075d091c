#!/bin/bash
# fsdp run: environment, output, exit codes, failures, signals. No check depends on how fast the
# machine is: what must happen is waited for, up to a limit far above what it takes.
# ctest: timeout=240
set -u
. "$(dirname "$0")/checks.bash"

# Processes, by a word in their environment, that are not zombies.
alive() {
    local p n=0
    for p in /proc/[0-9]*; do
        [ -r "$p/environ" ] || continue
        if tr '\0' '\n' 2>/dev/null <"$p/environ" | grep -qx "$1" &&
            ! grep -q '^State:.[ZX]' "$p/status" 2>/dev/null; then n=$((n + 1)); fi
    done
    echo $n
}
none_alive() { [ "$(alive "$1")" = 0 ]; }
run() { "$FSDP" run "$@" >out 2>err; code=$?; }

# ---- environment --------------------------------------------------------------------------------
run -n 3 --threads 2 sh -c 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK \
$ROLE_RANK $ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $OMP_NUM_THREADS $OMP_WAIT_POLICY"'
sort out >sorted
cat >expected <<'X'
[0] 0 0 3 3 0 0 3 default 127.0.0.1 2 PASSIVE
[1] 1 1 3 3 0 1 3 default 127.0.0.1 2 PASSIVE
[2] 2 2 3 3 0 2 3 default 127.0.0.1 2 PASSIVE
X
check "environment of torchrun" cmp sorted expected
check "exit code 0" is $code 0
RANK=7 WORLD_SIZE=9 run -n 2 sh -c 'env | grep -c "^RANK=\|^WORLD_SIZE=2$"'
check "an inherited RANK is replaced" is "$(sort -u out | sed 's/^....//' | sort -u)" 2
run -n 2 sh -c '[ "$MASTER_PORT" -gt 1023 ] && echo $MASTER_PORT'
check "one port for all" is "$(sed 's/^....//' out | sort -u | wc -l)" 1
run -n 2 sh -c 'readlink /proc/self/fd/$FSDP_SHM_FD; stat -Lc %i /proc/self/fd/$FSDP_SHM_FD'
check "the segment is a memfd" has out 'memfd:fsdp'
check "the segment is common" is "$(sed 's/^....//' out | sort -u | wc -l)" 2

# ---- cores --------------------------------------------------------------------------------------
first=$(taskset -cp $$ | sed 's/.*: *//; s/[,-].*//')
taskset -c "$first" "$FSDP" run -n 2 sh -c 'echo $OMP_NUM_THREADS' >out 2>err
check "more ranks than cores is said" has err '2 ranks x 1 thread on 1 core: more ranks than cores'
check "at least one thread" is "$(sed 's/^....//' out | sort -u)" 1
taskset -c "$first" "$FSDP" run -n 1 true 2>err
check "cores of the affinity mask" has err '^fsdp: 1 rank x 1 thread on 1 core$'
OMP_NUM_THREADS=3 run -n 2 sh -c 'echo $OMP_NUM_THREADS'
check "OMP_NUM_THREADS is kept" is "$(sed 's/^....//' out | sort -u)" 3
check "and said" has err '2 ranks x 3 threads (OMP_NUM_THREADS) on'
OMP_NUM_THREADS=3 OMP_WAIT_POLICY=ACTIVE run -n 1 --threads 2 sh -c \
    'echo $OMP_NUM_THREADS $OMP_WAIT_POLICY'
check "--threads wins, a wait policy stays" is "$(cat out)" "[0] 2 ACTIVE"

# ---- output -------------------------------------------------------------------------------------
run -n 4 sh -c 'i=0; while [ $i -lt 300 ]; do echo "line $i of $RANK xxxxxxxxxxxxxxxxxxxxxxx"; \
    i=$((i+1)); done; printf "no newline"'
check "lines do not mix" is \
    "$(grep -c '^\[\([0-3]\)\] line [0-9]* of \1 xxxxxxxxxxxxxxxxxxxxxxx$' out)" 1200
check "the last line is ended" is "$(grep -c '^\[[0-3]\] no newline$' out)" 4
run -n 2 sh -c 'echo to-err >&2; echo to-out'
check "stderr stays stderr" is "$(grep -c to-err err)$(grep -c to-out out)$(grep -c to-err out)" 220
run -n 2 --log-dir "$dir/a/b" sh -c 'echo out $RANK; echo err $RANK >&2'
check "--log-dir makes its folder" is "$(cat a/b/rank-1.log)" "out 1
err 1"
check "--log-dir leaves the screen" is "$(cat out)" ""
run -n 2 --log-dir "$dir/a" sh -c 'echo last words; exit 4'
check "last lines from the log" has err '| last words'
check "the log is named" has err "rank-[01].log"
echo "some text" | "$FSDP" run -n 2 sh -c 'echo "$RANK:$(cat)"' >out 2>err
check "rank 0 has the input, others none" is "$(sort out)" "[0] 0:some text
[1] 1:"
"$FSDP" run -n 2 yes 2>err | head -n 1 >out
check "a closed pipe ends the job" is "${PIPESTATUS[0]}" 141
run -n 1 sh -c 'head -c 300000 /dev/zero | tr "\0" x'
check "a very long line arrives" is "$(tr -d '\n' <out | sed 's/\[0\] //g' | wc -c)" 300000

# ---- exit codes ---------------------------------------------------------------------------------
run -n 3 sh -c '[ $RANK = 1 ] && { echo why it failed; exit 7; }; exec sleep 100'
check "exit code of the rank that failed" is $code 7
check "it is named" has err 'rank 1 failed first: ended with exit code 7'
check "with its last lines" has err '| why it failed'
run -n 3 sh -c '[ $RANK = 2 ] && kill -SEGV $$; exec sleep 100'
check "128 + signal" is $code 139
check "the signal is named" has err 'rank 2 failed first: killed by signal 11 (SIGSEGV'
run -n 3 sh -c '[ $RANK = 0 ] && exit 0; echo later $RANK'
check "a rank may end early" is "$code $(grep -c later out)" "0 2"
# The cause ends only after a peer has blamed it.
mkfifo gate
run -n 3 sh -c 'case $RANK in 0) cat gate; exit 75;; 2) echo go >gate; exit 9;; esac; exec sleep 99'
check "a rank that blames a peer is not the cause" is $code 9
run -n 2 sh -c '[ $RANK = 1 ] && exit 75; exec sleep 100'
check "blame without a cause" is $code 75
run -n 2 sh -c 'trap "" TERM; if [ $RANK = 0 ]; then cat gate; exit 3; fi
    echo deaf >gate; while :; do sleep 0.1; done'
check "a rank deaf to SIGTERM is killed" is $code 3

# ---- bad command lines --------------------------------------------------------------------------
run -n 2 ./not-there
check "a missing program" is "$code" 127
check "is named" has err 'not-there.*No such file'
run -n 2 no-such-program-anywhere
check "a missing command" is $code 127
check "is named too" has err "no program 'no-such-program-anywhere'"
echo data >plain
run -n 2 ./plain
check "not executable" has err 'chmod +x ./plain'
printf 'echo from a script $RANK "$1"\n' >script
chmod +x script
run -n 1 ./script arg
check "a script without #!" is "$(cat out)" "[0] from a script 0 arg"
printf '#!/no/interpreter\n' >broken
chmod +x broken
run -n 2 ./broken
check "a missing interpreter" is "$code" 127
for n in 0 -1 257 x 1.5 ''; do
    run -n "$n" true
    check "-n '$n' is refused" is $code 2
    check "-n '$n' is explained" has err 'from 1 to 256'
done
run true
check "-n is missing" is $code 2
run -n 2
check "the program is missing" is $code 2
run -n 2 --nonsense true
check "an unknown option" is "$code $(grep -c -- --nonsense err)" "2 1"
run -n 2 --log-dir "$dir/plain/x" true
check "a log folder that cannot be made" has err 'cannot make the log folder'
run -n1 -- sh -c 'echo "$0 $1"' -n --grace
check "arguments of the program are its own" is "$(cat out)" "[0] -n --grace"

exit $failed
