"""The model card of an export: README.md, as the Hugging Face hub reads it."""

import platform
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from configure import Config
from data.bins import Meta, read_meta
from data.sources import SOURCES
from eval.pages import format_markdown
from eval.trained import Trained
from model import count_parameters
from router import ROUTERS
from runtime.metrics import read_metrics

CARD = Path(__file__).with_name("card.md")
VLLM = """

### vLLM

`vllm serve PATH --trust-remote-code --model-impl transformers` serves the model through vLLM's Transformers backend,
with the experts of this code: vLLM's own are gated SiLU experts, these are GELU experts without a gate. So there is no
expert parallelism. vLLM ignores suppress_tokens, so it may sample ids that pad the vocabulary. Tried with a small
`kern` model and an unofficial CPU build of vLLM 0.32, not on a GPU: log-probabilities were those of transformers."""

ROUTER = """

### Router

    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

`{router}` is `{spec}`, times `gate_scale` {gate_scale:g}: the gates of {top_k} of {n_expert} experts per token,
computed in fp32 whatever the dtype of the rest. [router.py](router.py) is the code that the model was trained with."""


def format_card(trained: Trained, run: Path, form: str, dtype: str) -> str:
    """README.md of an export of the run folder `run` as `form` ("nanokern" or "gpt2")."""
    config, model = trained.config, trained.config.model
    spec, custom, meta = ROUTERS[model.router], form == "nanokern", None
    if (trained.data_folder / "meta.json").is_file():
        meta = read_meta(trained.data_folder)
    settings, (total, active) = model.model_dump(), count_parameters(model)
    mean = f"the mean of those of {trained.average} checkpoints up to" if trained.average > 1 else "those of"
    rows = [*data_rows(config, meta, trained.metadata), *loss_rows(trained, run)]
    return CARD.read_text("utf-8").format(
        tags=", ".join(["nanokern", *(["mixture-of-experts", model.router] if spec else [] if custom else ["gpt2"])]),
        name=config.run.name,
        kind=f"{model.n_expert} experts, {model.top_k} per token, router `{model.router}`" if spec else "dense",
        total=total,
        active=active,
        weights=f"The weights are {mean} step {trained.step:,}, in {dtype}.",
        trust=", trust_remote_code=True" if custom else "",
        block_size=model.block_size,
        vllm=VLLM if custom else "",
        model=format_table(("setting", "value"), settings.items()),
        router=ROUTER.format(spec=spec, **settings) if spec else "",
        training=format_table(("", ""), rows),
        evaluation=read_evaluation(run, trained.label),
        data_licence=describe_licence(meta),
        code_licence=" The code, all files .py, is MIT (LICENSE-code)." if custom else "",
        date=date.today(),
        python=platform.python_version(),
        torch=torch.__version__,
    )


def data_rows(config: Config, meta: Meta | None, metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows on the training data: size, command, sha256."""
    rows = [("data set", config.data.name)]
    if meta:
        rows += [(f"{split} tokens", f"{part.tokens:,}") for split, part in meta.splits.items()]
        rows += [("prepared by", f"`{meta.prepare}`")]
    return rows + [(f"sha256 of the {key}", f"`{metadata[key]}`") for key in ("data", "tokenizer") if key in metadata]


def loss_rows(trained: Trained, run: Path) -> list[tuple[str, str]]:
    """Rows on training: tokens seen and the last losses up to the checkpoint's step."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] <= trained.step]
    rows = [("steps", f"{trained.step:,}")] + [("tokens seen", f"{line['tokens']:,}") for line in lines[-1:]]
    note = ", of that checkpoint, not of the mean" if trained.average > 1 else ""
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


def describe_licence(meta: Meta | None) -> str:
    """What is known of the licence of the data."""
    if meta is None:
        return "the data set was not there when this was written"
    source = SOURCES.get(meta.source.get("corpus", ""))
    hub = source.hub.get(meta.source.get("config", "")) if source else None
    if hub and "revision" in meta.source:  # downloaded from the hub, not prepared from a copy
        return f"{hub.repo}, {hub.licence}"
    if source and not source.local:
        return f"{source.about} ({source.notes})"
    return "local files, whose licence is not recorded"


def format_table(head: Sequence[str], rows: Iterable[tuple[str, Any]]) -> str:
    """A Markdown table of any values."""
    return format_markdown("table", list(head), [[str(cell) for cell in row] for row in rows])
