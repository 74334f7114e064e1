"""Export a trained run to Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT                       into a new folder
    python -m scripts.export runs/quickstart-kern OUT --check               load it again and compare it with the run
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors, config.json, generation_config.json, the tokenizer's files, README.md
(a model card) and config.toml (the run's settings). A dense model with learned positions is written
as a GPT-2, a mixture that OLMoE, Qwen3-MoE or Mixtral computes as one of these, any other with the
code it needs. The exit code of --check is 1 if something differs.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attention import KVCache
from common.command import build_parser, command, require_packages, run_command
from common.text import first_line, markdown_table
from configure.schema import Model
from data.tokenizer import Tokenizer, token_bytes
from eval.trained import Trained, add_run_arguments, load_run
from hf.formats import FORMATS, OPEN_MOES
from hf.tokenizer_files import write_json, write_tokenizer
from model import GPT, count_parameters
from router import find_spec
from runtime import RunError
from runtime.metrics import read_metrics

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUTER = re.compile(r"\.(router|gate)\.")  # weights of routers, which stay in fp32
REPO_ROOT = Path(__file__).parents[2]
CARD = Path(__file__).with_name(
    "card.md"
)  # README.md of an export, as the Hugging Face hub reads it
CODE = {  # file in an export of form "nanokern": its source here
    "configuration_nanokern.py": "hf/export/configuration_nanokern.py",
    "modeling_nanokern.py": "hf/export/modeling_nanokern.py",
    "attention.py": "attention.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}

# On the difference of two logits. transformers rounds those of generated tokens to fp32, and in its
# own mixtures what goes into every norm, router and rotation, too, even of a model in fp64.
LIMIT, LIMIT_OF_FAMILIES = 1e-5, 1e-4
WINDOWS, NEW_TOKENS = 4, 16  # prompts, tokens generated for each
ODD_TEXTS = [
    "",
    "  two  spaces\r\n\t",
    "it's I'LL we've 1234 ½ ² ٣",
    "naïve 日本語 🙂 e\u0301 \u200b\u0000\x7f",
    "\u0378\U000105c0",
]


def choose_form(form: str, model: Model, biased: bool = False) -> str:
    """`form`, a key of FORMATS, or for "auto" the first of transformers' own classes that fits, else "nanokern".

    Where selection biases have moved (`biased`) none of those classes fits. Raises ValueError if
    `form` does not.
    """
    misfits = {name: candidate.find_misfits(model) for name, candidate in FORMATS.items()}
    for name in misfits.keys() - {"nanokern"} if biased else ():
        misfits[name].append("a selection bias (train.bias_update)")
    if form == "auto":
        return next(name for name in FORMATS if not misfits[name])
    if misfits[form]:
        raise ValueError(
            f"--format {form}: the run has {', '.join(misfits[form])}, unlike {FORMATS[form].architecture}; use "
            f"--format nanokern"
        )
    return form


def export_run(
    trained: Trained,
    tokenizer: Tokenizer,
    out: str | Path,
    form: str = "auto",
    dtype: str = "float32",
) -> None:
    """Write a run's model into a new folder `out`, in one rename at the end; `form` is that of `choose_form`.

    Weights are written in `dtype`, a key of DTYPES, but for the routers', which stay in fp32.

    Raises:
        ValueError: `out` exists, no exported model computes what the model does, or the class that
            `form` names does not.
        OSError: a file cannot be written.
    """
    # what `out` points to, if it is a link
    out, model = Path(os.path.realpath(out)), trained.config.model
    if os.path.lexists(out):
        raise RunError(f"{out}: exists already; name a new folder")
    if trained.config.data.document_mask:
        raise RunError(
            f"{trained.folder}: trained with data.document_mask = true, which no exported model computes: its "
            f"attention would cross documents. Use the run itself (scripts.sample, eval.downstream, eval.val_loss), "
            f"or train with --data.document_mask=false"
        )
    weights = trained.model.state_dict()
    biased = any(
        tensor.any() for name, tensor in weights.items() if name.endswith("selection_bias")
    )
    form = choose_form(form, model, biased)

    state = {}
    for name, tensor in FORMATS[form].from_own(weights).items():
        state[name] = (tensor if ROUTER.search(name) else tensor.to(DTYPES[dtype])).contiguous()
    config = {
        "architectures": [FORMATS[form].architecture],
        "model_type": form,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    origin = {"run": trained.config.run.name, "weights": trained.label}
    config |= FORMATS[form].make_config(model) | ends | {"dtype": dtype, "nanokern": origin}
    padding = list(range(tokenizer.vocab_size, model.vocab_size))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        folder = Path(private, out.name)
        folder.mkdir()  # readable by others, unlike its parent
        # transformers requires this key
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        write_json(folder / "config.json", config)
        # safetensors writes 0600
        shutil.copymode(folder / "config.json", folder / "model.safetensors")
        write_json(
            folder / "generation_config.json",
            ends | ({"suppress_tokens": padding} if padding else {}),
        )
        write_tokenizer(tokenizer, folder, model.block_size)
        shutil.copy(trained.folder / "config.toml", folder)
        for name, source in CODE.items() if form == "nanokern" else ():
            shutil.copyfile(REPO_ROOT / source, folder / name)
        (folder / "README.md").write_text(format_card(trained, form, dtype), "utf-8")
        folder.rename(out)


def format_card(trained: Trained, form: str, dtype: str) -> str:
    """README.md of an export of `trained` as `form`, a key of FORMATS, with weights in `dtype`."""
    model, own_code = trained.config.model, form == "nanokern"
    total, active = count_parameters(model)
    settings = model.model_dump() | {"router": f"{model.router}: {find_spec(model.router)}"}
    mean = f"the {trained.mean} up to" if trained.mean else "those of"
    evaluation = f"None yet: `python -m eval.downstream {trained.folder}`."
    table = trained.folder / "eval" / trained.label / "table.md"
    if table.is_file():
        evaluation = (
            f"Zero-shot, lm-evaluation-harness, ± standard error.\n\n{table.read_text().strip()}"
        )
    return CARD.read_text("utf-8").format(
        tags=", ".join(
            ["nanokern", model.router] if own_code else ["nanokern", model.router, form]
        ),
        name=trained.config.run.name,
        total=total,
        active=active,
        weights=f"The weights are {mean} step {trained.step:,}, in {dtype}.",
        trust=", trust_remote_code=True" if own_code else "",
        block_size=model.block_size,
        flags=" --trust-remote-code --model-impl transformers" if own_code else "",
        model=markdown_table(
            ["setting", "value"], [[key, str(value)] for key, value in settings.items()]
        ),
        training=markdown_table(["training", "value"], describe_training(trained)),
        evaluation=evaluation,
        date=date.today(),
    )


def describe_training(trained: Trained) -> list[list[str]]:
    """Rows on the data, the steps, the tokens seen and the last losses up to the checkpoint's step."""
    lines = [
        line
        for line in read_metrics(trained.folder / "metrics.jsonl")
        if line["step"] <= trained.step
    ]
    rows = [["data set", trained.config.data.label], ["steps", f"{trained.step:,}"]]
    known = [key for key in ("data", "tokenizer") if key in trained.metadata]
    rows += [[f"sha256 of the {key}", trained.metadata[key]] for key in known]
    if lines:
        rows.append(["tokens seen", f"{lines[-1]['tokens']:,}"])
    note = ", of that checkpoint, not of the mean" if trained.mean else ""
    for key in ("train/loss", "val/loss"):
        last = next((line for line in reversed(lines) if key in line), None)
        if last:
            rows.append(
                [f"{key}, nats per token", f"{last[key]:.4f} (step {last['step']:,}{note})"]
            )
    return rows


def check_export(trained: Trained, tokenizer: Tokenizer, out: Path) -> int:
    """Print how far the export is from the run. Returns the exit code: 1 if something differs."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        errors = find_differences(trained, tokenizer, out)
    except Exception as error:  # a damaged file makes transformers raise almost anything
        errors = [f"cannot be loaded or run ({type(error).__name__}: {first_line(error)})"]
    for error in errors:
        print(
            f"error: {out}: {error}; export {trained.folder} again, into a new folder",
            file=sys.stderr,
        )
    return 1 if errors else 0


@torch.no_grad()
def find_differences(trained: Trained, tokenizer: Tokenizer, out: Path) -> list[str]:
    """Compare tokenizer, logits and generation; print what agrees and return what differs.

    The run's weights are first rounded to the export's dtype. Both models compute in fp64, so that
    rounding on the way does not look like a fault.
    """
    import transformers

    config = json.loads((out / "config.json").read_text())
    open_moe, own_code = config["model_type"] in OPEN_MOES, "auto_map" in config
    theirs = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=own_code)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(
        tokenizer.vocab_size, (WINDOWS, trained.config.model.block_size), generator=generator
    )
    errors = compare_tokenizers(theirs, tokenizer, idx)
    if not errors:
        print("tokenizer: the same ids, texts and end of a text")
    settings: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": own_code}
    if open_moe:
        settings["experts_implementation"] = "eager"  # others know no fp64
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, **settings
    )
    errors += [
        f"{problem}: {', '.join(map(str, names))}" for problem, names in info.items() if names
    ]
    own = round_weights(trained.model, DTYPES[config["dtype"]], open_moe)
    limit = LIMIT_OF_FAMILIES if open_moe else LIMIT
    for way, differences in compare_generation(model.double(), own, tokenizer.eot, idx).items():
        distance = differences.abs().max().item()
        line = f"logits of {WINDOWS} rows of random and generated tokens, {way}: at most {distance:.2g} apart"
        if distance <= limit:  # false for NaN
            print(line)
        else:
            errors.append(f"{line}, allowed are {limit:g}")
    return errors


def round_weights(model: GPT, dtype: torch.dtype, scaled: bool = False) -> GPT:
    """Make `model` compute in fp64 with weights rounded to the export's `dtype`, except the routers', in place.

    `scaled`: whether the export has the gates' constant c in the experts' w_out, before it was
    rounded.
    """
    rounded, state = {}, model.state_dict()
    for name, tensor in state.items():
        scale = (
            state[name.replace("experts.w_out", "router.c")]
            if scaled and name.endswith("experts.w_out")
            else 1.0
        )
        rounded[name] = (
            tensor.double() if ".router." in name else (tensor * scale).to(dtype).double() / scale
        )
    model.double().load_state_dict(rounded)
    return model


def compare_generation(model: Any, own: GPT, eot: int, idx: Tensor) -> dict[str, Tensor]:
    """Continue prompts of unequal length, padded on the left, greedily with a cache; then compute all logits at once.

    `model` is transformers', `own` the run's. The first halves of `idx` (B, T) int64, at most a
    block, are prompts, and `eot` pads them. Returns the differences to the logits of `own`, (...,
    V), by the way they were computed in.
    """
    length = max(1, idx.shape[1] // 2)
    count = min(idx.shape[1] - length, NEW_TOKENS)
    start = torch.arange(len(idx)) * length // len(idx)
    mask = (torch.arange(length + count) >= start[:, None]).long()
    prompts = idx[:, :length].where(mask[:, :length] == 1, eot)
    settings = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(prompts, attention_mask=mask[:, :length], **settings)
    # logits before suppress_tokens
    tokens, generated = output.sequences, torch.stack(output.logits, dim=1)
    wanted = own.logits(
        own.hidden(tokens, KVCache(own.config, start, length + count, own.head.dtype))[0]
    )
    inputs = {"attention_mask": mask}
    if model.config.model_type == "gpt2":  # it counts padding as positions, unless it is given them
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    at_once = model(tokens, **inputs).logits
    return {
        "generated with a cache": generated - wanted[:, length - 1 : -1],
        "in one pass": (at_once - wanted)[mask == 1],
    }


def compare_tokenizers(theirs: Any, own: Tokenizer, idx: Tensor) -> list[str]:
    """Compare two tokenizers on odd texts and on those that `idx` (B, T) decodes to; returns what differs."""
    # transformers reads the texts of special ones
    ordinary = {i for i, token in enumerate(token_bytes(own)) if token}
    texts = ODD_TEXTS + [own.decode([i for i in row if i in ordinary]) for row in idx.tolist()]
    for text in texts:
        ids = own.encode(text)
        if theirs.encode(text) != ids or theirs.decode(ids) != own.decode(ids):
            return [
                f"the tokenizer gives other ids, or decodes them to another text, for {text[:60]!r}"
            ]
    if theirs.eos_token_id != own.eot:
        return [f"the tokenizer ends a text with {theirs.eos_token_id}, not {own.eot}"]
    return []


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = build_parser("scripts.export", __doc__)
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, help="new folder")
    forms = "nanokern: any model, with its code; others: transformers' own classes (default: one of them that fits)"
    parser.add_argument("--format", choices=("auto", *FORMATS), default="auto", help=forms)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of weights (default: %(default)s)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="load OUT with transformers and compare it with the run",
    )
    args = parser.parse_args(argv)
    if args.check:
        require_packages("transformers", requirements="requirements-dev.txt")
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    export_run(trained, tokenizer, args.out, args.format, args.dtype)
    print(f"{args.out}: {args.run} at step {trained.step}")
    return check_export(trained, tokenizer, args.out) if args.check else 0


if __name__ == "__main__":
    run_command(main)
