#!/usr/bin/env bash
# The default tests marked `numerics`, with every error at most half of its tolerance: under the instruction sets that torch,
# oneDNN and MKL can be held to on this CPU, then with 20 seeds. Arguments go to pytest. --quick: one setting, one seed.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -e .venv/bin/activate ] && source .venv/bin/activate
export TEST_TOLERANCE=0.5 OMP_NUM_THREADS=1
settings=("ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 TEST_SEED=1")
if [ "${1:-}" = --quick ]; then
    shift
else
    for aten in ATEN_CPU_CAPABILITY={default,avx2} _=; do
        for onednn in ONEDNN_MAX_CPU_ISA={AVX2,AVX512_CORE} _=; do
            for mkl in MKL_CBWR={COMPATIBLE,AVX2} _=; do settings+=("$aten $onednn $mkl"); done
        done
    done
    for seed in {1..20}; do settings+=("TEST_SEED=$seed"); done
fi
failed=0
for setting in "${settings[@]}"; do
    if printed=$(env ${setting//_=/} python -m pytest -n 2 -m "numerics and not integration" "$@" 2>&1); then word=ok; else word=FAILED failed=1; fi
    echo "$word  ${setting//_=/}"
    if [ $word = ok ]; then grep -a "^largest error" <<<"$printed"; else tail -n 40 <<<"$printed"; fi
done
exit $failed
