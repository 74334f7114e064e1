"""The model card of an export: README.md, as the Hugging Face hub reads it."""

from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from common.text import markdown_table
from configure import Config
from data.tokenizer import Tokenizer
from model import GPT, count_parameters
from router import find_spec
from runtime.metrics import read_metrics

CARD = Path(__file__).with_name("card.md")


class Source(NamedTuple):
    """A trained model and where it comes from."""

    run: Path  # the run folder
    tokenizer: Tokenizer
    label: str  # name of the folder with these weights' results, such as "step_00001000"
    mean: str  # in words, which mean the weights are; empty for those of a checkpoint
    model: GPT  # on the CPU
    config: Config
    step: int
    metadata: dict[str, Any]  # stored in the checkpoint besides tensors


def format_card(source: Source, form: str, dtype: str) -> str:
    """README.md of an export of `source` as `form`, a key of FORMATS, with weights in `dtype`."""
    model, own_code = source.config.model, form == "nanokern"
    total, active = count_parameters(model)
    settings = model.model_dump() | {"router": f"{model.router}: {find_spec(model.router)}"}
    mean = f"the {source.mean} up to" if source.mean else "those of"
    return CARD.read_text("utf-8").format(
        tags=", ".join(["nanokern", model.router] if own_code else ["nanokern", model.router, form]),
        name=source.config.run.name,
        total=total,
        active=active,
        weights=f"The weights are {mean} step {source.step:,}, in {dtype}.",
        trust=", trust_remote_code=True" if own_code else "",
        block_size=model.block_size,
        flags=" --trust-remote-code --model-impl transformers" if own_code else "",
        model=markdown_table(["setting", "value"], [[key, str(value)] for key, value in settings.items()]),
        training=markdown_table(["training", "value"], describe_training(source)),
        evaluation=read_evaluation(source.run, source.label),
        date=date.today(),
    )


def describe_training(source: Source) -> list[list[str]]:
    """Rows on the data, the steps, the tokens seen and the last losses up to the checkpoint's step."""
    lines = [line for line in read_metrics(source.run / "metrics.jsonl") if line["step"] <= source.step]
    rows = [["data set", source.config.data.label], ["steps", f"{source.step:,}"]]
    rows += [[f"sha256 of the {key}", source.metadata[key]] for key in ("data", "tokenizer") if key in source.metadata]
    if lines:
        rows.append(["tokens seen", f"{lines[-1]['tokens']:,}"])
    note = ", of that checkpoint, not of the mean" if source.mean else ""
    for key in ("train/loss", "val/loss"):
        last = next((line for line in reversed(lines) if key in line), None)
        if last:
            rows.append([f"{key}, nats per token", f"{last[key]:.4f} (step {last['step']:,}{note})"])
    return rows


def read_evaluation(run: Path, label: str) -> str:
    """The table that eval.downstream has written for these weights."""
    path = run / "eval" / label / "table.md"
    if not path.is_file():
        return f"None yet: `python -m eval.downstream {run}`."
    return f"Zero-shot, lm-evaluation-harness, ± standard error.\n\n{path.read_text().strip()}"
