#!/bin/bash
# docs.sh: what the texts tell a reader to type works, and what they point at is there.
#
# Run are the code blocks, indented or fenced, that stand behind a line "<!-- run -->": those of one
# text in one empty folder, one after the other, until a command fails.
# ctest: timeout=120
set -euo pipefail

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/bin"
ln -s "$FSDP" "$tmp/bin/fsdp"
export PATH="$tmp/bin:$PATH" OMP_WAIT_POLICY=PASSIVE
cd "$FSDP_SOURCE"
texts=(*.md docs/*.md docs/*/*.md bench/*.md)
failed=0
ran=0

commands_of() {
    awk '
        /^<!-- run -->/ { wanted = 1; next }
        wanted && /^```/ { if (fenced) wanted = fenced = 0; else fenced = 1; next }
        fenced { print; next }
        wanted && /^    / { inside = 1; print substr($0, 5); next }
        inside && !/^$/ { wanted = inside = 0 }' "$1"
}

for text in "${texts[@]}"; do
    commands_of "$text" >"$tmp/script"
    [ -s "$tmp/script" ] || continue
    ran=$((ran + 1))
    mkdir "$tmp/folder"
    if ! (cd "$tmp/folder" && bash -eux -o pipefail "$tmp/script" >"$tmp/out" 2>&1); then
        echo "FAIL $text:"
        tail -25 "$tmp/out"
        failed=1
    fi
    rm -rf "$tmp/folder"
done
[ "$ran" -ge 3 ] || {
    echo "FAIL only $ran texts have commands to run"
    failed=1
}

# Links, and paths in the tree that a text names.
for text in "${texts[@]}"; do
    folder=$(dirname "$text")
    while read -r link; do
        [ -e "$folder/$link" ] || {
            echo "FAIL $text links to $link, which is not there"
            failed=1
        }
    done < <(grep -oE '\]\([^)#:]+\)' "$text" | sed 's/^](//; s/)$//')
    while read -r path; do
        [ -e "$path" ] || {
            echo "FAIL $text names $path, which is not there"
            failed=1
        }
    done < <(grep -v 'bench/results/' "$text" | grep -oE '`(src|include|tests|scripts|docs|configs|examples|bench|tools|cmake)/[A-Za-z0-9_./-]+`' |
        tr -d '`')
done

# Names of the library in the second column of the map from PyTorch stand in its headers.
while read -r name; do
    grep -qw "$name" include/fsdp/*.h || {
        echo "FAIL docs/from-pytorch.md names $name, which no header has"
        failed=1
    }
done < <(awk -F'|' '{ print $3 }' docs/from-pytorch.md | grep -oE '\b(fsdp|FSDP)_[A-Za-z0-9_]*[A-Za-z0-9]' | sort -u)
exit $failed
