"""Write a model as a folder that transformers loads: weights, configuration, tokenizer, model card, code."""

import re
import shutil
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from common.text import markdown_table
from configure import Config
from configure.schema import Model
from data.tokenizer import Tokenizer
from hf.formats import FORMATS
from hf.tokenizer_files import write_json, write_tokenizer
from model import GPT, count_parameters
from router import find_spec
from runtime import RunError
from runtime.metrics import read_metrics

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUTER = re.compile(r"\.(router|gate)\.")  # weights of routers, which stay in fp32
REPO_ROOT = Path(__file__).parents[1]
CARD = Path(__file__).with_name("card.md")  # README.md of an export, as the Hugging Face hub reads it
CODE = {  # file in an export of form "nanokern": its source here
    "configuration_nanokern.py": "hf/configuration_nanokern.py",
    "modeling_nanokern.py": "hf/modeling_nanokern.py",
    "attention.py": "attention.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}


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


def choose_form(form: str, model: Model, biased: bool = False) -> str:
    """`form`, a key of FORMATS, or for "auto" the first of transformers' own classes that fits, else "nanokern".

    Where selection biases have moved (`biased`) none of those classes fits. Raises ValueError if `form` does not.
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


def write_export(source: Source, folder: Path, form: str = "auto", dtype: str = "float32") -> None:
    """Write all files of an export into the empty `folder`; `form` is that of `choose_form`.

    Weights are written in `dtype`, a key of DTYPES, but for the routers', which stay in fp32.

    Raises:
        ValueError: no exported model computes what the model does, or the class that `form` names does not.
        OSError: a file cannot be written.
    """
    model, tokenizer = source.config.model, source.tokenizer
    if source.config.data.document_mask:
        raise RunError(
            f"{source.run}: trained with data.document_mask = true, which no exported model computes: its attention "
            f"would cross documents. Use the run itself (scripts.sample, eval.downstream, eval.val_loss), or train "
            f"with --data.document_mask=false"
        )
    weights = source.model.state_dict()
    biased = any(tensor.any() for name, tensor in weights.items() if name.endswith("selection_bias"))
    form = choose_form(form, model, biased)

    state = {}
    for name, tensor in FORMATS[form].from_own(weights).items():
        state[name] = (tensor if ROUTER.search(name) else tensor.to(DTYPES[dtype])).contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})  # transformers requires this key

    config = {
        "architectures": [FORMATS[form].architecture],
        "model_type": form,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    origin = {"run": source.config.run.name, "weights": source.label}
    config |= FORMATS[form].make_config(model) | ends | {"dtype": dtype, "nanokern": origin}
    write_json(folder / "config.json", config)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes 0600
    padding = list(range(tokenizer.vocab_size, model.vocab_size))
    write_json(folder / "generation_config.json", ends | ({"suppress_tokens": padding} if padding else {}))
    write_tokenizer(tokenizer, folder, model.block_size)
    shutil.copy(source.run / "config.toml", folder)
    if form == "nanokern":
        for name, source_file in CODE.items():
            shutil.copyfile(REPO_ROOT / source_file, folder / name)
    (folder / "README.md").write_text(format_card(source, form, dtype), "utf-8")


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
