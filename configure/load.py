"""Make a checked `Config` from a TOML file and a command line, and write it as text.

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
from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from common.files import check_regular
from common.text import decode_utf8
from configure.check import (
    build,
    drop_removed,
    find_conflicts,
    find_errors,
    format_toml,
    show,
    show_key,
)
from configure.schema import KEYS, SECTIONS, Config, Mix, replace

COMMAND_LINE = "command line"
# config.toml of every run has them, and hardly a file that a user writes
IN_EVERY_RUN = ("run.name", "optim.eps", "log.group")


class ConfigError(ValueError):
    """A config file or an override is wrong; the message has a line for each error and remedy."""


Axes = dict[tuple[str, ...], list[list]]  # linked keys: rows of values


class ConfigInput(NamedTuple):
    """Settings of a file and a command line, by dotted key. Each value is checked alone."""

    path: Path
    in_file: dict[str, Any]
    given: dict[str, Any]  # overrides from the command line
    axes: Axes
    overrides: Sequence[str]  # the command line itself
    added: list[str]  # keys of axes of the command line that the file has not

    @property
    def open_axes(self) -> Axes:
        """The axes whose keys the command line leaves open."""
        return {keys: rows for keys, rows in self.axes.items() if keys[0] not in self.given}

    def list_points(self) -> list[list[str]]:
        """The overrides of each run; see `sweep_points`."""
        points = [_as_overrides(self.given, self.given.values())]
        for keys, rows in self.open_axes.items():
            choices = [_as_overrides(keys, row) for row in rows]
            points = [[*point, *choice] for point in points for choice in choices]
        return points


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
        raise ConfigError(_describe_open_axes(read))
    config = build(read.in_file | read.given)
    config = _resolve_branch(config, read)
    config = _shorten_warmup(config, read)
    config = _fill_names(config, read)
    errors = find_conflicts(config, world_size)
    if "data.name" in read.given and config.data.mix:
        errors.append(
            f"data.name = {show_key(config.data.name)} would change nothing beside "
            f"data.mix = {config.data.mix}; "
            "add --data.mix={} to train on that set alone, or leave data.name out"
        )
    _raise_if(errors)
    return config


def load_recorded(path: str | Path) -> Config:
    """Load the config.toml of a run, which `dumps` wrote.

    Raises ConfigError also if it is empty or cut short: defaults would be another model.
    """
    in_file, _ = _read_file(Path(path))
    missing = [key for key in IN_EVERY_RUN if key not in in_file]
    if missing:
        state = "cut short" if in_file else "empty"
        raise ConfigError(
            f"{path}: {state}: it has no {', '.join(missing)}, which every run's has. Put back a "
            "copy (scripts.export writes one), or start over in a new folder (--fresh)"
        )
    return load(path)


def is_name_chosen(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Return True if the file or an override sets `run.name`; else `load` makes one up.

    Raises ConfigError as `load` does.
    """
    read = _read(path, overrides)
    return bool((read.in_file | read.given).get("run.name"))


def sweep_points(path: str | Path, overrides: Sequence[str] = ()) -> list[list[str]]:
    """List the overrides of each run of a sweep.

    They are `overrides` and one value of every open axis; the last axis changes fastest.

    A list among the `overrides`, such as `--run.seed=[0,1,2]`, replaces an axis of the file or is
    added as the last. A file without open axes gives one point. Every point is loaded once, so that
    a sweep fails before its first run.

    Raises:
        ConfigError: as `load` does, and if two points would write to the same folder.
    """
    read = _read(path, overrides)
    points = read.list_points()
    owners: dict[tuple[str, str], list[str]] = {}  # folder: the point that writes there
    for point in points:
        config = load(path, point)
        run = config.run
        if read.added and not (read.in_file | read.given).get("run.name"):
            # train.py cannot know that the point has an axis more than the file
            parts = [_format_name_part(key, attrgetter(key)(config)) for key in read.added]
            run = run.model_copy(update={"name": _join_name([run.name, *parts])})
            point.append(f"--run.name={run.name}")
        other = owners.setdefault((run.dir, run.name), point)
        if other is not point:
            raise ConfigError(
                f"{path} [sweep]: two points would write to {run.dir}/{run.name}: "
                f"{' '.join(other)} and {' '.join(point)}; leave run.name unset, "
                "and list the keys that differ in [sweep], each row once"
            )
    return points


def dumps(config: Config) -> str:
    """Write every key as TOML; loading the text gives an equal Config."""
    tables = []
    for section, values in config.model_dump().items():
        lines = [f"{name} = {format_toml(value)}\n" for name, value in values.items()]
        tables.append(f"[{section}]\n" + "".join(lines))
    return "\n".join(tables)


def differences(old: Config, new: Config) -> list[str]:
    """List the keys that differ, a line each, such as `model.router: 'kern' -> 'softmax'`."""
    lines = []
    for key in KEYS:
        read = attrgetter(key)
        if read(old) != read(new):
            lines.append(f"{key}: {read(old)!r} -> {read(new)!r}")
    return lines


# ---- settings that follow from others
def _resolve_branch(config: Config, read: ConfigInput) -> Config:
    """Fill in the setting of a branch that follows from the others.

    That is its step, or else its decay as a part of the run.
    """
    steps = config.train.max_steps
    step = config.train.branch_step
    start = config.optim.decay_start(steps)
    if not config.train.branch_from:
        return config
    if not step:
        return replace(config, "train", branch_step=start)
    if step < steps and step != start and "optim.decay_fraction" not in read.given:
        return replace(config, "optim", decay_fraction=(steps - step) / steps)
    return config


def _shorten_warmup(config: Config, read: ConfigInput) -> Config:
    """Shorten the warm-up of a shortened run to a tenth of the steps before the decay.

    Prints a note then. A warm-up that the user sets for this length stays: `find_conflicts`
    reports it.
    """
    warmup = config.optim.warmup_steps
    room = config.steps_before_decay
    of_this_length = "optim.warmup_steps" in read.in_file and "train.max_steps" not in read.given
    is_set = "optim.warmup_steps" in read.given or of_this_length
    if warmup <= room or is_set or config.train.branch_from:
        return config
    _print_note(
        f"train.max_steps = {config.train.max_steps} shortens optim.warmup_steps "
        f"from {warmup} to {room // 10}"
    )
    return replace(config, "optim", warmup_steps=room // 10)


def _fill_names(config: Config, read: ConfigInput) -> Config:
    stem = read.path.stem
    name = config.run.name or _name_run(config, read)
    group = config.log.group or re.sub(r"[^\w.-]+", "-", stem)  # characters that TOML can hold
    return replace(replace(config, "run", name=name), "log", group=group)


def _name_run(config: Config, read: ConfigInput) -> str:
    """Name a run's folder after its file, its router and the values of the axes.

    The seed follows if it was chosen. A branch is named after its trunk and its steps instead:
    TRUNK-800to1000.
    `folder.find_or_rename` finds a run whose name is shorter, because its sweep had fewer axes.
    """
    train = config.train
    in_name = {"model.router", "run.seed"}
    if train.branch_from:
        parts = [f"{Path(train.branch_from).name}-{train.branch_step}to{train.max_steps}"]
        in_name |= {"train.branch_from", "train.branch_step", "train.max_steps"}
    else:
        parts = [read.path.stem, config.model.router]
    keys = _list_axis_keys(read.axes, in_name)
    if not train.branch_from and "run.seed" in read.given:
        keys.append("run.seed")
    for key in keys:  # all are given, since the axes are closed
        parts.append(_format_name_part(key, read.given[key]))
    return _join_name(parts)


def _join_name(parts: Iterable[str]) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")


def _list_axis_keys(axes: Axes, in_name: set[str]) -> list[str]:
    """The keys of the axes whose values name a run, without keys that are `in_name` already.

    Of linked keys the first one is enough, unless its values repeat.
    """
    keys = []
    for linked, rows in axes.items():
        others = [key for key in linked if key not in in_name]
        distinct = {repr(row[0]) for row in rows}
        keys += others[:1] if len(distinct) == len(rows) else others
    return keys


def _format_name_part(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return str(Mix(value))
    if isinstance(value, str):
        return value
    return key.split(".")[1] + format_toml(value)


@cache
def _print_note(note: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {note}", file=sys.stderr)


# ---- files, overrides and axes as text
def _read(path: str | Path, overrides: Sequence[str]) -> ConfigInput:
    """Read the file and the overrides, and check every value alone.

    An override whose value is a list is an axis.
    """
    path = Path(path)
    in_file, sweep = _read_file(path)
    given: dict[str, Any] = {}
    listed: dict[str, list] = {}
    for text in overrides:
        key, value = _parse_override(text)
        given.pop(key, None)
        listed.pop(key, None)
        if isinstance(value, list):
            listed[key] = value
        else:
            given[key] = value
    errors = [*find_errors(in_file, path), *find_errors(given, COMMAND_LINE)]
    axes: Axes = {}
    for text, rows in (sweep | listed).items():
        source = COMMAND_LINE if text in listed else f"{path} [sweep]"
        keys = tuple(key.strip() for key in text.split(","))
        if len(keys) == 1 and isinstance(rows, list):
            rows = [[value] for value in rows]
        errors += _find_axis_errors(keys, rows, given, source)
        axes[keys] = rows
    for key, count in Counter(itertools.chain(*axes)).items():
        if count > 1:
            errors.append(
                f"{path} [sweep]: {show_key(key)}: is in the axes more than once; keep it in one"
            )
    _raise_if(errors)
    in_name = [*sweep, "model.router", "run.seed", "run.name", "run.dir"]
    added = [key for key in listed if key not in in_name]
    return ConfigInput(path, in_file, given, axes, overrides, added)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a file by dotted key, and the axes of its [sweep] by their keys as text."""
    try:
        check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        remedy = _suggest_file(path)
        if isinstance(error, PermissionError):
            remedy = "give yourself the right to read it"
        raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None
    try:
        text = decode_utf8(content)
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from None
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))  # which Windows' editors write first
        sweep = table.pop("sweep", {})
        table.pop("track", None)  # a contest's protocol: track/contest.py
        settings = _flatten(table)
        axes = _flatten(sweep) if isinstance(sweep, dict) else {"sweep": sweep}
    # also: a number of 5,000 digits, deep brackets, long dotted keys
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}; strings need quotes, booleans are true or false"
        ) from None
    for section in SECTIONS:
        if settings.get(section) == {}:  # an empty section
            del settings[section]
    if path.name == "config.toml" and settings.keys() >= {*IN_EVERY_RUN}:
        drop_removed(settings)
    return settings, axes


def _find_axis_errors(
    keys: tuple[str, ...], rows: Any, given: dict[str, Any], source: str
) -> list[str]:
    """List the errors in the rows of an axis.

    It is also an error if the command line sets only some of linked keys.
    """
    text = show_key(", ".join(keys))
    columns = len(keys)
    is_table = isinstance(rows, list) and bool(rows)
    if not is_table or any(not isinstance(row, list) or len(row) != columns for row in rows):
        kind = "values" if columns == 1 else f"rows of {columns} values, one for each key"
        return [f"{source}: {text} = {show(rows)}: expected a list of {kind}"]
    errors = []
    for row in rows:
        errors += find_errors(dict(zip(keys, row, strict=True)), source)
    missing = [f"--{key}=VALUE" for key in keys if key not in given]
    if 0 < len(missing) < columns:
        errors.append(
            f"{source}: {text}: are linked, set all of them or none; add {' '.join(missing)}"
        )
    return errors


def _describe_open_axes(read: ConfigInput) -> str:
    keys = itertools.chain(*read.open_axes)
    sweep = shlex.join([str(read.path), *read.overrides])
    first_point = shlex.join([str(read.path), *read.list_points()[0]])
    return (
        f"{read.path}: one run needs one value of each axis: {', '.join(keys)}\n"
        f"  train all: python -m scripts.sweep {sweep}\n"
        f"  train one: python train.py {first_point}\n"
        f"  plan one: python -m scripts.plan {first_point}"
    )


def _suggest_file(path: Path) -> str:
    """The remedy for a file that cannot be read: the nearest name of its folder and config/."""
    nearby = sorted([*Path("config").rglob("*.toml"), *path.parent.glob("*.toml")])
    by_stem = {file.stem: file for file in nearby}
    for stem in difflib.get_close_matches(path.stem, by_stem, n=1):
        return f"did you mean {by_stem[stem]}?"
    return "name a TOML file, such as config/quickstart.toml"


def _parse_override(text: str) -> tuple[str, Any]:
    """`--optim.lr=1e-3` -> `("optim.lr", 0.001)`.

    The value of a text key is text; other values are read as TOML if they can be, and else stay
    text, which the check of their type will report. A value in brackets is a list for any key but
    that of tasks, whose value several names are.
    """
    key, equals, value = text.lstrip("-").partition("=")
    if not equals:
        raise ConfigError(f"{COMMAND_LINE}: {text} has no value; write --{key}=VALUE")
    kind = KEYS.get(key, {}).get("type")
    is_list = value.startswith("[") and value.endswith("]") and key != "eval.tasks"
    if kind == "string" and not is_list:
        return key, value
    toml = value.lower() if kind == "boolean" else value
    try:
        table = tomllib.loads(f"value = {toml}")
    except (ValueError, RecursionError):
        if kind == "string":  # [kern,tanh], which a shell also makes of ["kern","tanh"]
            return key, [word.strip() for word in value[1:-1].split(",")]
        return key, value
    return key, table["value"] if len(table) == 1 else value  # more lines would be more settings


def _as_overrides(keys: Iterable[str], values: Iterable) -> list[str]:
    overrides = []
    for key, value in zip(keys, values, strict=True):
        text = value if isinstance(value, str) else format_toml(value)
        overrides.append(f"--{key}={text}")
    return overrides


def _flatten(table: dict, prefix: str = "") -> dict[str, Any]:
    """`{"model": {"router": "kern"}}` -> `{"model.router": "kern"}`.

    An empty table, and the table that a key has as its value, stay values.
    """
    flat = {}
    for name, value in table.items():
        key = prefix + name
        is_value = KEYS.get(key, {}).get("type") == "object"
        if isinstance(value, dict) and value and not is_value:
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def _raise_if(errors: list[str]) -> None:
    if errors:
        raise ConfigError("\n  ".join(dict.fromkeys(errors)))
