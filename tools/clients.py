"""Use exports with other projects' clients. scripts/clients.sh installs these and calls this file.

    python -m tools.clients lm-eval FOLDER    six tasks: the scores of eval.downstream
    python -m tools.clients trl FOLDER        SFTTrainer, 50 steps with and without balance loss
    python -m tools.clients peft FOLDER       LoRA on attention and on experts, merged
    python -m tools.clients continue FOLDER   the runs' own continuations, for the next client
    python -m tools.clients vllm FOLDER       the same tokens and log-probabilities

FOLDER holds runs/NAME and exports/NAME. Each prints a line "result: …". The exit code is not 0 if
something differs or fails.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common.command import build_parser, command, run_command

REPO_ROOT = Path(__file__).parents[1]
VARIANTS = ("kern", "modern", "hash")
PROMPTS = (
    "class Stack:\n    def ",
    "import os\nimport sys\n\n",
    "for i in range(",
    '    """Return the number of ',
    "# The",
    "raise ValueError(",
    "def test_",
    "x = [1, 2, 3]\nprint(",
)
NEW_TOKENS = 20  # after each prompt
LIMIT_OF_BITS = 1e-5  # bits per byte in fp32
LIMIT_OF_LOGITS = 1e-4  # logits and log-probabilities in fp32, nats
BLOCK = 256  # tokens per sequence in TRL and PEFT
STEPS = 50


def expect(condition: bool, reason: str) -> None:
    """Raise ValueError with `reason` unless `condition` is true."""
    if not condition:
        raise ValueError(reason)


def load_export(folder: Path, name: str) -> Any:
    """Load the export of a variant in fp32, as a user does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "exports" / name, trust_remote_code=True)


def load_exported_tokenizer(folder: Path, name: str) -> Any:
    """Load the tokenizer of a variant's export; it needs no code."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "exports" / name, trust_remote_code=False)


def try_lm_eval(args: Namespace) -> str:
    """Score the six tasks by eval.downstream and by lm-eval's own command, and compare."""
    from eval import downstream
    from eval.tasks import TASKS
    from eval.trained import load_model

    run = args.folder / "runs" / "kern"
    options = []
    if args.tasks_dir:
        options += ["--tasks-dir", str(args.tasks_dir)]
    if args.limit:
        options += ["--limit", str(args.limit)]
    expect(downstream.main([str(run), "--device", "cpu", *options]) == 0, "eval.downstream failed")
    suffix = f"_limit{args.limit}" if args.limit else ""
    results = run / "eval" / f"{load_model(run).label}{suffix}" / "results.json"
    own = json.loads(results.read_text())["results"]

    output = args.folder / "lm-eval"
    run_lm_eval(args, output)
    theirs = json.loads(find_file(output, "results_*.json").read_text("utf-8"))["results"]
    documents = 0
    difference = 0.0
    for task in TASKS:
        for metric in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
            got = theirs[task].get(f"{metric},none")
            wanted = own[task].get(metric)
            expect(got == wanted, f"{task}: {metric} is {got}, by eval.downstream {wanted}")
        lines = find_file(output, f"samples_{task}_*.jsonl").read_text("utf-8").splitlines()
        bits = [score_sample(json.loads(line)) for line in lines]
        documents += len(bits)
        expect(len(bits) == own[task]["documents"], f"{task}: {len(bits)} documents")
        wanted = own[task]["bits_per_byte"]
        difference = max(difference, abs(sum(bits) / len(bits) - wanted))
    expect(difference < LIMIT_OF_BITS, f"bits per byte differ by {difference:.1e}")
    return (
        f"lm-eval {version('lm_eval')}: six tasks, {documents:,} documents: accuracies equal those "
        f"of eval.downstream, bits per byte differ by {difference:.1e} at most"
    )


def run_lm_eval(args: Namespace, output: Path) -> None:
    """Run lm-eval's command; its results and samples are written to `output`."""
    from eval.tasks import TASKS, check_tasks, write_task_spec

    specs = args.folder / "specs"
    for scratch in (output, specs):
        shutil.rmtree(scratch, ignore_errors=True)
    specs.mkdir()
    manager = check_tasks(list(TASKS), args.tasks_dir)
    tasks = [write_task_spec(manager, task, args.tasks_dir, specs) for task in TASKS]
    export = args.folder / "exports" / "kern"
    arguments = ["--model", "hf", "--tasks", ",".join(tasks), "--device", "cpu"]
    arguments += ["--model_args", f"pretrained={export},trust_remote_code=True,dtype=float32"]
    arguments += ["--batch_size", "8", "--log_samples", "--output_path", str(output)]
    if args.limit:
        arguments += ["--limit", str(args.limit)]
    subprocess.run([sys.executable, "-m", "lm_eval", "run", *arguments], check=True)


def find_file(folder: Path, pattern: str) -> Path:
    """Return the only file below `folder` of this name."""
    (file,) = folder.rglob(pattern)
    return file


def score_sample(sample: dict[str, Any]) -> float:
    """Bits per byte of the right answer, from lm-eval's log of a document."""
    target = sample["target"]
    if "option1" in sample["doc"]:  # WinoGrande: one answer after two contexts
        target = int(sample["doc"]["answer"]) - 1
    answer = sample["arguments"][f"gen_args_{target}"]["arg_1"]
    nats = -float(sample["filtered_resps"][int(target)][0])
    return nats / math.log(2) / len(answer.encode())


def try_trl(args: Namespace) -> str:
    """Fine-tune with SFTTrainer, with and without its balance loss."""
    losses, balanced = fine_tune(args.folder, coefficient=0.1)
    _, unbalanced = fine_tune(args.folder, coefficient=0.0)
    start, end = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    expect(end < start - 0.2, f"the loss does not fall: {start:.3f}, then {end:.3f}")
    expect(
        balanced < unbalanced,
        f"aux_loss after training with balance loss {balanced:.4f}, without {unbalanced:.4f}",
    )
    return (
        f"TRL {version('trl')}: SFTTrainer, {STEPS} steps: loss {start:.3f} -> {end:.3f}; then "
        f"aux_loss {balanced:.4f}, without balance loss {unbalanced:.4f}"
    )


def fine_tune(folder: Path, coefficient: float) -> tuple[list[float], float]:
    """Train `STEPS` steps on this project's pages.

    Args:
        folder: see the top of the file.
        coefficient: weight of the balance loss.

    Returns:
        Cross-entropy of each step; the balance loss of the trained model on the first batch, by
        the formula of this project.
    """
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # pyrefly: ignore[missing-import]

    model = load_export(folder, "kern")
    tokenizer = load_exported_tokenizer(folder, "kern")
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_length=BLOCK,
        router_aux_loss_coef=coefficient,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        seed=0,
    )
    chunks = [{"text": chunk} for chunk in cut_pages()]
    trainer = SFTTrainer(
        model, settings, train_dataset=Dataset.from_list(chunks), processing_class=tokenizer
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    expect(len(logs) == STEPS, f"{len(logs)} losses were logged")
    expect(("aux_loss" in logs[0]) == (coefficient > 0), f"logged: {', '.join(logs[0])}")
    losses = [line["loss"] - coefficient * line.get("aux_loss", 0.0) for line in logs]
    ids = make_batch(tokenizer)
    with torch.no_grad():
        return losses, model.eval()(ids, output_router_logits=True).aux_loss.item()


def cut_pages() -> list[str]:
    """Cut this project's documentation into texts of `BLOCK` bytes."""
    pages = [page.read_text("utf-8") for page in sorted(REPO_ROOT.glob("docs/*.md"))]
    text = "\n".join(pages).encode("ascii", "ignore").decode()
    count = len(text) // BLOCK
    return [text[i * BLOCK : (i + 1) * BLOCK] for i in range(count)]


def make_batch(tokenizer: Any) -> Any:
    """(8, BLOCK) int64 token ids of the first texts."""
    return tokenizer(cut_pages()[:8], return_tensors="pt").input_ids


def try_peft(args: Namespace) -> str:
    """Train LoRA on attention and on experts of each variant, and merge it."""
    results = []
    largest = 0.0
    for name in VARIANTS:
        up = "gate_up_proj" if name == "modern" else "up_proj"
        experts = {
            "target_modules": [],
            "target_parameters": [f"experts.{up}", "experts.down_proj"],
        }
        places = {"attention": {"target_modules": ["q_proj", "v_proj"]}, "experts": experts}
        for place, targets in places.items():
            start, end, difference = train_lora(args.folder, name, targets)
            print(name, place, start, end, difference)
            expect(end < start - 0.05, f"{name}, {place}: loss {start:.3f}, then {end:.3f}")
            expect(
                difference < LIMIT_OF_LOGITS,
                f"{name}, {place}: logits of the merged model differ by {difference:.1e}",
            )
            results.append(f"{name}, {place} {start:.3f} -> {end:.3f}")
            largest = max(largest, difference)
    return (
        f"PEFT {version('peft')}: LoRA, {STEPS} steps, loss: {'; '.join(results)}; merged and "
        f"loaded again, logits differ by {largest:.1e} at most"
    )


def train_lora(folder: Path, name: str, targets: dict[str, Any]) -> tuple[float, float, float]:
    """Train LoRA, save and load the adapter, merge it.

    Args:
        folder: see the top of the file.
        name: one of VARIANTS.
        targets: arguments of LoraConfig.

    Returns:
        The first loss and the last; the largest difference of logits after loading or merging.
    """
    import torch
    from peft import (  # pyrefly: ignore[missing-import]
        LoraConfig,
        PeftModel,
        get_peft_model,
    )

    torch.manual_seed(0)
    base = load_export(folder, name)
    before = {key: weight.clone() for key, weight in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **targets))
    tokenizer = load_exported_tokenizer(folder, name)
    ids = make_batch(tokenizer)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for key, weight in model.named_parameters():
        expect(weight.requires_grad == ("lora_" in key), f"{key} is trained")
    adapter = folder / "peft"
    shutil.rmtree(adapter, ignore_errors=True)
    model.save_pretrained(adapter)
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        fresh = load_export(folder, name)
        for key, weight in fresh.state_dict().items():
            expect(torch.equal(weight, before[key]), f"{key} has changed")
        loaded = PeftModel.from_pretrained(fresh, adapter).eval()
        difference = (loaded(input_ids=ids).logits - wanted).abs().max().item()
        merged = loaded.merge_and_unload()
        expect(not any("lora_" in key for key in merged.state_dict()), "LoRA is left")
        merged_difference = (merged(input_ids=ids).logits - wanted).abs().max().item()
    return losses[0], losses[-1], max(difference, merged_difference)


def write_continuations(args: Namespace) -> str:
    """Write the runs' own greedy continuations of PROMPTS with their log-probabilities."""
    import torch

    from eval.generation import SamplingParams, encode_prompt, generate
    from eval.trained import load_run

    texts: dict[str, list[dict[str, list]]] = {}
    for name in VARIANTS:
        trained, tokenizer = load_run(args.folder / "runs" / name)
        texts[name] = []
        for prompt in PROMPTS:
            ids = encode_prompt(tokenizer, prompt, trained.config.model.block_size)
            greedy = SamplingParams(temperature=0)
            steps = generate(trained.model, [ids], NEW_TOKENS, greedy)
            new = [tokens[0] for tokens in steps]
            whole = torch.tensor([ids + new])
            with torch.no_grad():
                hidden, _ = trained.model.hidden(whole)
                logits = trained.model.logits(hidden)[0, :-1].double()  # (T - 1, V)
            logprobs = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
            texts[name].append({"prompt": ids, "new": new, "logprobs": logprobs.tolist()})
    (args.folder / "continuations.json").write_text(json.dumps(texts))
    return f"continued {len(PROMPTS)} prompts with each of {', '.join(VARIANTS)}"


def try_vllm(args: Namespace) -> str:
    """Continue the prompts with vLLM, which runs the exports' own code, and compare."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams  # pyrefly: ignore[missing-import]

    largest = 0.0
    count = 0
    for name, texts in json.loads((args.folder / "continuations.json").read_text()).items():
        model = LLM(
            model=str(args.folder / "exports" / name),
            trust_remote_code=True,
            model_impl="transformers",
            dtype="float32",
            enforce_eager=True,
        )
        params = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        prompts = [{"prompt_token_ids": text["prompt"]} for text in texts]
        for text, answer in zip(texts, model.generate(prompts, params), strict=True):
            output = answer.outputs[0]
            new = list(output.token_ids)
            expect(new == text["new"], f"{name}: tokens {new}, those of the run {text['new']}")
            positions = [*answer.prompt_logprobs[1:], *output.logprobs]
            tokens = text["prompt"][1:] + new
            for position, token, wanted in zip(positions, tokens, text["logprobs"], strict=True):
                largest = max(largest, abs(position[token].logprob - wanted))
            count += len(new)
        del model
    expect(largest < LIMIT_OF_LOGITS, f"log-probabilities differ by {largest:.1e}")
    return (
        f"vLLM {find_vllm()}, transformers backend, CPU, fp32: {count} greedy tokens of "
        f"{', '.join(VARIANTS)} equal the runs'; log-probabilities differ by {largest:.1e} at most"
    )


def find_vllm() -> str:
    """Version of the installed vLLM, whatever the name of its package."""
    import vllm  # pyrefly: ignore[missing-import]

    return vllm.__version__


TRIALS = {
    "lm-eval": try_lm_eval,
    "trl": try_trl,
    "peft": try_peft,
    "continue": write_continuations,
    "vllm": try_vllm,
}


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run a trial and print its result."""
    parser = build_parser("tools.clients", __doc__)
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("folder", type=Path, help="made by scripts/clients.sh")
    parser.add_argument("--tasks-dir", type=Path, help="lm-eval: local files TASK.jsonl")
    parser.add_argument("--limit", type=int, help="lm-eval: documents per task")
    args = parser.parse_args(argv)
    result = TRIALS[args.trial](args)
    print(f"\nresult: {result}", flush=True)


if __name__ == "__main__":
    run_command(main)
