#!/usr/bin/env bash
# Everything that needs a GPU, in four parts of 10 minutes at most each, which can be called one by one:
#
#   bash scripts/gpu_check.sh [PART ...]               on one GPU; all parts unless some are named
#   bash scripts/gpu_check.sh --rehearse [PART ...]    the same commands at tiny sizes on the CPU
#
#   tests    pytest -m gpu: kernels in full size and three types, compile, no waiting host, DDP, FSDP2, resume
#   bench    scripts.bench moe, router, step (with models of other makes), experts, length, step compiled, tune
#   train    scripts.bench train: kern, dense, softmax, sigmoid, tanh at 125M active, as many steps as fit
#   trace    scripts.bench step and moe with a trace and the ten largest kernels
#
# Every piece of a part has a time limit and leaves FOLDER/PIECE.log, and .json if it measures, also when it is cut
# short; one that fails does not keep the next from running. Exit code 1 if any failed, 2 if none can run. It needs
# torch, numpy, tqdm, pydantic and tiktoken, for `tests` pytest and hypothesis too; no network. Variables: FOLDER
# (runs/gpu_check), PYTHON (python3), LIMIT (seconds a part, 590), DATA (prepared set to train on, in data/; without it,
# or where it is not there, the installed packages' Python sources as bytes), BATCH (sequences a step, 256).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rehearse=
[ "${1:-}" = --rehearse ] && { rehearse=1; shift; }
parts=("$@")
[ $# -eq 0 ] && parts=(tests bench train trace)
out="${FOLDER:-runs/gpu_check}"
python="${PYTHON:-python3}"
limit="${LIMIT:-590}"
for part in "${parts[@]}"; do
    case $part in tests | bench | train | trace) ;; *)
        echo "error: no part $part: name tests, bench, train, trace, or none for all" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$out" || exit 2

"$python" - <<'END' || exit 2
import importlib.util, sys
missing = [name for name in "torch numpy tqdm pydantic tiktoken".split() if importlib.util.find_spec(name) is None]
sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}" if missing else 0)
END
if [ -n "$rehearse" ]; then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
    config="config/quickstart.toml --model.n_layer=1 --train.micro_batch_size=1 --train.batch_size=1"
    sizes="--tokens 16 --n-embd 16 --expert-hidden 16 --n-expert 2 --top-k 1 --rounds 1" rounds="--rounds 1"
    length="--lengths 64 128 256" dtypes="float32 bfloat16" dtype="float32" compiled=dense
    training="config/quickstart.toml --train.micro_batch_size=1 --train.batch_size=1 --eval.windows=2 --overhead 6"
    batch=1 roots="scripts"
else
    "$python" -c 'import torch; torch.cuda.is_available() or exit(1)' || {
        echo "error: torch finds no CUDA device here; --rehearse tries the commands on the CPU" >&2
        exit 2
    }
    config="config/125m.toml --model.block_size=1024 --train.micro_batch_size=32"
    sizes="" rounds="--rounds 30" length="" dtypes="float16 bfloat16" dtype="float16" compiled="dense kern"
    training="config/125m.toml --train.micro_batch_size=64 --eval.windows=512 --overhead 45"
    batch="${BATCH:-256}" roots=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
fi
failed=0 summary=()

# piece NAME SECONDS COMMAND...: run it for so many seconds at most, and for no longer than is left of the part.
piece() {
    local name=$1 most=$2 left=$((limit - SECONDS + begin)) from=$SECONDS code
    shift 2
    if ((left < 8)); then
        summary+=("$(printf '%-14s left out, no time' "$name")")
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
    summary+=("$(printf '%-14s %4d s  %s' "$name" "$((SECONDS - from))" "$word")")
}

# bench NAME SECONDS ARGUMENTS...: a piece of scripts.bench with its figures as JSON.
bench() {
    local name=$1 most=$2
    shift 2
    piece "$name" "$most" "$python" -m scripts.bench "$@" --json "$out/$name.json"
}

tests() {
    local tests="$python -m pytest -m gpu --durations=5 -p no:cacheprovider"
    piece steps 280 $tests tests/test_updates.py tests/test_gpu.py
    piece kernels 400 $tests $(grep -l "mark.gpu" tests/test_*.py | grep -v -e test_updates -e test_gpu)
}

bench_all() {
    bench moe 90 moe $sizes $rounds --dtype $dtypes
    bench router 60 router $config $rounds --dtype $dtype
    bench step 150 step $config $rounds --routers dense softmax kern --dtype $dtypes
    bench experts 80 experts $config $rounds --model.router=kern --dtype $dtype
    bench length 80 length $config $rounds $length --dtype $dtype
    for router in $compiled; do
        bench "compiled-$router" 80 step $config $rounds --routers $router --peers --dtype $dtype --compile on
    done
    bench tune 150 tune $sizes --dtype float16
}

# Training on DATA, or on what is installed, as bytes.
train() {
    local name="${DATA:-}" own=
    if [ -z "$name" ] || [ ! -f "data/$name/meta.json" ]; then
        name=packages own="--model.vocab_size=257"
        piece data 120 "$python" -m data.prepare stdlib --roots $roots --name packages --val-fraction 0.02
    fi
    rm -rf "$out/runs"
    local left=$((limit - SECONDS + begin - 15))
    bench train "$left" train $training --train.batch_size=$batch --data.name=$name $own --seconds "$left" \
        --folder "$out/runs"
}

trace() {
    bench trace-step 150 step $config --rounds 5 --routers kern --peers --dtype $dtype --profile "$out/step.trace.json.gz"
    bench trace-moe 90 moe $sizes --rounds 5 --dtype $dtype --profile "$out/moe.trace.json.gz"
}

export PYTHONUNBUFFERED=1
whole=$SECONDS
for part in "${parts[@]}"; do
    begin=$SECONDS
    [ "$part" = bench ] && part=bench_all
    $part
done
echo "== goals"
cat "$out"/*.log | grep "^goal: "
echo "== summary, $((SECONDS - whole)) s, figures and logs in $out"
printf '%s\n' "${summary[@]}"
exit $failed
