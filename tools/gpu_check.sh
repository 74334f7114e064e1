#!/usr/bin/env bash
# Everything that needs a GPU, in four parts that take 28 minutes together and can be run one by one:
#
#   bash tools/gpu_check.sh [PART ...]                 on one GPU; all parts unless some are named
#   bash tools/gpu_check.sh --rehearse [PART ...]      the same commands at tiny sizes on the CPU
#
#   bench    tools.bench moe, step in two types, router
#   trace    tools.bench step and moe with a trace and the largest kernels; compiled steps
#   tests    tools.golden: 100 steps of five routers on the GPU against the CPU; pytest -m gpu: kernels in full size
#            and three types, compile, no waiting host, DDP, FSDP2, resume to the bit; with pytest-xdist in four
#            processes, since compiling takes most of the time
#   train    scripts.sweep: kern, dense, softmax, sigmoid, tanh at 125M active, STEPS steps each; compare the runs
#            with scripts.report (which needs matplotlib)
#
# A part is made of pieces. Each has a time limit and does not keep the next from running when it fails. FOLDER gets at
# most five files: gpu_check.log, to which all pieces write, figures-PART-PART.json with each piece's figures, commit,
# device, driver and versions (docs/gpu.md), two traces, and train.tar.gz with the runs. Exit code 1 if any piece failed,
# 2 if none can run, 130 after Ctrl-C. It needs no network, and of packages torch, numpy, tqdm, pydantic, tiktoken and
# safetensors, for `tests` also pytest and hypothesis.
# Variables: FOLDER (runs/gpu_check), PYTHON (python3), LIMIT (seconds per part, 415), STEPS (80), BATCH (sequences per
# step, 256), DATA (prepared set in data/ to train on; by default the installed packages' Python sources, as bytes).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rehearse=
[ "${1:-}" = --rehearse ] && { rehearse=1; shift; }
parts=("$@")
[ $# -eq 0 ] && parts=(bench trace tests train)
out="${FOLDER:-runs/gpu_check}"
python="${PYTHON:-python3}"
limit="${LIMIT:-415}"

refuse() {
    echo "error: $*" >&2
    exit 2
}

for part in "${parts[@]}"; do
    [[ $part =~ ^(bench|trace|tests|train)$ ]] || refuse "no part $part: name bench, trace, tests, train, or none for all"
done
if [ -n "$rehearse" ]; then
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
    config=(config/quickstart.toml --model.n_layer=1 --train.batch_size=1)
    many=(--train.micro_batch_size=1)
    rounds=(--rounds 1)
    sizes=(--shape 16 16 16 2 1 --rounds 1)
    dtypes=(float32 bfloat16) dtype=float32 compiled=(dense) device=cpu
    training=(config/quickstart.toml --train.micro_batch_size=1 --train.batch_size=1 --eval.windows=2)
    steps=10 set=packages-rehearsal roots=runtime held_out=0.2
else
    roots=$("$python" -c 'import torch; torch.cuda.is_available() and print(torch.__path__[0])')
    [ -n "$roots" ] || refuse "torch finds no CUDA device here; --rehearse tries the commands on the CPU"
    config=(config/125m.toml --model.block_size=1024)
    many=(--train.micro_batch_size=32)
    rounds=(--rounds 30) sizes=()
    dtypes=(float16 bfloat16) dtype=float16 compiled=(dense kern) device=cuda
    training=(config/125m.toml --train.micro_batch_size=64 "--train.batch_size=${BATCH:-256}" --eval.windows=512)
    steps=${STEPS:-80} set=packages roots=$(dirname "$roots") held_out=0.02
fi
mkdir -p "$out" || exit 2
failed=0 summary=() log="$out/gpu_check.log" part=
figures=$(mktemp -d) || exit 2
export PYTHONUNBUFFERED=1
trap 'rm -rf "$figures"' EXIT
trap 'merge; echo "stopped: figures and logs so far are in $out" >&2; exit 130' INT

# merge: the JSON files of all pieces as one, {"PIECE": ...}
merge() {
    local file between=
    compgen -G "$figures/*.json" > /dev/null || return 0
    {
        printf '{'
        for file in "$figures"/*.json; do
            [ -s "$file" ] || continue
            printf '%s\n"%s": ' "$between" "$(basename "$file" .json)"
            cat "$file"
            between=,
        done
        printf '}\n'
    } > "$out/figures-$(IFS=-; echo "${parts[*]}").json"
}

# piece NAME SECONDS COMMAND...: run it for SECONDS at most, and for no longer than is left of the part. It stays in this
# script's process group (--foreground): Ctrl-C reaches it, and a time limit interrupts it once, not twice.
piece() {
    local name=$1 most=$2 left=$((limit - SECONDS + begin)) from=$SECONDS code word size
    shift 2
    if ((left < 8)); then
        summary+=("$(printf '%-14s left out, no time' "$name")")
        failed=1
        return
    fi
    echo "== $name: $*" | tee -a "$log"
    size=$(wc -c < "$log")
    timeout --foreground --signal=INT --kill-after=10 "$((most < left ? most : left))" "$@" >> "$log" 2>&1
    code=$?
    tail -c "+$((size + 1))" "$log"
    merge
    case $code in
        0) word=ok ;;
        124 | 137) word="FAILED, interrupted" failed=1 ;;
        *) word="FAILED, exit code $code" failed=1 ;;
    esac
    summary+=("$(printf '%-14s %4d s  %s' "$name" "$((SECONDS - from))" "$word")")
}

# bench NAME SECONDS ARGUMENTS...: a piece of tools.bench with its figures as JSON.
bench() {
    piece "$1" "$2" "$python" -m tools.bench "${@:3}" --json "$figures/$1.json"
}

# about: commit, device, driver and versions, for whoever reads figures.json elsewhere
about() {
    "$python" - "$(git rev-parse HEAD 2> /dev/null)" "$figures/about.json" << 'PYTHON'
import datetime, importlib.metadata, json, platform, subprocess, sys

import torch

about = {"commit": sys.argv[1], "date": str(datetime.date.today()), "python": platform.python_version()}
about |= {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "cpu"}
if torch.cuda.is_available():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    about |= {"device": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    about["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    about["triton"] = importlib.metadata.version("triton")
with open(sys.argv[2], "w") as file:
    json.dump(about, file)
PYTHON
}

part_bench() {
    local step=("${config[@]}" "${many[@]}" "${rounds[@]}" --train.compile=off) type
    bench moe 90 moe "${sizes[@]}" "${rounds[@]}" --dtype "${dtypes[@]}"
    for type in "${dtypes[@]}"; do
        bench "step-$type" 75 step "${step[@]}" --model.router={dense,softmax,kern} "--train.dtype=$type"
    done
    bench router 90 router "${step[@]}" --model.router={softmax,sigmoid,tanh,kern} --train.dtype=$dtype
}

part_trace() {
    local step=("${config[@]}" "${many[@]}" --train.dtype=$dtype) router
    bench trace-step 60 step "${step[@]}" --train.compile=off --rounds 5 --model.router=kern \
        --profile "$out/step.trace.json.gz"
    bench trace-moe 50 moe "${sizes[@]}" --rounds 5 --dtype $dtype --profile "$out/moe.trace.json.gz"
    for router in "${compiled[@]}"; do
        bench "compiled-$router" 130 step "${step[@]}" "${rounds[@]}" "--model.router=$router" --train.compile=on
    done
}

part_tests() {
    local tests=("$python" -m pytest -m gpu --durations=5 -p no:cacheprovider) kernels
    local steps=(tests/test_updates.py tests/test_gpu.py)
    "$python" -c 'import xdist' 2> /dev/null && tests+=(-n 4)
    mapfile -t kernels < <(grep -l "mark.gpu" tests/test_*.py | grep -v -e test_updates -e test_gpu)
    piece golden 90 "$python" -m tools.golden --device "$device" --json "$figures/golden.json"
    piece kernels 220 "${tests[@]}" "${kernels[@]}"
    piece steps 400 "${tests[@]}" "${steps[@]}"
}

part_train() {
    local runs
    runs="train-$(date +%Y%m%d-%H%M%S)"
    if [ -z "${DATA:-}" ]; then
        piece data 60 "$python" -m data.prepare stdlib --roots "$roots" --name "$set" --val-fraction $held_out --force
    fi
    piece train "$limit" "$python" -m scripts.sweep "${training[@]}" "--data.name=${DATA:-$set}" "--run.dir=$out/$runs" \
        '--model.router=["kern", "dense", "softmax", "sigmoid", "tanh"]' "--train.max_steps=$steps" \
        "--optim.warmup_steps=$((steps / 10))" "--eval.interval=$(((steps + 7) / 8))" --train.keep_checkpoints=1 \
        --train.compile=off
    rm -rf "$out/$runs"/*/checkpoints
    [ -d "$out/$runs" ] && tar -czf "$out/train.tar.gz" -C "$out" "$runs" && rm -rf "${out:?}/$runs"
    summary+=("compare runs:  tar -xzf $out/train.tar.gz && python -m scripts.report $runs/*")
}

about
begin=0 # of a part, in seconds since the script's start
for part in "${parts[@]}"; do
    "part_$part"
    begin=$SECONDS
done
echo "== summary, $SECONDS s, figures and logs in $out"
printf '%s\n' "${summary[@]}"
exit $failed
