"""What is wrong with settings: one at a time, and between keys that are each valid alone but not together.

An error names the nearest key or value. Of a conflict it names a remedy, and the overrides in it
make it valid.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from math import gcd
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configure.schema import KEYS, SECTIONS, Config, Model, Optim, Train


def find_errors(settings: dict[str, Any], source: str | Path) -> list[str]:
    """List what is wrong with settings by dotted key, each checked alone: `SOURCE: section.key = value: reason`."""
    errors = []
    for key, value in settings.items():
        section, _, name = key.partition(".")
        try:
            Config.model_validate({section: {name: value}})
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                errors.append(
                    f"{source}: {show_key(key)} = {show(value)}: {_explain(key, value, error)}"
                )
    return errors


def _explain(key: str, value: Any, error: Any) -> str:
    """The reason of one of pydantic's errors on a key, with the nearest key or choice."""
    if error["type"] == "extra_forbidden":
        return (
            "is a section; set one of its keys"
            if key in SECTIONS
            else f"unknown key{_suggest_key(key)}"
        )
    entry = error["loc"][2:]  # in the table that the key holds
    reason = ": ".join([*map(repr, entry), error["msg"].removeprefix("Value error, ")])
    if error["type"] == "literal_error" and isinstance(value, str):
        reason += _suggest(value, KEYS[key]["enum"])
    return reason


def _suggest_key(key: str) -> str:
    """`; did you mean 'optim.lr'?` for `train.lr`: another project's or section's name for a key, or the nearest."""
    name = key.rpartition(".")[2]
    for own, schema in KEYS.items():
        if name in schema["other_names"].split():
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
        return (
            "{"
            + ", ".join(
                f"{json.dumps(name)} = {format_toml(inner)}" for name, inner in value.items()
            )
            + "}"
        )
    return json.dumps(value, ensure_ascii=False)


def find_conflicts(config: Config, world_size: int = 1) -> list[str]:
    """List the errors between keys, one line each, for a run on `world_size` ranks."""
    return [
        *_check_model(config.model),
        *_check_balance(config.model, config.train),
        *_check_training(config, world_size),
        *_check_branch(config.train, config.optim),
    ]


def _check_model(model: Model) -> Iterator[str]:
    heads, groups = model.n_head, model.n_kv_head
    unit = 2 * heads if model.pos == "rope" else heads  # rope rotates pairs of channels
    if model.n_embd % unit:
        width = "even width, which rope needs" if model.pos == "rope" else "equal width"
        yield (
            f"model.n_embd = {model.n_embd} does not divide into model.n_head = {heads} heads of {width}; "
            f"set --model.n_embd={_round_up(model.n_embd, unit)}"
        )
    if groups and heads % groups:
        yield f"model.n_kv_head = {groups} does not divide n_head = {heads}; set --model.n_kv_head={gcd(heads, groups)}"
    if model.gated and model.bias:
        yield "model.gated = true has no biases; set --model.bias=false or --model.gated=false"
    hashed = model.n_hash_layer
    if model.router == "dense":  # has no experts, so a sweep over routers may include it
        if hashed:
            yield f"model.n_hash_layer = {hashed}: a dense model has no experts; set --model.n_hash_layer=0"
        return
    k, experts, last = model.top_k, model.n_expert, model.n_layer - 1
    if k > experts:
        remedy = f"set --model.top_k={experts} or --model.n_expert={k}"
        yield f"model.top_k = {k} is more than model.n_expert = {experts}; {remedy}"
    if model.gate_norm and model.gate_scale != 1:
        remedy = "set --model.gate_scale=1 or --model.gate_norm=0"
        yield f"model.gate_norm = {model.gate_norm} and model.gate_scale = {model.gate_scale} clash; {remedy}"
    if model.n_dense_layer > last:
        remedy = f"set --model.n_dense_layer={last} or --model.router=dense"
        yield f"model.n_dense_layer = {model.n_dense_layer} leaves none of {last + 1} layers with experts; {remedy}"
    elif hashed > (most := last + 1 - model.n_dense_layer):
        yield f"model.n_hash_layer = {hashed} is more than the {most} with experts; set --model.n_hash_layer={most}"


def _check_balance(model: Model, train: Train) -> Iterator[str]:
    """Of what balances loads.

    `runtime.preflight` checks that quantile balancing suits the router's formula.
    """
    if model.router == "dense":
        return
    quantile, rate, coef = (
        train.bias_update == "quantile",
        train.bias_update_rate,
        train.balance_loss_coef,
    )
    if quantile and rate:
        remedy = "set --train.bias_update_rate=0 or --train.bias_update=sign"
        yield f"train.bias_update_rate = {rate:g} is no setting of train.bias_update = quantile; {remedy}"
    if quantile and model.top_k == model.n_expert:
        yield "train.bias_update = quantile: each token takes all experts anyway; set --train.bias_update=sign"
    hashed = model.n_hash_layer
    if hashed and hashed == model.n_layer - model.n_dense_layer and (quantile or rate or coef):
        keys, remedy = (
            "train.balance_loss_coef, bias_update or bias_update_rate",
            f"--model.n_hash_layer={hashed - 1}",
        )
        yield f"model.n_hash_layer = {hashed} leaves no loads that {keys} could balance; leave them out or set {remedy}"


def _check_training(config: Config, world_size: int) -> Iterator[str]:
    train, optim = config.train, config.optim
    batch, micro_batch = train.batch_size, train.micro_batch_size
    group = micro_batch * world_size
    if batch % group:
        remedy = f"--train.batch_size={_round_up(batch, group)}"
        if batch % world_size == 0:
            remedy += f" or --train.micro_batch_size={gcd(batch // world_size, micro_batch)}"
        yield (
            f"train.batch_size = {batch} is not a multiple of train.micro_batch_size = {micro_batch} times "
            f"{world_size} rank(s) = {group}; set {remedy}"
        )
    steps, end, warmup = train.max_steps, "end", optim.warmup_steps
    if optim.schedule == "wsd":
        steps, end = optim.decay_start(steps), "decay"
    if warmup > steps:
        remedy = f"set --optim.warmup_steps={steps // 10}"
        yield f"optim.warmup_steps = {warmup} is more than the {steps} steps before the {end}; {remedy}"
    tasks, interval = config.eval.task_interval, config.eval.interval
    if config.eval.task_names and tasks % interval:
        yield (
            f"eval.task_interval = {tasks} is not a multiple of eval.interval = {interval}, and tasks are scored at "
            f"evaluations; set --eval.task_interval={_round_up(tasks, interval)}"
        )


def _check_branch(train: Train, optim: Optim) -> Iterator[str]:
    """A branch is the decay of its run: branch_step must be the step where it begins, and both parts have steps."""
    step, steps, start = train.branch_step, train.max_steps, optim.decay_start(train.max_steps)
    if not train.branch_from:
        if step:
            yield f"train.branch_step = {step} needs a trunk; name it (train.branch_from), or set --train.branch_step=0"
    elif optim.schedule != "wsd":
        yield f"train.branch_from = {train.branch_from} needs a decay that may follow; set --optim.schedule=wsd"
    elif start in (0, steps):
        yield f"optim.decay_fraction = {optim.decay_fraction:g}: a branch decays a part; set --optim.decay_fraction=0.2"
    elif step != start:
        yield (
            f"train.branch_step = {step} is not step {start}, where the decay begins (optim.decay_fraction = "
            f"{optim.decay_fraction:g} of train.max_steps = {steps}); set --train.branch_step={start}"
        )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
