#!/usr/bin/env bash
# The runs of config/paper_size/runs.txt on one GPU, in order, for so many minutes:
#   bash scripts/paper_size.sh MINUTES [--rehearse]
# TEXT (text/) has train.jsonl.xz and val.jsonl.xz of `python -m data.packages`; OUT (runs/paper_size) gets
# records.tar.xz: config, metrics and log of every run, also of one that was cut. The same command resumes. A run that
# fails does not keep the next from running; the exit code is then 1, and 124 if time was over. --rehearse: two-layer
# models on a CPU. One of the pieces is a run that is killed and resumed.
set -uo pipefail
cd "$(dirname "$0")/.."
stop() { echo "error: $1" >&2; exit 2; }
# a start, a compiled step and 30 s to save take most of two minutes
[[ "$*" =~ ^([2-9]|[1-9][0-9]+)( --rehearse)?$ ]] ||
    stop "paper_size.sh $*: expected a whole number of minutes, 2 or more, and --rehearse or nothing"
end=$((SECONDS + 60 * $1))
text="${TEXT:-text}" out="${OUT:-runs/paper_size}" python="${PYTHON:-python3}"
config=(config/paper_size/125m.toml --run.dir="$out")
steps=()
if [ "${2:-}" = --rehearse ]; then
    config+=(--model.n_layer=2 --model.n_embd=64 --model.n_head=2 --model.expert_hidden=4 --model.block_size=64
        --train.dtype=float32 --train.device=cpu --optim.warmup_steps=5 --eval.interval=10 --eval.windows=16)
    steps=(--train.max_steps=30)
else
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1) ||
        stop "no NVIDIA GPU; --rehearse runs small models on a CPU"
    [ "${memory:-0}" -ge 40000 ] || stop "the GPU has ${memory:-0} MiB, 125m.toml with a checkpoint's copy needs 40,000"
fi
"$python" -c "import wandb" 2> /dev/null && config+=(--log.wandb=offline)
mkdir -p "$out"
if [ ! -e data/packages/meta.json ]; then
    for split in train val; do
        [ -e "$text/$split.jsonl.xz" ] ||
            stop "$text/$split.jsonl.xz is missing: python -m data.packages config/paper_size --out $text"
    done
    (cd "$text" && sha256sum --quiet --check -) < config/paper_size/sha256.txt ||
        stop "$text has another text than config/paper_size/sha256.txt: build it again"
    for split in train val; do
        xz --decompress --stdout "$text/$split.jsonl.xz" > "$out/$split.jsonl" || stop "xz is needed, and 330 MB of disk"
    done
    ranks=()  # without a network GPT-2's ranks lie beside the text
    [ -e "$text/gpt2.tiktoken" ] && ranks=(--bpe-ranks "$text/gpt2.tiktoken")
    "$python" -m data.prepare text --source "$out/train.jsonl" --val-source "$out/val.jsonl" "${ranks[@]}" \
        --name packages --workers "$(nproc)" || stop "the text could not be prepared"
    rm "$out"/{train,val}.jsonl
    echo "prepared after $SECONDS s"
fi
keep() {  # the figures so far; never a part of the file
    find "$out" -name wandb -prune -o -regex '.*[.]\(toml\|jsonl\|log\|txt\)' -print |
        tar cJf "$out/records.tmp" -T - 2> /dev/null && mv "$out/records.tmp" "$out/records.tar.xz"
}
trap keep EXIT
code=0
run() {  # NAME OVERRIDES…: train to the end or until time is over
    local name=$1 left=$((end - SECONDS - 30)) status=0 start=$SECONDS  # 30 s to save 6 GB
    [ "$left" -gt 20 ] || { echo "$name: no time left"; code=124; return 1; }
    timeout --signal=TERM --kill-after=60 "$left" \
        "$python" train.py "${config[@]}" --run.name="$name" "${@:2}" >> "$out/$name.log" 2>&1 || status=$?
    echo "$name: exit code $status after $((SECONDS - start)) s; $(grep -v '^$' "$out/$name.log" | tail -n 1)" |
        tee -a "$out/summary.txt"
    keep
    [ "$status" = 0 ] || { code=$([ "$status" = 124 ] && echo 124 || echo 1); return 1; }
}
kill_and_resume() {  # a run that is killed halfway ends with the losses of one that is not
    local short=(--train.max_steps=60 --train.checkpoint_interval=20 --train.deterministic=true --log.interval=1)
    short+=(--eval.interval=20 --optim.warmup_steps=10)
    [ -e "$out/resume.txt" ] && return
    [ -e "$out/whole/checkpoints/step_00000060" ] || run whole "${short[@]}" || return
    ( while ! grep -q '"step": 3[0-9]' "$out/killed/metrics.jsonl" 2> /dev/null; do sleep 0.2; done
      for cmdline in $(grep -lszx -- '--run.name=killed' /proc/[0-9]*/cmdline); do  # containers may lack pkill
          pid=${cmdline#/proc/}
          kill -KILL "${pid%/cmdline}" 2> /dev/null
      done ) &
    local killer=$! before=$code
    run killed "${short[@]}"  # ends with 137, or 124 if time was over first
    kill "$killer" 2> /dev/null
    [ "$code" = 124 ] && return
    code=$before
    run killed "${short[@]}" || return
    grep -q '^killed: exit code 137' "$out/summary.txt" || { echo "killed: was not killed"; code=1; return; }
    for name in whole killed; do
        grep -o '"step": [0-9]*\|"\(train\|val\)/loss": [-0-9.e]*' "$out/$name/metrics.jsonl" > "$out/$name.losses"
    done
    if cmp "$out/whole.losses" "$out/killed.losses"; then echo "equal to the last digit"; else echo "differ"; fi |
        tee "$out/resume.txt"
    rm -rf "$out"/{whole,killed}/checkpoints
}
while read -r name overrides; do
    case $name in ''|'#'*) continue ;; esac
    grep -q "^$name: exit code 0" "$out/summary.txt" 2> /dev/null && continue  # finished in an earlier call
    if [ "$name" = kill-and-resume ]; then
        kill_and_resume
        [ "$code" = 124 ] && break
        continue
    fi
    # shellcheck disable=SC2086  # overrides are words
    run "$name" $overrides "${steps[@]}"
    [ "$code" = 124 ] && break
    if "$python" -c "import lm_eval" 2> /dev/null && [ -d "${TASKS:-}" ]; then
        "$python" -m eval.downstream "$out/$name" --tasks-dir "$TASKS" --tasks arc_easy,piqa,sciq >> "$out/$name.log" 2>&1
    fi
    rm -rf "$out/$name/checkpoints"  # 6 GB each; a finished run is not resumed
done < config/paper_size/runs.txt
keep
exit $code
