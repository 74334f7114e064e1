"""Find errors in settings: in one alone, and between keys that are valid alone but not together.

REMOVED has the keys and values that could be set once. A file or override that sets one is refused
with what takes its place. The config.toml of a run that has one at its default still loads: the run
behaves as before without it. So does one with any value of a key in FREE.

An error names the nearest key or value. The error of a conflict names a remedy: overrides that
make the settings valid.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from configure.schema import KEYS, SECTIONS, Config, Model, Optim, Train, has_effect

LAST_COMMIT = "e125ff1"  # it had them all


class Removed(NamedTuple):
    """A key that is gone, or the former default of a key that is still there."""

    default: Any  # of the key at LAST_COMMIT
    instead: str  # what happens now, or what to set


REMOVED = {
    "train.parallel": Removed("auto", "the default is ddp; scripts.plan lists what fits"),
    "model.n_dense_layer": Removed(0, "all blocks have experts, or none (model.router=dense)"),
    "train.match_gates": Removed(
        True, "gates of another router are matched, unless model.gate_norm or gate_scale is set"
    ),
    "optim.decay": Removed("linear", "the decay of schedule wsd is linear"),
    "eval.spread": Removed("documents", "windows come from many documents"),
    "eval.task_limit": Removed(0, "tasks are scored on all documents; eval.downstream has --limit"),
    "train.reduce_dtype": Removed("float32", "gradients are summed over ranks in float32"),
    "train.force_balance": Removed(False, "the router always chooses"),
    "train.on_save_error": Removed("stop", "a failed save ends the run"),
    "log.tensorboard": Removed(False, "log.wandb and the pages of scripts.report show a run"),
    "train.loss_spike": Removed("off", "only steps whose gradients are NaN or Inf are skipped"),
    "train.spike_sigma": Removed(6.0, "there is no train.loss_spike"),
    "train.max_skipped_steps": Removed(20, "20 skipped steps in a row stop the run"),
    "optim.muon_split": Removed(True, "Muon orthogonalizes q, k, v, gate and up each"),
    "optim.momentum": Removed(0.95, "Muon's is 0.95"),
}

# They changed no loss: a run could resume with another value.
FREE = {"eval.task_limit", "train.on_save_error", "log.tensorboard"}

# What a run did whose config.toml lacks both this key and the younger one.
OLDER = {
    "eval.spread": ("tokens", "eval.tasks"),
    "optim.muon_split": (False, "optim.muon_experts"),
}


def find_removed(key: str, value: Any) -> Removed | None:
    """What is removed: the key, or this value of it."""
    removed = REMOVED.get(key)
    if removed and key in KEYS and value != removed.default:
        return None
    return removed


def drop_removed(recorded: dict[str, Any]) -> None:
    """Delete, from a run's own settings by dotted key, what is removed and has its default.

    Of FREE any value is deleted. What an older run did instead is added, so that it is refused.
    """
    for key, (value, younger) in OLDER.items():
        if younger not in recorded and has_effect(younger, recorded.get):
            recorded.setdefault(key, value)
    for key, value in list(recorded.items()):
        removed = find_removed(key, value)
        is_default = removed and repr(value) == repr(removed.default)  # 1 is not True
        if is_default or key in FREE:
            del recorded[key]


def build(settings: dict[str, Any]) -> Config:
    """A Config of settings by dotted key. Raises pydantic's ValidationError."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return Config.model_validate(tables)


def find_errors(settings: dict[str, Any], source: str | Path) -> list[str]:
    """List the errors of settings by dotted key, each checked alone.

    An error is a line `SOURCE: section.key = value: reason`.
    """
    errors = []
    for key, value in settings.items():
        try:
            build({key: value})
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                reason = _explain(key, value, error)
                errors.append(f"{source}: {show_key(key)} = {show(value)}: {reason}")
    return errors


def _explain(key: str, value: Any, error: Any) -> str:
    """The reason of one of pydantic's errors on a key, with the nearest key or choice."""
    if key in SECTIONS:
        return "is a section; set one of its keys"
    removed = find_removed(key, value)
    if removed:
        return f"removed: {removed.instead}. The last commit with it is {LAST_COMMIT}"
    if error["type"] == "extra_forbidden":
        suggestion = _suggest_key(key)
        return f"unknown key{suggestion or '.'} Or is the config of another version?"
    entry = error["loc"][2:]  # the path within the table that the key holds
    reason = "".join(f"{name!r}: " for name in entry)
    reason += error["msg"].removeprefix("Value error, ")
    if "enum" in KEYS[key] and isinstance(value, str):
        reason += _suggest(value, KEYS[key]["enum"])
    if (key, value) == ("train.device", "mps"):
        reason += "; a Mac trains on its CPU: leave it at 'auto', with train.dtype = 'auto'"
    return reason


def _suggest_key(key: str) -> str:
    """`; did you mean 'optim.lr'?` for `train.lr`, or for another project's `learning_rate`."""
    name = key.rpartition(".")[2]
    same_name = []
    for own, schema in KEYS.items():
        if name in [own.split(".")[1], *schema["other_names"].split()]:
            same_name.append(own)
    if same_name:
        return _suggest(key, same_name, cutoff=0.0)
    return _suggest(key, [*KEYS, *SECTIONS])


def _suggest(text: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    nearest = difflib.get_close_matches(text, choices, n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def show_key(key: str) -> str:
    """Show a key, quoted if it is empty or has characters that do not print."""
    return key if key and key.isprintable() else repr(key)


def show(value: Any) -> str:
    """Show a value as Python writes it, cut to 200 characters."""
    try:
        text = repr(value)
    except RecursionError:
        return "tables in tables"
    return text if len(text) <= 200 else f"{text[:200]}…"


def format_toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, dict):
        entries = [f"{format_toml(name)} = {format_toml(inner)}" for name, inner in value.items()]
        return "{" + ", ".join(entries) + "}"
    # JSON's \ud83d\ude00 is no TOML, nor is a DEL that JSON leaves as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def find_conflicts(config: Config, world_size: int = 1) -> list[str]:
    """List the errors between keys, one line each, for a run on `world_size` ranks."""
    return [
        *_check_model(config.model, config.train),
        *_check_batch(config.train, world_size),
        *_check_warmup(config),
        *_check_tasks(config),
        *_check_branch(config.train, config.optim),
        *_check_transfer(config),
    ]


def _check_model(model: Model, train: Train) -> Iterator[str]:
    heads = model.n_head
    groups = model.n_kv_head
    unit = heads
    width = "equal width"
    if model.pos == "rope":  # it rotates pairs of channels
        unit = 2 * heads
        width = "even width, which rope needs"
    if model.n_embd % unit:
        yield (
            f"model.n_embd = {model.n_embd} does not divide into model.n_head = {heads} heads of "
            f"{width}; set --model.n_embd={_round_up(model.n_embd, unit)}"
        )
    if groups and heads % groups:
        yield (
            f"model.n_kv_head = {groups} does not divide n_head = {heads}; "
            f"set --model.n_kv_head={gcd(heads, groups)}"
        )
    if model.gated and model.bias:
        yield "model.gated = true has no biases; set --model.bias=false or --model.gated=false"
    if model.router != "dense":
        yield from _check_experts(model, train)
        yield from _check_router_groups(model, train)
        yield from _check_balance(model, train)
    elif model.n_hash_layer:  # other keys of experts may be set: a sweep over routers has "dense"
        yield (
            f"model.n_hash_layer = {model.n_hash_layer}: a dense model has no experts; "
            f"set --model.n_hash_layer=0"
        )


def _check_experts(model: Model, train: Train) -> Iterator[str]:
    top_k = model.top_k
    if top_k > model.n_expert:
        yield (
            f"model.top_k = {top_k} is more than model.n_expert = {model.n_expert}; "
            f"set --model.top_k={model.n_expert} or --model.n_expert={top_k}"
        )
    if model.gate_norm and model.gate_scale != 1:
        yield (
            f"model.gate_norm = {model.gate_norm} and model.gate_scale = {model.gate_scale} clash; "
            "set --model.gate_scale=1 or --model.gate_norm=0"
        )
    if model.n_hash_layer > model.n_layer:
        yield (
            f"model.n_hash_layer = {model.n_hash_layer} is more than model.n_layer = "
            f"{model.n_layer}; set --model.n_hash_layer={model.n_layer}"
        )
    n = train.expert_parallel
    if model.n_expert % n:
        yield (
            f"model.n_expert = {model.n_expert} does not divide among train.expert_parallel = {n} "
            f"ranks; set --train.expert_parallel={gcd(model.n_expert, n)}"
        )


def _check_router_groups(model: Model, train: Train) -> Iterator[str]:
    groups = model.router_groups
    group_k = model.router_group_k
    if groups == group_k == 1:
        return
    chosen = f"model.router_groups = {groups}"
    limits = group_k < groups
    if limits and model.n_hash_layer:
        yield (
            f"{chosen}: the layers of model.n_hash_layer = {model.n_hash_layer} choose no experts "
            "by scores; set --model.n_hash_layer=0"
        )
    if model.n_expert % groups:
        yield (
            f"{chosen} does not divide model.n_expert = {model.n_expert}; "
            f"set --model.router_groups={gcd(model.n_expert, groups)}"
        )
    elif group_k > groups:
        yield (
            f"model.router_group_k = {group_k} is more than {chosen}; "
            f"set --model.router_group_k={groups}"
        )
    elif model.top_k > group_k * (model.n_expert // groups):
        size = model.n_expert // groups
        yield (
            f"model.top_k = {model.top_k} is more than the {group_k * size} experts of "
            f"model.router_group_k = {group_k} groups of {size}; "
            f"set --model.router_group_k={-(-model.top_k // size)}"
        )
    if limits and train.bias_update == "quantile":
        yield (
            f"train.bias_update = quantile: {chosen} chooses experts by no one threshold, whose "
            "quantile it needs; set --train.bias_update=sign"
        )


def _check_balance(model: Model, train: Train) -> Iterator[str]:
    """Check what balances loads."""
    quantile = train.bias_update == "quantile"
    rate = train.bias_update_rate
    if quantile and rate:
        yield (
            f"train.bias_update_rate = {rate:g} is no setting of train.bias_update = quantile; "
            "set --train.bias_update_rate=0 or --train.bias_update=sign"
        )
    if quantile and model.top_k == model.n_expert:
        yield (
            "train.bias_update = quantile: each token takes all experts anyway; "
            "set --train.bias_update=sign"
        )
    hashed = model.n_hash_layer
    balanced = quantile or rate or train.balance_loss_coef
    if balanced and hashed and hashed == model.n_layer:
        yield (
            f"model.n_hash_layer = {hashed} leaves no loads that train.balance_loss_coef, "
            "bias_update or bias_update_rate could balance; leave them out "
            f"or set --model.n_hash_layer={hashed - 1}"
        )


def _check_batch(train: Train, world_size: int) -> Iterator[str]:
    batch = train.batch_size
    micro_batch = train.micro_batch_size
    unit = micro_batch * world_size
    if batch % unit == 0:
        return
    remedy = f"--train.batch_size={_round_up(batch, unit)}"
    if batch % world_size == 0:
        remedy += f" or --train.micro_batch_size={gcd(batch // world_size, micro_batch)}"
    yield (
        f"train.batch_size = {batch} is not a multiple of train.micro_batch_size = {micro_batch} "
        f"times {world_size} rank(s) = {unit}; set {remedy}"
    )


def _check_warmup(config: Config) -> Iterator[str]:
    warmup = config.optim.warmup_steps
    room = config.steps_before_decay
    if warmup > room:
        end = "decay" if config.optim.schedule == "wsd" else "end"
        yield (
            f"optim.warmup_steps = {warmup} is more than the {room} steps before the "
            f"{end}; set --optim.warmup_steps={room // 10}"
        )


def _check_tasks(config: Config) -> Iterator[str]:
    task_interval = config.eval.task_interval
    interval = config.eval.interval
    if config.eval.task_names and task_interval % interval:
        yield (
            f"eval.task_interval = {task_interval} is not a multiple of "
            f"eval.interval = {interval}, and tasks are scored at evaluations; "
            f"set --eval.task_interval={_round_up(task_interval, interval)}"
        )


def _check_branch(train: Train, optim: Optim) -> Iterator[str]:
    """A branch is the decay of its run.

    So branch_step must be the step where the decay starts, and both parts have steps.
    """
    step = train.branch_step
    steps = train.max_steps
    start = optim.decay_start(steps)
    fraction = f"optim.decay_fraction = {optim.decay_fraction:g}"
    if not train.branch_from:
        if step:
            yield (
                f"train.branch_step = {step} needs a trunk; name it (train.branch_from), "
                "or set --train.branch_step=0"
            )
    elif optim.schedule != "wsd":
        yield (
            f"train.branch_from = {train.branch_from} needs a decay that may follow; "
            "set --optim.schedule=wsd"
        )
    elif start in (0, steps):
        yield f"{fraction}: a branch decays a part; set --optim.decay_fraction=0.2"
    elif step != start:
        yield (
            f"train.branch_step = {step} is not step {start}, where the decay begins "
            f"({fraction} of train.max_steps = {steps}); set --train.branch_step={start}"
        )


def _check_transfer(config: Config) -> Iterator[str]:
    """Check optim.transfer, whose ratios are of this model to one with heads of the same size."""
    if config.optim.transfer == "none":
        return
    model = config.model
    width = config.optim.base_width
    head_size = max(1, model.n_embd // model.n_head)
    if not width:
        yield (
            "optim.transfer = mup: optim.base_width = 0 is no width; set it to the model.n_embd at "
            f"which optim.lr was tuned, as --optim.base_width={2 * head_size}, "
            "or set --optim.transfer=none"
        )
    elif width % head_size:
        yield (
            f"optim.base_width = {width} does not divide into heads of this model's size, "
            f"model.n_embd / model.n_head = {head_size}; "
            f"set --optim.base_width={_round_up(width, head_size)} or another model.n_head"
        )
    if width:
        yield from _check_base_hidden(config)
    if config.train.init_from:
        yield (
            f"train.init_from = {config.train.init_from}: optim.transfer = mup scales random "
            "initial weights, and these are trained; set --optim.transfer=none"
        )
    if model.gate_norm and model.router != "dense":
        yield (
            f"model.gate_norm = {model.gate_norm:g}: optim.transfer = mup makes all gates count as "
            "gates of norm sqrt(top_k); set --model.gate_norm=0, and --model.gate_scale for a "
            "factor on that norm"
        )


def _check_base_hidden(config: Config) -> Iterator[str]:
    """Check the hidden width of the base against its `base_width` and this model's."""
    model = config.model
    base_width = config.optim.base_width
    base_hidden = config.optim.base_hidden
    hidden = model.active_hidden
    proportional = max(1, round(hidden * base_width / model.n_embd))
    if not base_hidden:
        yield (
            "optim.transfer = mup: optim.base_hidden = 0 is no width; set it to the "
            "(top_k + n_shared_expert) * expert_hidden at which optim.lr was tuned, "
            f"as --optim.base_hidden={proportional} if its ratio to n_embd was this model's"
        )
    elif config.optim.name == "muon" and base_hidden * model.n_embd != hidden * base_width:
        kept = ""
        if proportional * model.n_embd == hidden * base_width:  # else no whole number keeps it
            kept = f"--optim.base_hidden={proportional} if it was kept, "
        yield (
            f"optim.base_hidden = {base_hidden} of optim.base_width = {base_width} is another "
            f"ratio than {hidden} of {model.n_embd}, and Muon's rates are known for one ratio; set "
            f"model.expert_hidden to keep it, {kept}or --optim.name=adamw"
        )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
