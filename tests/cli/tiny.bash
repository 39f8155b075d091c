# tiny.bash - what tests of training share: text of a small language, and runs of tiny.yaml.
# Sourced behind checks.bash.

# text SEED N: N words, in which some follow others.
text() {
    awk -v seed="$1" -v n="$2" 'BEGIN { srand(seed)
        split("the a one cat dog bird sees likes chases red small old and but", w)
        for (i = 0; i < n; i++) { k = int(rand() * 14) + 1
            printf "%s%s", w[k], (i % 9 == 8) ? ".\n" : " "; if (k < 4) printf "%s ", w[4 + int(rand() * 3)] } }'
}

# run NAME ARGUMENTS: a run of tiny.yaml in folder NAME; its losses, norms and rates in NAME.losses.
run() {
    local name=$1
    shift
    "$FSDP" train tiny.yaml --job.dump_folder "$name" "$@" >out 2>err
    code=$?
    [ -f "$name/metrics.jsonl" ] && sed 's/, "memory.*//' "$name/metrics.jsonl" >"$name.losses"
}
