"""The model card of an export: README.md, as the Hugging Face hub reads it."""

import json
import platform
from datetime import date
from pathlib import Path

import torch

from data.bins import read_meta
from data.sources import SOURCES
from eval.pages import markdown
from model import count_parameters
from router import ROUTERS
from runtime import RunError
from runtime.metrics import read

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
license: other
license_name: not-chosen-yet
tags: [{tags}]
---"""

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})
model = AutoModelForCausalLM.from_pretrained("PATH"{trust})
ids = tokenizer("<|endoftext|>The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50, do_sample=True)[0]))
```

Texts began with `<|endoftext|>` in training. The model sees {block_size} tokens."""

ROUTER = """    g = c · γ · post( φ( pre(W x + b) ) ) · 1[ m ∈ TopK(scores + β) ]

`{name}` is `{spec}`, times `gate_scale` {gate_scale:g}: the gates of {top_k} of {n_expert} experts a token, computed in
fp32 whatever the type of the rest. [router.py](router.py) is the code that the model was trained with."""

VLLM = """vLLM's Transformers backend serves the model with this code: `vllm serve PATH --trust-remote-code --model-impl
transformers`. Attention and embedding become vLLM's own. The experts do not: its `FusedMoE` computes gated SiLU experts
there whatever a model's are, and these are GELU ones without a gate. So the number of experts has a name in config.json
(`n_expert`) by which vLLM does not take them for its own; there is no expert parallelism. It may draw ids that pad the
vocabulary, which `generate` of transformers leaves out (suppress_tokens). Tried once, with a small model of the
router `kern` and an unofficial CPU build of vLLM 0.32: log-probabilities were those of transformers. No GPU and no
tensor parallelism were tried, and nothing was tried again for this card."""

LICENCE = """The licence of the weights is for whoever trained them to choose, with an eye to that of the data; it goes
into the header above. {data} {code}"""


def of(trained, tokenizer, run, form, dtype):
    """README.md of an export of the run folder `run`."""
    config, model = trained.config, trained.config.model
    spec = ROUTERS[model.router]
    tags = ["nanokern", *(["mixture-of-experts", model.router] if spec else ["gpt2"] if form == "gpt2" else [])]
    total, active = count_parameters(model)
    what = (
        f"{model.n_expert} experts, {model.top_k} a token, chosen by the router `{model.router}`" if spec else "dense"
    )
    meta = meta_of(config)
    parts = [
        HEADER.format(tags=", ".join(tags)),
        f"# {config.run.name}",
        f"A GPT ({what}) of {total:,} parameters, {active:,} of them active for a token, trained by nanoKERN. "
        f"{weights_in_words(trained, dtype)}",
        "## Use",
        USE.format(trust="" if form == "gpt2" else ", trust_remote_code=True", block_size=model.block_size),
        *(["### vLLM", VLLM] if form == "nanokern" else []),
        "## Model",
        table(("setting", "value"), model.model_dump().items()),
        *(
            ["### Router", ROUTER.format(name=model.router, spec=spec, **model.model_dump(include=NUMBERS))]
            if spec
            else []
        ),
        "## Training",
        table(("", ""), [*data_rows(config, meta, trained.metadata), *loss_rows(trained, run)]),
        "All settings are in [config.toml](config.toml).",
        "## Evaluation",
        evaluation(run, trained.label),
        "## Licence",
        LICENCE.format(
            data=f"Data: {licence_of(meta)}.",
            code="" if form == "gpt2" else "The code, all files .py, is MIT (LICENSE-code).",
        ).rstrip(),
        f"Exported {date.today()} with Python {platform.python_version()}, torch {torch.__version__}.",
    ]
    return "\n\n".join(parts) + "\n"


NUMBERS = {"gate_scale", "top_k", "n_expert"}


def weights_in_words(trained, dtype):
    mean = f"the mean of those of {trained.average} checkpoints up to" if trained.average > 1 else "those of"
    return f"The weights are {mean} step {trained.step:,}, in {dtype}."


def meta_of(config):
    """Meta of the data set; None if it is not there."""
    folder = Path(config.data.dir, config.data.name)
    return read_meta(folder) if (folder / "meta.json").is_file() else None


def data_rows(config, meta, facts):
    rows = [("data set", config.data.name)]
    if meta:
        rows += [(f"{split} tokens", f"{part.tokens:,}") for split, part in meta.splits.items()]
        rows += [("prepared by", f"`{meta.prepare}`")]
    return rows + [(f"sha256 of the {key}", f"`{facts[key]}`") for key in ("data", "tokenizer") if key in facts]


def loss_rows(trained, run):
    """Tokens seen and the last losses up to the checkpoint's step, nats a token."""
    lines = [line for line in read(Path(run, "metrics.jsonl")) if line["step"] <= trained.step]
    rows = [("steps", f"{trained.step:,}")] + [("tokens seen", f"{line['tokens']:,}") for line in lines[-1:]]
    for key, name in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        for line in [line for line in lines if key in line][-1:]:
            note = ", of that checkpoint alone, not of the mean" if trained.average > 1 else ""
            rows.append((f"{name}, nats a token", f"{line[key]:.4f} (step {line['step']:,}{note})"))
    return rows


def evaluation(run, label):
    """The table of results.json that eval.downstream has written of these weights. Raises RunError if it is damaged."""
    path, again = Path(run, "eval", label, "results.json"), f"python -m eval.downstream {run}"
    if not path.is_file():
        return f"None yet: `{again}`."
    try:
        results = json.loads(path.read_text())["results"]
        rows = [accuracies(task, values) for task, values in results.items() if "acc" in values]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: damaged; write it again ({again}), or move it away") from error
    head = ("task", "documents", "acc", "acc_norm")
    return f"Zero-shot, lm-evaluation-harness, ± standard error.\n\n{table(head, rows)}"


def accuracies(task, values):
    """A row; what the harness did not give of a task, such as the error of a group's mean, is left out."""
    row = [task, "" if values.get("documents") is None else f"{values['documents']:,}"]
    for key in ("acc", "acc_norm"):
        error = values.get(f"{key}_stderr")
        row.append(f"{values[key]:.4f}" + ("" if error is None else f" ± {error:.4f}") if key in values else "")
    return row


def licence_of(meta):
    """What is known of the licence of the data, in words."""
    if meta is None:
        return "the data set was not there when this was written"
    source = SOURCES.get(meta.source.get("corpus"))
    hub = source and source.hub.get(meta.source.get("config"))
    if hub and "revision" in meta.source:  # from the hub, no copy
        return f"{hub.repo}, {hub.licence}"
    if source and not source.local:
        return f"{source.about} ({source.notes})"
    return "files from this machine, of whose licence nothing is recorded"


def table(head, rows):
    return markdown("table", head, [[str(cell) for cell in row] for row in rows])
