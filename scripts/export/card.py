"""The model card of an export: README.md, as the Hugging Face hub reads it."""

from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from common.text import markdown_table
from data.bins import read_meta
from eval.trained import Trained
from gate_norm import gate_scale
from model import count_parameters
from router import ROUTERS
from runtime.metrics import read_metrics

CARD = Path(__file__).with_name("card.md")
ROUTER = """

### Router

    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

`{router}` is `{spec}`, times `gate_scale` {gate_scale:g}: the gates of {top_k} of {n_expert} experts per token,
computed in fp32 whatever the dtype of the rest. [router.py](router.py) is the code that the model was trained with."""


def format_card(trained: Trained, run: Path, form: str, dtype: str) -> str:
    """README.md of an export of the run folder `run` as `form`, as in `export_run`."""
    config, model = trained.config, trained.config.model
    spec, custom = ROUTERS[model.router], form == "nanokern"
    settings, (total, active) = model.model_dump(), count_parameters(model)
    mean = f"the {trained.mean} up to" if trained.mean else "those of"
    return CARD.read_text("utf-8").format(
        tags=", ".join(
            ["nanokern", *(["mixture-of-experts", model.router] if spec else []), *([] if custom else [form])]
        ),
        name=config.run.name,
        kind=f"{model.n_expert} experts, {model.top_k} per token, router `{model.router}`" if spec else "dense",
        total=total,
        active=active,
        weights=f"The weights are {mean} step {trained.step:,}, in {dtype}.",
        trust=", trust_remote_code=True" if custom else "",
        block_size=model.block_size,
        flags=" --trust-remote-code --model-impl transformers" if custom else "",
        model=format_table(("setting", "value"), settings.items()),
        router=ROUTER.format(spec=spec, **{**settings, "gate_scale": gate_scale(model)}) if spec else "",
        training=format_table(("", ""), training_rows(trained, run)),
        evaluation=read_evaluation(run, trained.label),
        code_licence=" The code, all files .py, is MIT (LICENSE-code)." if custom else "",
        date=date.today(),
    )


def training_rows(trained: Trained, run: Path) -> list[tuple[str, str]]:
    """Rows on training: the data, tokens seen and the last losses up to the checkpoint's step."""
    rows, sets = [("data set", trained.config.data.label)], trained.config.data.sets
    for folder, (name, part) in zip(trained.data_folders, sets.items(), strict=True):
        if (folder / "meta.json").is_file():
            meta, of = read_meta(folder), f" of {name}" * (len(sets) > 1)
            rows += [(f"part{of}", f"{part:.2%}")] if of else []
            rows += [(f"{split} tokens{of}", f"{tokens.tokens:,}") for split, tokens in meta.splits.items()]
            rows += [(f"preparation{of}" if of else "prepared by", f"`{meta.prepare}`")]
    stored = trained.metadata
    rows += [(f"sha256 of the {key}", f"`{stored[key]}`") for key in ("data", "tokenizer") if key in stored]
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] <= trained.step]
    rows += [("steps", f"{trained.step:,}")] + [("tokens seen", f"{line['tokens']:,}") for line in lines[-1:]]
    note = ", of that checkpoint, not of the mean" if trained.mean else ""
    for key, name in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        for line in [line for line in lines if key in line][-1:]:
            rows.append((f"{name}, nats per token", f"{line[key]:.4f} (step {line['step']:,}{note})"))
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
