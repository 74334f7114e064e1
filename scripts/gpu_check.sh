#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, in 10 minutes at most:
#
#   bash scripts/gpu_check.sh [FOLDER]                on one GPU; figures and logs go to FOLDER (runs/gpu_check)
#   bash scripts/gpu_check.sh --rehearse [FOLDER]     the same commands at tiny sizes on the CPU
#
# Each piece has a time limit of its own and leaves FOLDER/<piece>.log, and .json if it is a benchmark, also when it is
# cut short; a piece that fails does not keep the next from running. Exit code 1 if any failed, 2 if none can run.
# Needs torch, triton, numpy, tqdm, pydantic, tomli-w, pytest and hypothesis. PYTHON names another interpreter than
# python3, LIMIT another number of seconds for all.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rehearse=
[ "${1:-}" = --rehearse ] && { rehearse=1; shift; }
out="${1:-runs/gpu_check}"
python="${PYTHON:-python3}"
limit="${LIMIT:-590}"
mkdir -p "$out" || exit 2

"$python" - <<'EOF' || exit 2
import importlib.util, sys
needed = "torch triton numpy tqdm pydantic tomli_w pytest hypothesis".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}" if missing else 0)
EOF
if [ -n "$rehearse" ]; then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
    config="config/quickstart.toml --model.n_layer=1 --train.micro_batch_size=1 --train.batch_size=1 --rounds 1"
    sizes="--tokens 16 --n-embd 16 --expert-hidden 16 --n-expert 2 --top-k 1 --rounds 1" rounds=
    length="--lengths 64 128 256" dtypes="float32 bfloat16" dtype="float32" compiled=dense
else
    "$python" -c 'import torch; torch.cuda.is_available() or exit(1)' || {
        echo "error: torch finds no CUDA device here; --rehearse tries the commands on the CPU" >&2
        exit 2
    }
    config="config/125m.toml --model.block_size=1024 --train.micro_batch_size=32"
    sizes="" rounds="--rounds 30" length="" dtypes="float16 bfloat16" dtype="float16" compiled="dense kern"
fi

begin=$SECONDS failed=0 summary=()

# piece NAME SECONDS COMMAND...: run it for so many seconds at most, and for no longer than is left.
piece() {
    local name=$1 most=$2 left=$((limit - SECONDS + begin)) from=$SECONDS code
    shift 2
    if ((left < 8)); then
        summary+=("$(printf '%-10s left out, no time' "$name")")
        [ "$name" = tune ] || failed=1
        return
    fi
    echo "== $name: $*"
    timeout --signal=INT --kill-after=5 "$((most < left ? most : left))" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    local word=ok
    ((code)) && word="FAILED, exit code $code"
    ((code == 124 || code == 137)) && word="FAILED, cut short"
    ((code)) && failed=1
    summary+=("$(printf '%-10s %4d s  %s' "$name" "$((SECONDS - from))" "$word")")
}

# bench NAME SECONDS ARGUMENTS...: a piece of scripts.bench with its figures as JSON.
bench() {
    local name=$1 most=$2
    shift 2
    piece "$name" "$most" "$python" -m scripts.bench "$@" --json "$out/$name.json"
}

export PYTHONUNBUFFERED=1
tests="$python -m pytest -m gpu --durations=5 -p no:cacheprovider"
piece steps 60 $tests tests/test_updates.py
piece tests 150 $tests $(grep -l "mark.gpu" tests/test_*.py | grep -v test_updates)
bench moe 90 moe $sizes $rounds --dtype $dtypes --profile "$out/moe.trace.json.gz"
bench router 60 router $config $rounds --dtype $dtype
bench step 90 step $config --routers dense softmax kern --dtype $dtypes --profile "$out/step.trace.json.gz"
bench experts 90 experts $config --model.router=kern --dtype $dtype
bench length 90 length $config $length --dtype $dtype
for router in $compiled; do bench "compiled-$router" 90 step $config --routers $router --dtype $dtype --compile on; done
bench tune 150 tune $sizes --dtype float16

echo "== goals"
cat "$out"/*.log | grep "^goal: "
echo "== summary, $((SECONDS - begin)) s, figures and logs in $out"
printf '%s\n' "${summary[@]}"
exit $failed
