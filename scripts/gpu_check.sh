#!/usr/bin/env bash
# Everything that needs a GPU, in four parts of 10 minutes at most each, which can be called one by one:
#
#   bash scripts/gpu_check.sh [PART ...]               on one GPU; all parts unless some are named
#   bash scripts/gpu_check.sh --rehearse [PART ...]    the same commands at tiny sizes on the CPU
#
#   tests    pytest -m gpu: kernels in full size and three types, compile, no waiting host, DDP, FSDP2, resume
#   bench    scripts.bench moe, router, step, experts, length; peers: step with models of other makes
#   train    scripts.bench train: kern, dense, softmax, sigmoid, tanh at 125M active, as many steps as fit
#   trace    scripts.bench step and moe with a trace and the ten largest kernels; compiled steps; tune
#
# Every piece of a part has a time limit and leaves FOLDER/PIECE.log, and .json if it measures, also when it is cut
# short; one that fails does not keep the next from running. Exit code 1 if any failed, 2 if none can run, 130 after
# Ctrl-C. It needs torch, numpy, tqdm, pydantic and tiktoken, for `tests` pytest and hypothesis too; no network.
# Variables: FOLDER (runs/gpu_check), PYTHON (python3), LIMIT (seconds a part, 580), DATA (prepared set to train on, in
# data/; else the installed packages' Python sources, as bytes), BATCH (sequences a step, 256).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rehearse=
[ "${1:-}" = --rehearse ] && { rehearse=1; shift; }
parts=("$@")
[ $# -eq 0 ] && parts=(tests bench train trace)
out="${FOLDER:-runs/gpu_check}"
python="${PYTHON:-python3}"
limit="${LIMIT:-580}"

refuse() {
    echo "error: $*" >&2
    exit 2
}

packages=(torch numpy tqdm pydantic tiktoken)
for part in "${parts[@]}"; do
    case $part in
        tests) packages+=(pytest hypothesis) ;;
        train) [ -z "${DATA:-}" ] || [ -f "data/$DATA/meta.json" ] || refuse "no data set data/$DATA: prepare it" \
            "with data.prepare, or leave DATA out to train on Python sources" ;;
        bench | trace) ;;
        *) refuse "no part $part: name tests, bench, train, trace, or none for all" ;;
    esac
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || refuse "LIMIT is $limit: give whole seconds"
mkdir -p "$out" && touch "$out/lock" || exit 2
if command -v flock > /dev/null; then
    exec 9> "$out/lock"
    flock -n 9 || refuse "another gpu_check.sh writes to $out: name another FOLDER"
fi
"$python" - "${packages[@]}" <<'END' || exit 2
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
sys.exit(f"error: {sys.executable} lacks {', '.join(missing)}" if missing else 0)
END
if [ -n "$rehearse" ]; then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
    config=(config/quickstart.toml --model.n_layer=1 --train.batch_size=1) few=(--train.micro_batch_size=1)
    many=("${few[@]}") rounds=(--rounds 1) lengths=(--lengths 64 128 256)
    sizes=(--tokens 16 --n-embd 16 --expert-hidden 16 --n-expert 2 --top-k 1 --rounds 1)
    dtypes=(float32 bfloat16) dtype=float32 compiled=(dense)
    training=(config/quickstart.toml "${few[@]}" --train.batch_size=1 --eval.windows=2 --overhead 9)
    set=packages-rehearsal roots=scripts
else
    roots=$("$python" -c 'import torch; torch.cuda.is_available() and print(torch.__path__[0])')
    [ -n "$roots" ] || refuse "torch finds no CUDA device here; --rehearse tries the commands on the CPU"
    config=(config/125m.toml --model.block_size=1024) few=(--train.micro_batch_size=8)
    many=(--train.micro_batch_size=32) rounds=(--rounds 30) lengths=()
    sizes=()
    dtypes=(float16 bfloat16) dtype=float16 compiled=(dense kern)
    training=(config/125m.toml --train.micro_batch_size=64 "--train.batch_size=${BATCH:-256}" --eval.windows=512)
    training+=(--overhead 45)
    set=packages roots=$(dirname "$roots")
fi
failed=0 summary=() logs=() pid=
export PYTHONUNBUFFERED=1

# After Ctrl-C, which `tail` may hear of before this script does.
stop() {
    wait "$pid"
    echo "stopped: figures and logs so far are in $out" >&2
    exit 130
}
trap stop INT

# piece NAME SECONDS COMMAND...: run it for so many seconds at most, and for no longer than is left of the part. It stays
# in this script's process group (--foreground): Ctrl-C reaches it, and a time limit interrupts it once, not twice.
piece() {
    local name=$1 most=$2 left=$((limit - SECONDS + begin)) from=$SECONDS code
    shift 2
    if ((left < 8)); then
        summary+=("$(printf '%-14s left out, no time' "$name")")
        [ "$name" = tune ] || failed=1
        return 1
    fi
    echo "== $name: $*"
    logs+=("$out/$name.log")
    : > "$out/$name.log" # is there before its reader
    timeout --foreground --signal=INT --kill-after=10 "$((most < left ? most : left))" "$@" > "$out/$name.log" 2>&1 &
    pid=$!
    tail -f -n +1 -s 0.2 --pid="$pid" "$out/$name.log" || stop
    wait "$pid"
    code=$?
    local word=ok
    ((code)) && word="FAILED, exit code $code"
    ((code == 124 || code == 137)) && word="FAILED, cut short"
    ((code)) && failed=1
    summary+=("$(printf '%-14s %4d s  %s' "$name" "$((SECONDS - from))" "$word")")
    return "$code"
}

# bench NAME SECONDS ARGUMENTS...: a piece of scripts.bench with its figures as JSON.
bench() {
    local name=$1 most=$2
    shift 2
    piece "$name" "$most" "$python" -m scripts.bench "$@" --json "$out/$name.json"
}

part_tests() {
    local tests=("$python" -m pytest -m gpu --durations=5 -p no:cacheprovider) kernels
    local steps=(tests/test_updates.py tests/test_gpu.py)
    mapfile -t kernels < <(grep -l "mark.gpu" tests/test_*.py | grep -v -e test_updates -e test_gpu)
    piece kernels 300 "${tests[@]}" "${kernels[@]}"
    piece steps 120 "${tests[@]}" "${steps[@]}" -k "not compiled"
    piece compiled 400 "${tests[@]}" "${steps[@]}" -k compiled
}

part_bench() {
    bench moe 90 moe "${sizes[@]}" "${rounds[@]}" --dtype "${dtypes[@]}"
    bench router 50 router "${config[@]}" "${many[@]}" "${rounds[@]}" --dtype $dtype
    bench step 100 step "${config[@]}" "${many[@]}" "${rounds[@]}" --routers dense softmax kern --peers \
        --dtype "${dtypes[@]}"
    bench experts 90 experts "${config[@]}" "${many[@]}" "${rounds[@]}" --model.router=kern --dtype $dtype
    bench length 80 length "${config[@]}" "${many[@]}" "${rounds[@]}" "${lengths[@]}" --dtype $dtype
    bench peers 140 step "${config[@]}" "${few[@]}" "${rounds[@]}" --routers dense kern --dtype "${dtypes[@]}"
}

part_train() {
    local name="${DATA:-$set}" left
    if [ -z "${DATA:-}" ]; then
        piece data 120 "$python" -m data.prepare stdlib --roots "$roots" --name "$set" --val-fraction 0.02 --force ||
            return
    fi
    left=$((limit - SECONDS + begin - 15))
    bench train "$left" train "${training[@]}" "--data.name=$name" --seconds "$left" \
        --folder "$out/train-$(date +%Y%m%d-%H%M%S)"
}

part_trace() {
    bench trace-step 60 step "${config[@]}" "${many[@]}" --rounds 5 --routers kern --peers --dtype $dtype \
        --profile "$out/step.trace.json.gz"
    bench trace-moe 60 moe "${sizes[@]}" --rounds 5 --dtype $dtype --profile "$out/moe.trace.json.gz"
    for router in "${compiled[@]}"; do
        bench "compiled-$router" 150 step "${config[@]}" "${many[@]}" "${rounds[@]}" --routers "$router" \
            --peers nanogpt --dtype $dtype --compile on
    done
    bench tune 150 tune "${sizes[@]}" --dtype float16
}

begin=0 # of a part, in seconds since the script's start
for part in "${parts[@]}"; do
    "part_$part"
    begin=$SECONDS
done
echo "== goals"
((${#logs[@]} == 0)) || cat "${logs[@]}" | grep "^goal: "
echo "== summary, $SECONDS s, figures and logs in $out"
printf '%s\n' "${summary[@]}"
exit $failed
