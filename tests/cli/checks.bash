# checks.bash - what the tests of the program share: a folder of their own that goes at the end, and
# checks that say what they found. Sourced; a test ends with `exit $failed`.
: "${FSDP:?names the program under test}"
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
failed=0
unset RANK WORLD_SIZE LOCAL_RANK OMP_NUM_THREADS OMP_WAIT_POLICY

# check NAME COMMAND...: the command must be true.
check() {
    local name=$1
    shift
    if "$@"; then echo "ok   $name"; else
        echo "FAIL $name: $*"
        for f in out err; do [ -s "$f" ] && tail -n 30 "$f" | sed "s/^/     $f: /"; done
        failed=1
    fi
}
is() { [ "$1" = "$2" ] || { echo "     found '$1', expected '$2'"; return 1; }; }
isnt() { [ "$1" != "$2" ] || { echo "     found '$1' twice"; return 1; }; }
has() { grep -q -- "$2" "$1" || { echo "     $1 lacks '$2'"; return 1; }; }
hasnt() { ! grep -q -- "$2" "$1"; }
none() { [ ! -e "$1" ] || { echo "     $1 is there"; return 1; }; }
# until_true SECONDS COMMAND...
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.02
    done
}
