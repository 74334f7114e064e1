#!/usr/bin/env bash
# The tests marked `numerics`, with every error at most half of its tolerance: the default ones under the instruction
# sets that torch, oneDNN and MKL can be held to on this CPU, then with 20 seeds; those marked `integration`, too, under
# the oldest set and with 3 seeds. Arguments go to pytest. --quick: one setting, one seed, the default ones.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -e .venv/bin/activate ] && source .venv/bin/activate
export TEST_TOLERANCE=0.5 OMP_NUM_THREADS=1
oldest="ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 TEST_SEED=1"
settings=("$oldest") at_size=()
if [ "${1:-}" = --quick ]; then
    shift
else
    for aten in ATEN_CPU_CAPABILITY={default,avx2} _=; do
        for onednn in ONEDNN_MAX_CPU_ISA={AVX2,AVX512_CORE} _=; do
            for mkl in MKL_CBWR={COMPATIBLE,AVX2} _=; do settings+=("$aten $onednn $mkl"); done
        done
    done
    for seed in {1..20}; do settings+=("TEST_SEED=$seed"); done
    at_size=("$oldest" TEST_SEED={1..3})
fi
failed=0 any=0
run() {  # tests with mark $1 under each further setting
    local mark=$1 setting printed code word
    for setting in "${@:2}"; do
        code=0 word=ok
        printed=$(env ${setting//_=/} python -m pytest -n 2 -m "$mark" "${arguments[@]}" 2>&1) || code=$?
        case $code in
            0) any=1 ;;
            5) echo "no test  $mark  ${arguments[*]}"; return ;;  # nor under the other settings
            *) word=FAILED failed=1 any=1 ;;
        esac
        echo "$word  $mark  ${setting//_=/}"
        if [ "$word" = FAILED ]; then tail -n 40 <<<"$printed"; fi
    done
}
arguments=("$@")
run "numerics and not integration" "${settings[@]}"
run "numerics and integration" "${at_size[@]}"
[ $any = 1 ] || exit 5  # as pytest where it finds no test
exit $failed
