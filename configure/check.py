"""One setting at a time: the error that names it with the nearest key or value, and its value as text."""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configure.schema import KEYS, SECTIONS, Config

OTHER_NAMES = {  # what other projects call our keys
    "optim.lr": "learning_rate",
    "optim.min_lr_ratio": "min_lr",
    "train.batch_size": "batch",
    "train.micro_batch_size": "gradient_accumulation_steps",
    "train.max_steps": "steps max_iters lr_decay_iters epochs num_train_epochs",
    "model.n_layer": "layers num_layers num_hidden_layers",
    "model.n_head": "heads num_heads num_attention_heads",
    "model.n_embd": "hidden hidden_size d_model dim",
    "model.block_size": "seq_len max_seq_len context context_length max_position_embeddings",
    "model.vocab_size": "vocab",
    "model.n_expert": "experts num_experts num_local_experts",
    "model.top_k": "topk num_experts_per_tok",
    "data.name": "dataset",
    "log.wandb": "wandb_log",
    "run.dir": "out_dir output_dir",
}


def find_errors(settings: dict[str, Any], source: str | Path) -> list[str]:
    """List what is wrong with settings by dotted key, each checked alone: `SOURCE: section.key = value: reason`."""
    errors = []
    for key, value in settings.items():
        section, _, name = key.partition(".")
        try:
            Config.model_validate({section: {name: value}})
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                errors.append(f"{source}: {show_key(key)} = {show(value)}: {_explain(key, value, error)}")
    return errors


def _explain(key: str, value: Any, error: Any) -> str:
    """The reason of one of pydantic's errors on a key, with the nearest key or choice."""
    if error["type"] == "extra_forbidden":
        return "is a section; set one of its keys" if key in SECTIONS else f"unknown key{_suggest_key(key)}"
    entry = error["loc"][2:]  # in the table that the key holds
    reason = ": ".join([*map(repr, entry), error["msg"].removeprefix("Value error, ")])
    if error["type"] == "literal_error" and isinstance(value, str):
        reason += _suggest(value, KEYS[key]["enum"])
    return reason


def _suggest_key(key: str) -> str:
    """`; did you mean 'optim.lr'?` for `train.lr`: another project's or section's name for a key, or the nearest."""
    name = key.rpartition(".")[2]
    for own, names in OTHER_NAMES.items():
        if name in names.split():
            return f"; did you mean {own!r}?"
    if same_name := [other for other in KEYS if other.split(".")[1] == name]:
        return _suggest(key, same_name, cutoff=0.0)
    return _suggest(key, [*KEYS, *SECTIONS])


def _suggest(text: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    nearest = difflib.get_close_matches(text, known, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def show_key(key: str) -> str:
    """Show a key, quoted if it is empty or has characters that do not print."""
    return key if key and key.isprintable() else repr(key)


def show(value: Any) -> str:
    """Show a value as Python writes it, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def format_toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {format_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
