#!/bin/sh
# conformance.sh: writes docs/conformance.md anew from tests/conformance/rows.def, with a built tree.
#
#   scripts/conformance.sh [build folder]      default: build
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$top/build}
{
    cat <<'END'
# Conformance with FSDP2

One row for each test of PyTorch's `test/distributed/_composable/fsdp/`: whether it means something
here, and what this project does about it. Written from `tests/conformance/rows.def` by
`scripts/conformance.sh`; a test fails when it is out of date.

- *yes*: as it is; *yes\**: with the adaptation named in the row; *GPU*, *Python*: means something
  there only.
- *tested*: the test of that name in `tests/conformance/test_conf_*.c`; *parted on purpose*: tested
  too, but the behaviour is ours and the row says which hazard of FSDP2 it does away with.

Tests run on 1, 2 and 4 ranks, and on 8 where the row asks for it, as threads, and some of each file
as processes. Parity means that in each of 10 steps of Adam every rank's loss equals that of an
unsharded module whose gradients are averaged over the ranks. Where nothing but the cut differs this
is shown to the bit.

`ctest --test-dir build -L conformance` runs them; the last one prints this table with the number of
checks that each row made, and fails if a row that is to be tested did not run.

END
    "$build/tests/conformance/conformance_table" --markdown | tail -n +2
} > "$top/docs/conformance.md.tmp"
mv "$top/docs/conformance.md.tmp" "$top/docs/conformance.md"
