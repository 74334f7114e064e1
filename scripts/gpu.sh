#!/usr/bin/env bash
# What needs a GPU, in order of worth, for so many minutes: bash scripts/gpu.sh [MINUTES, default 10] [FOLDER, runs/gpu]
# Each piece writes FOLDER/PIECE.log and, if it times something, FOLDER/PIECE.json as it goes; the next one starts
# whatever became of it. The exit code is 1 if a piece failed, 124 if the time was over.
set -uo pipefail
cd "$(dirname "$0")/.."
end=$((SECONDS + 60 * ${1:-10}))
folder="${2:-runs/gpu}"
python="${PYTHON:-python3}"
nvidia-smi > /dev/null || { echo "error: nvidia-smi finds no NVIDIA GPU" >&2; exit 2; }
mkdir -p "$folder"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$folder/device.txt"
git rev-parse HEAD > "$folder/commit.txt" 2> /dev/null
code=0
piece() {  # NAME COMMAND…
    local name=$1 left=$((end - SECONDS)) status=0
    if [ "$left" -le 0 ]; then
        echo "$name: no time left"
        code=124
        return
    fi
    timeout "$left" "${@:2}" > "$folder/$name.log" 2>&1 || status=$?
    echo "$name: exit code $status, $folder/$name.log"
    [ "$status" = 0 ] || code=$([ "$status" = 124 ] && echo 124 || echo 1)
}
bench() { piece "$1" "$python" -m tools.bench "${@:2}" --json "$folder/$1.json"; }
flagship=(config/125m.toml --model.block_size=1024 --train.micro_batch_size=32)
piece golden "$python" -m tools.golden
bench step-fp16 step "${flagship[@]}" '--model.router=[dense,softmax,sigmoid,tanh,kern]' --profile "$folder/step-fp16.trace.json.gz"
bench moe moe
bench step-bf16 step "${flagship[@]}" --train.dtype=bfloat16 '--model.router=[dense,kern]'
piece tests "$python" -m pytest -q -n 6 -m gpu
exit $code
