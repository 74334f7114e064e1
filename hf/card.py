"""The model card of an export: README.md, as the Hugging Face hub reads it."""

from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from common.text import markdown_table
from configure import Config
from data.bins import read_meta
from data.tokenizer import Tokenizer
from gate_norm import gate_scale
from model import GPT, count_parameters
from router import ROUTERS
from runtime.metrics import read_metrics

CARD = Path(__file__).with_name("card.md")
ROUTER = """

### Router

    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

`{router}` is `{spec}`, times `gate_scale` {gate_scale:g}: the gates of {top_k} of {n_expert} experts per token,
computed in fp32 whatever the dtype of the rest. [router.py](router.py) is the code that the model was trained with."""


class Source(NamedTuple):
    """A trained model and where it comes from."""

    run: Path  # the run folder
    tokenizer: Tokenizer
    label: str  # name of the folder with these weights' results, such as "step_00001000"
    mean: str  # in words, which mean the weights are; empty for those of a checkpoint
    model: GPT  # on the CPU
    config: Config
    step: int
    average: int  # checkpoints that the weights are the mean of
    metadata: dict[str, Any]  # stored in the checkpoint besides tensors
    ema: bool  # whether the weights are the running mean


def format_card(source: Source, form: str, dtype: str) -> str:
    """README.md of an export of `source` as `form`, a key of FORMATS, with weights in `dtype`."""
    model, own_code, total, active = source.config.model, form == "nanokern", *count_parameters(source.config.model)
    spec, settings = ROUTERS[model.router], model.model_dump()
    tags, kind, router = ["nanokern"], "dense", ""
    if spec:
        tags += ["mixture-of-experts", model.router]
        kind = f"{model.n_expert} experts, {model.top_k} per token, router `{model.router}`"
        router = ROUTER.format(spec=spec, **settings | {"gate_scale": gate_scale(model)})
    if not own_code:
        tags.append(form)
    mean = f"the {source.mean} up to" if source.mean else "those of"
    return CARD.read_text("utf-8").format(
        tags=", ".join(tags),
        name=source.config.run.name,
        kind=kind,
        total=total,
        active=active,
        weights=f"The weights are {mean} step {source.step:,}, in {dtype}.",
        trust=", trust_remote_code=True" if own_code else "",
        block_size=model.block_size,
        flags=" --trust-remote-code --model-impl transformers" if own_code else "",
        model=format_table(("setting", "value"), settings.items()),
        router=router,
        training=format_table(("", ""), [*describe_data(source), *describe_training(source)]),
        evaluation=read_evaluation(source.run, source.label),
        code_licence=" The code, all files .py, is MIT (LICENSE-code)." if own_code else "",
        date=date.today(),
    )


def describe_data(source: Source) -> list[tuple[str, str]]:
    """Rows on the data sets, as far as they are still there, and their hashes."""
    data, rows = source.config.data, [("data set", source.config.data.label)]
    for folder, (name, part) in zip(data.folders, data.sets.items(), strict=True):
        if not (folder / "meta.json").is_file():
            continue
        meta, of_set, preparation = read_meta(folder), "", "prepared by"
        if len(data.sets) > 1:
            of_set, preparation = f" of {name}", f"preparation of {name}"
            rows.append((f"part{of_set}", f"{part:.2%}"))
        rows += [(f"{split} tokens{of_set}", f"{tokens.tokens:,}") for split, tokens in meta.splits.items()]
        rows.append((preparation, f"`{meta.prepare}`"))
    hashes = {key: source.metadata[key] for key in ("data", "tokenizer") if key in source.metadata}
    return rows + [(f"sha256 of the {key}", f"`{value}`") for key, value in hashes.items()]


def describe_training(source: Source) -> list[tuple[str, str]]:
    """Rows on the steps, tokens seen and last losses up to the checkpoint's step."""
    lines = [line for line in read_metrics(source.run / "metrics.jsonl") if line["step"] <= source.step]
    rows = [("steps", f"{source.step:,}")]
    if lines:
        rows.append(("tokens seen", f"{lines[-1]['tokens']:,}"))
    note = ", of that checkpoint, not of the mean" if source.mean else ""
    for key, name in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        last = next((line for line in reversed(lines) if key in line), None)
        if last:
            rows.append((f"{name}, nats per token", f"{last[key]:.4f} (step {last['step']:,}{note})"))
    return rows


def read_evaluation(run: Path, label: str) -> str:
    """The table that eval.downstream has written for these weights."""
    path = run / "eval" / label / "table.md"
    if not path.is_file():
        return f"None yet: `python -m eval.downstream {run}`."
    return f"Zero-shot, lm-evaluation-harness, ± standard error.\n\n{path.read_text().strip()}"


def format_table(head: Sequence[str], rows: Iterable[tuple[str, Any]]) -> str:
    """A Markdown table of any values."""
    return markdown_table(list(head), [[str(cell) for cell in row] for row in rows])
