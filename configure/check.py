"""One setting at a time: the error that names it with a remedy, and its value as text."""

import difflib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configure.schema import KEYS, SECTIONS, Config

COMMON_NAMES = {  # key -> what other projects call it
    "optim.lr": "learning_rate max_lr",
    "optim.min_lr_ratio": "min_lr",
    "optim.warmup_steps": "warmup warmup_iters",
    "optim.grad_clip": "clip max_grad_norm",
    "optim.name": "optimizer",
    "train.batch_size": "batch global_batch_size",
    "train.micro_batch_size": "gradient_accumulation_steps",
    "train.max_steps": "steps max_iters num_steps",
    "model.n_layer": "layers num_layers depth",
    "model.n_head": "heads num_heads",
    "model.n_embd": "hidden hidden_size d_model dim",
    "model.n_expert": "experts num_experts",
    "model.vocab_size": "vocab",
    "model.block_size": "seq_len context_length",
    "data.name": "dataset",
    "run.dir": "out_dir",
    "log.wandb": "wandb_log",
    "log.project": "wandb_project",
}


def find_errors(settings: dict[str, Any], source: str | Path) -> list[str]:
    """List what is wrong with settings by dotted key, each checked alone: `SOURCE: section.key = value: reason`."""
    errors = []
    for key, value in settings.items():
        if key in SECTIONS:
            remedy = f"write [{key}] in a file, or --{key}.KEY=VALUE"
            errors.append(f"{source}: {key} = {show(value)}: is a section; {remedy}")
            continue
        section, dot, name = key.partition(".")
        try:
            Config.model_validate({section: {name: value} if dot else value})
        except ValidationError as invalid:
            errors += [f"{source}: {_describe(key, value, error)}" for error in invalid.errors(include_url=False)]
    return errors


def _describe(key: str, value: Any, error: Any) -> str:
    """Describe one of pydantic's errors on a key, with a remedy where there is a good guess."""
    place = error["loc"][2:]  # in the table that the key holds: the name of an entry
    subject = ".".join(map(show_key, [key, *place[:1]]))
    if place:
        value = place[0] if len(place) > 1 else error["input"]  # the name itself is wrong, or its number
    reason = error["msg"].removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            reason = f"unknown key{_suggest_key(key)}"
        case "literal_error" if isinstance(value, str):
            reason += _suggest(value, KEYS[key]["enum"])
        case "dict_type":
            reason += f"; write {key} = {{books = 0.5, arxiv = 0.5}}"
    return f"{subject} = {show(value)}: {reason}"


def _suggest_key(key: str) -> str:
    """`; did you mean 'optim.lr'?` for `train.lr`: the key's other name or section first, then the nearest text."""
    table, _, name = key.rpartition(".")
    for known, names in COMMON_NAMES.items():
        if name.lower().replace("-", "_") in names.split():
            return f"; did you mean {known!r}?"
    if KEYS.get(table, {}).get("type") == "object":
        return f"; {table} is set as a whole, as --{table}='{{books = 0.5, arxiv = 0.5}}'"
    if same_name := [other for other in KEYS if other.split(".")[1] == name]:
        return _suggest(key, same_name, cutoff=0.0)
    return _suggest(key, [*KEYS, *SECTIONS])


def _suggest(text: str, known: list[str], cutoff: float = 0.6) -> str:
    nearest = difflib.get_close_matches(text, known, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def show_key(key: str) -> str:
    """Show a key, quoted if it is empty or has characters that do not print."""
    return key if key and key.isprintable() else repr(key)


def show(value: Any) -> str:
    """Show a value as Python writes it, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def describe_type(key: str) -> str:
    """Describe a key's type and range for --help, such as `int >= 1` or `one of learned, rope`."""
    schema = KEYS[key]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "object":
        return "table of names and numbers > 0, such as {books = 0.5, arxiv = 0.5}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matching"}
    limits = [f"{sign} {schema[limit]}" for limit, sign in signs.items() if limit in schema]
    kind = {"boolean": "true or false", "integer": "int", "number": "float", "string": "text"}[schema["type"]]
    return " ".join([kind, ", ".join(limits)]).strip()


def format_toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {format_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def format_value(value: Any) -> str:
    """Text after `--section.key=` that is read back as `value`."""
    return value if isinstance(value, str) else format_toml(value)
