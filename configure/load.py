"""From a TOML file and a command line to a checked `Config`, and back to text.

Precedence: defaults < file < overrides such as `--model.router=kern`. A file's `[sweep]` lists
axes: a dotted key with its values, or several linked keys with rows of values. The points of the
sweep are all combinations:

    [sweep]
    "model.router" = ["softmax", "kern"]
    "model.n_expert, model.top_k, model.expert_hidden" = [[64, 8, 384], [128, 16, 192]]
    "run.seed" = [0, 1, 2]

An override of its keys closes an axis; a run needs all axes closed. A run without a name is named
after the file, the router, the axes' values, and the seed where there are several or the command
line sets it.
"""

import difflib
import itertools
import os
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from configure.check import find_conflicts, find_errors, format_toml, show, show_key
from configure.schema import KEYS, SECTIONS, Config, Mix, Optim, has_effect, select_keys

COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """A config file or an override is wrong; the message names every error with its remedy, one a line."""


class Settings(NamedTuple):
    """Settings by dotted key, each checked alone, of a file and a command line."""

    in_file: dict[str, Any]
    given: dict[str, Any]  # on the command line
    axes: dict[tuple[str, ...], list[list]]  # linked keys -> rows of values

    @property
    def open_axes(self) -> dict[tuple[str, ...], list[list]]:
        """The axes whose keys the command line leaves open."""
        return {keys: rows for keys, rows in self.axes.items() if keys[0] not in self.given}


def load(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """Load and check the settings of one run; fill in `run.name` and `log.group`.

    Args:
        path: the TOML file.
        overrides: `"--section.key=value"` strings, the dashes optional; the last one for a key
            wins.
        world_size: number of ranks that will train.

    Raises:
        ConfigError: the file or an override is wrong, or leaves a sweep axis open. Names all errors
            at once.
    """
    read = _read(path, overrides)
    if read.open_axes:
        raise ConfigError(_describe_open_axes(path, read.open_axes))
    values = {key: schema["default"] for key, schema in KEYS.items()} | read.in_file | read.given
    if values["train.branch_from"]:
        values |= _resolve_branch(values, read.given)
    values["optim.warmup_steps"] = _shorten_warmup(values, read)
    stem = Path(path).stem
    values["run.name"] = values["run.name"] or _name_run(stem, values, read)
    # characters that TOML can hold
    values["log.group"] = values["log.group"] or re.sub(r"[^\w.-]+", "-", stem)
    names = {section: model.model_fields for section, model in SECTIONS.items()}
    config = Config.model_validate(
        {part: {name: values[f"{part}.{name}"] for name in names[part]} for part in names}
    )
    errors = find_conflicts(config, world_size)
    if "data.name" in read.given and config.data.mix:
        change = f"data.name = {show_key(config.data.name)} would change nothing beside data.mix = {config.data.mix}"
        errors.append(
            f"{change}; add --data.mix={{}} to train on that set alone, or leave data.name out"
        )
    _raise_if(errors)
    return config


def is_name_chosen(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether the file or an override sets `run.name`; else `load` makes one up.

    Raises ConfigError as `load` does.
    """
    read = _read(path, overrides)
    return bool((read.in_file | read.given).get("run.name"))


def sweep_points(path: str | Path, overrides: Sequence[str] = ()) -> list[list[str]]:
    """List the overrides of each run of a sweep: `overrides` plus one value of every open axis, the last axis fastest.

    A list among the `overrides`, such as `--run.seed=[0,1,2]`, replaces an axis of the file or is
    added as the last. A file without open axes gives one point. Every point is loaded once, so that
    a sweep fails before its first run.

    Raises:
        ConfigError: as `load` does, and if two points would write to the same folder.
    """
    read = _read(path, overrides, lists=True)
    choices = [[_as_overrides(keys, row) for row in rows] for keys, rows in read.open_axes.items()]
    fixed = [text for text in overrides if _parse_override(text, lists=True)[0] in read.given]
    points = [[*fixed, *itertools.chain(*point)] for point in itertools.product(*choices)]
    owner: dict[tuple[str, str], list[str]] = {}
    for point in points:
        run = load(path, point).run
        other = owner.setdefault((run.dir, run.name), point)
        if other is not point:
            raise ConfigError(
                f"{path} [sweep]: two points would write to {run.dir}/{run.name}: {' '.join(other)} and "
                f"{' '.join(point)}; leave run.name unset, and list the keys that differ in [sweep], each row once"
            )
    return points


def dumps(config: Config) -> str:
    """Write every key as TOML; loading the text gives an equal Config."""
    sections = config.model_dump().items()
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {format_toml(value)}\n" for key, value in keys.items())
        for name, keys in sections
    )


def differences(old: Config, new: Config) -> list[str]:
    """List the keys that differ, a line each, such as `model.router: 'kern' -> 'softmax'`."""
    before, after = ({key: attrgetter(key)(config) for key in KEYS} for config in (old, new))
    return [
        f"{key}: {before[key]!r} -> {after[key]!r}" for key in KEYS if before[key] != after[key]
    ]


# ---- settings that follow from others
def _resolve_branch(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The setting of a branch that follows from the others: its step, or else its decay's part of the run."""
    steps, step = values["train.max_steps"], values["train.branch_step"]
    start = Optim(decay_fraction=values["optim.decay_fraction"]).decay_start(steps)
    if not step:
        return {"train.branch_step": start}
    follows = step < steps and step != start and "optim.decay_fraction" not in given
    return {"optim.decay_fraction": (steps - step) / steps} if follows else {}


def _shorten_warmup(values: dict[str, Any], read: Settings) -> int:
    """A tenth of the steps before the decay, with a note, where a shortened run has fewer than its warm-up."""
    steps, warmup = values["train.max_steps"], values["optim.warmup_steps"]
    before_decay = steps
    if values["optim.schedule"] == "wsd" and not values["train.branch_from"]:
        before_decay = Optim(decay_fraction=values["optim.decay_fraction"]).decay_start(steps)
    set_for_this_length = (
        "optim.warmup_steps" in read.in_file and "train.max_steps" not in read.given
    )
    if warmup <= before_decay or set_for_this_length or "optim.warmup_steps" in read.given:
        return warmup
    _print_note(
        f"train.max_steps = {steps} shortens optim.warmup_steps from {warmup} to {before_decay // 10}"
    )
    return before_decay // 10


def _name_run(stem: str, values: dict[str, Any], read: Settings) -> str:
    """Name a run's folder: file, router, the values of the axes, the seed if it was chosen.

    Of linked keys the first names the run, and all where values of the first repeat.
    `folder.find_or_rename` finds a run of before seeds or another axis were added. A branch is
    named after its trunk and its steps instead: TRUNK-800to1000.
    """
    seed = read.in_file.get("run.seed", KEYS["run.seed"]["default"])
    parts, named = [stem, values["model.router"]], ["model.router", "run.seed"]
    if trunk := values["train.branch_from"]:
        parts = [f"{Path(trunk).name}-{values['train.branch_step']}to{values['train.max_steps']}"]
        named += ["train.branch_from", "train.branch_step", "train.max_steps"]
    shown = []
    for keys, rows in read.axes.items():
        others = [key for key in keys if key not in named]
        repeats = len({repr(row[0]) for row in rows}) < len(rows)
        shown += others if repeats else others[:1]
    chosen = {*read.given, *itertools.chain(*read.axes)}
    if not trunk and (values["run.seed"] != seed or "run.seed" in chosen):
        shown.append("run.seed")
    for key in shown:
        value = values[key]
        value = str(Mix(value)) if isinstance(value, dict) else value
        parts.append(value if isinstance(value, str) else key.split(".")[1] + format_toml(value))
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")


@cache
def _print_note(note: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {note}", file=sys.stderr)


# ---- files, overrides and axes as text
def _read(path: str | Path, overrides: Sequence[str], lists: bool = False) -> Settings:
    """Read the file and the overrides, and check every value alone.

    With `lists`, an override whose value is a list is an axis.
    """
    table = _read_toml(Path(path))
    sweep = table.pop("sweep", {})
    table.pop("track", None)  # a contest's protocol: track/protocol.py
    in_file = {
        key: value for key, value in _flatten(table).items() if key not in SECTIONS or value != {}
    }
    # A run's own config.toml has every key of its day. Those that it lacks get what runs did before
    # they existed.
    if Path(path).name == "config.toml" and in_file.keys() >= set(select_keys("in_every_run")):
        for key, schema in KEYS.items():
            if "before" in schema and has_effect(key, lambda other: in_file.get(other, True)):
                in_file.setdefault(key, schema["before"])
    given, opened = {}, {}
    for text in overrides:
        key, value = _parse_override(text, lists)
        (opened if lists and isinstance(value, list) else given)[key] = value
    axes_by_text = _flatten(sweep if isinstance(sweep, dict) else {"sweep": sweep}) | opened
    errors, axes = [*find_errors(in_file, path), *find_errors(given, COMMAND_LINE)], {}
    for text, rows in axes_by_text.items():
        keys = tuple(key.strip() for key in text.split(","))
        if len(keys) == 1 and isinstance(rows, list):
            rows = [[value] for value in rows]
        errors += _find_axis_errors(
            keys, rows, given, COMMAND_LINE if text in opened else f"{path} [sweep]"
        )
        axes[keys] = rows
    counts = Counter(itertools.chain(*axes))
    repeated = [show_key(key) for key, count in counts.items() if count > 1]
    errors += [
        f"{path} [sweep]: {key}: is in the axes more than once; keep it in one" for key in repeated
    ]
    _raise_if(errors)
    return Settings(in_file, given, axes)


def _find_axis_errors(
    keys: tuple[str, ...], rows: Any, given: dict[str, Any], source: str
) -> list[str]:
    """What is wrong with the rows of an axis, or with linked keys of which the command line sets only one."""
    text = show_key(", ".join(keys))
    if (
        not isinstance(rows, list)
        or not rows
        or any(not isinstance(r, list) or len(r) != len(keys) for r in rows)
    ):
        kind = "values" if len(keys) == 1 else f"rows of {len(keys)} values, one for each key"
        return [f"{source}: {text} = {show(rows)}: expected a list of {kind}"]
    errors = [
        error for row in rows for error in find_errors(dict(zip(keys, row, strict=True)), source)
    ]
    missing = [f"--{key}=VALUE" for key in keys if key not in given]
    if 0 < len(missing) < len(keys):
        errors.append(
            f"{source}: {text}: are linked, set all of them or none; add {' '.join(missing)}"
        )
    return errors


def _describe_open_axes(path: str | Path, axes: dict[tuple[str, ...], list[list]]) -> str:
    first_point = shlex.join(
        itertools.chain(*(_as_overrides(keys, rows[0]) for keys, rows in axes.items()))
    )
    return (
        f"{path} sweeps {', '.join(itertools.chain(*axes))}, and one run needs one value of each\n"
        f"  train all: python -m scripts.sweep {path}\n"
        f"  train one: python train.py {path} {first_point}\n"
        f"  plan one: python -m scripts.plan {path} {first_point}"
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {_suggest_file(path)}") from None
    # also: not UTF-8, a number of 5,000 digits, deep brackets
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}; strings need quotes, booleans are true or false"
        ) from None


def _suggest_file(path: Path) -> str:
    """The remedy for a config file that cannot be read: the file of the nearest name, or those in its folder."""
    is_folder = os.path.isdir(path)
    nearby = sorted(
        {*(path if is_folder else path.parent).glob("*.toml")} - {Path("pyproject.toml")}
    )
    by_stem = {file.stem: file for file in [*sorted(Path("config").rglob("*.toml")), *nearby]}
    nearest = [] if is_folder else difflib.get_close_matches(path.stem, by_stem, n=1)
    if nearest:
        return f"did you mean {by_stem[nearest[0]]}?"
    return f"name a TOML file, such as {', '.join(map(str, nearby)) or 'config/quickstart.toml'}"


def _parse_override(text: str, lists: bool = False) -> tuple[str, Any]:
    """`--optim.lr=1e-3` -> `("optim.lr", 0.001)`: text for a text key, else a TOML value if it is one.

    With `lists`, `--model.router=["kern"]` gives a list for a text key as well.
    """
    key, equals, value = text.lstrip("-").partition("=")
    if not equals:
        raise ConfigError(f"{COMMAND_LINE}: {text} has no value; write --{key}=VALUE")
    kind = KEYS.get(key, {}).get("type")
    if kind == "string" and not (lists and value.startswith("[")):
        return key, value
    try:
        table = tomllib.loads(f"value = {value.lower() if kind == 'boolean' else value}")
    except (ValueError, RecursionError):
        return key, value  # the check of its type will report it
    return key, table["value"] if len(table) == 1 else value  # more lines would be more settings


def _as_overrides(keys: Sequence[str], row: Sequence) -> list[str]:
    pairs = zip(keys, row, strict=True)
    return [
        f"--{key}={value if isinstance(value, str) else format_toml(value)}" for key, value in pairs
    ]


def _flatten(table: dict, prefix: str = "") -> dict[str, Any]:
    """`{"model": {"router": "kern"}}` -> `{"model.router": "kern"}`; an empty table, or a key's own, stays a value."""
    flat = {}
    for key, value in table.items():
        deeper = (
            isinstance(value, dict) and value and KEYS.get(prefix + key, {}).get("type") != "object"
        )
        flat |= _flatten(value, f"{prefix}{key}.") if deeper else {prefix + key: value}
    return flat


def _raise_if(errors: list[str]) -> None:
    if errors:
        raise ConfigError("\n  ".join(dict.fromkeys(errors)))
