"""From a TOML file and a command line to a checked `Config`, and back to text.

Precedence: defaults < file < overrides such as `--model.router=kern`. A file's `[sweep]` lists axes: a dotted key with
its values, or several linked keys with rows of values. The points of the sweep are all combinations:

    [sweep]
    "model.router" = ["softmax", "kern"]
    "model.n_expert, model.top_k, model.expert_hidden" = [[64, 8, 384], [128, 16, 192]]
    "run.seed" = [0, 1, 2]

An override of its keys closes an axis; a run needs all axes closed. A run without a name is named after the file, the
router, the axes' values, and the seed where it differs from the file's.
"""

import difflib
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from configure.check import describe_type, find_error, find_errors, format_toml, format_value, quoted, shown
from configure.conflicts import find_conflicts
from configure.schema import KEYS, SECTIONS, Config, Mix, Optim

CHECKOUT = Path(__file__).resolve().parents[1]
COMMAND_LINE = "command line"
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}  # in overrides, in upper case too
USAGE = """\
usage: python train.py FILE [--section.key=value ...]

Trains the model described by FILE (TOML, such as config/quickstart.toml). FILE holds what differs from the defaults
below; --section.key=value overrides both. Many GPUs: torchrun --nproc_per_node=8 train.py FILE [...]"""


class ConfigError(ValueError):
    """A config file or an override is wrong; the message names every error with its remedy."""


def load(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """Load and check the settings of one run; fill in `run.name` and `log.group`.

    Args:
        path: the TOML file.
        overrides: `"--section.key=value"` strings, the dashes optional; the last one for a key wins.
        world_size: number of ranks that will train.

    Raises:
        ConfigError: the file or an override is wrong, or leaves a sweep axis open. Names all errors at once.
    """
    settings, in_file, axes = _read(path, overrides)
    still_open = {keys: rows for keys, rows in axes.items() if keys[0] not in settings}
    if still_open:
        names = ", ".join(key for keys in still_open for key in keys)
        raise ConfigError(
            f"{path} sweeps {names}, and one run needs one value of each\n"
            f"  train all: python -m scripts.sweep {path}\n"
            f"  train one: python train.py {path} "
            + shlex.join(text for keys, rows in still_open.items() for text in _as_overrides(keys, rows[0]))
        )
    defaults = {key: schema["default"] for key, schema in KEYS.items()}
    values, stem = defaults | settings, Path(path).stem
    given = {_parse_override(text)[0] for text in overrides}
    if values["train.branch_from"]:
        values |= (branch := _resolve_branch(values, given))
        settings |= branch
    settings["run.name"] = values["run.name"] or _name_run(stem, values, (defaults | in_file)["run.seed"], axes)
    settings["log.group"] = values["log.group"] or re.sub(r"[^\w.-]+", "-", stem)  # characters that TOML can hold
    steps, warmup = values["train.max_steps"], values["optim.warmup_steps"]
    shortened = "train.max_steps" in given or "optim.warmup_steps" not in in_file
    if warmup > steps and shortened and "optim.warmup_steps" not in given:
        settings["optim.warmup_steps"] = steps // 10
        _say(f"note: train.max_steps = {steps} shortens optim.warmup_steps from {warmup} to {steps // 10}")
    config = Config.model_validate(_nest(settings))
    for key in sorted(given & {"optim.decay_fraction", "optim.decay"}):
        if config.optim.schedule != "wsd":
            _say(f"note: {key} changes nothing with optim.schedule = {config.optim.schedule}")
    errors = find_conflicts(config, world_size)
    if "data.name" in given and config.data.mix:
        errors.append(
            f"{COMMAND_LINE}: data.name = {quoted(config.data.name)} would change nothing beside data.mix = "
            f"{config.data.mix}; add --data.mix={{}} to train on that set alone, or leave data.name out"
        )
    _raise_if(errors, path, overrides)
    return config


def _resolve_branch(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The setting of a branch that follows from the others: its step, or else its decay's part of the run."""
    steps, step = values["train.max_steps"], values["train.branch_step"]
    start = Optim(decay_fraction=values["optim.decay_fraction"]).decay_start(steps)
    if not step:
        return {"train.branch_step": start}
    follows = step < steps and step != start and "optim.decay_fraction" not in given
    return {"optim.decay_fraction": (steps - step) / steps} if follows else {}


@cache
def _say(note: str) -> None:
    """Print a note to stderr, once in this process, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(note, file=sys.stderr)


def is_name_chosen(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether the file or an override sets `run.name`; else `load` makes one up. Raises ConfigError as `load` does."""
    return bool(_read(path, overrides)[0].get("run.name"))


def sweep_points(path: str | Path, overrides: Sequence[str] = ()) -> list[list[str]]:
    """List the overrides of each run of a sweep: `overrides` plus one value of every open axis, the last axis fastest.

    A list among the `overrides`, such as `--run.seed=[0,1,2]`, replaces an axis of the file or is added as the last. A
    file without open axes gives one point. Every point is loaded once, so that a sweep fails before its first run.

    Raises:
        ConfigError: as `load` does, and if two points would write to the same folder.
    """
    settings, _, axes = _read(path, overrides, lists=True)
    choices = [[_as_overrides(keys, row) for row in rows] for keys, rows in axes.items() if keys[0] not in settings]
    fixed = [text for text in overrides if not isinstance(_parse_override(text, lists=True)[1], list)]
    points = [[*fixed, *itertools.chain(*point)] for point in itertools.product(*choices)]
    owner: dict[tuple[str, str], list[str]] = {}
    for point in points:
        run = load(path, point).run
        other = owner.setdefault((run.dir, run.name), point)
        if other is not point:
            raise ConfigError(
                f"{path} [sweep]: two points would write to {run.dir}/{run.name}: {' '.join(other)} and "
                f"{' '.join(point)}; leave run.name unset, list each value of an axis once, put one of linked keys "
                f"first that differs from row to row, and sweep keys other than run.seed in the file"
            )
    return points


def _name_run(stem: str, values: dict[str, Any], seed: int, axes: Iterable[tuple[str, ...]]) -> str:
    """Name a run's folder: file, router, the values of the axes (of linked keys the first), the seed if not the file's.

    So seeds may be added to a finished run. `folder.find_or_rename` finds a run of before another axis was added. A
    branch is named after its trunk and its steps instead: TRUNK-800to1000.
    """
    parts, named = [stem, values["model.router"]], ["model.router", "run.seed"]
    if trunk := values["train.branch_from"]:
        parts = [f"{Path(trunk).name}-{values['train.branch_step']}to{values['train.max_steps']}"]
        named += ["train.branch_from", "train.branch_step", "train.max_steps"]
        seed = values["run.seed"]
    others = [[key for key in keys if key not in named] for keys in axes]
    for key in [*(keys[0] for keys in others if keys), *["run.seed"] * (values["run.seed"] != seed)]:
        value = values[key]
        value = str(Mix(value)) if isinstance(value, dict) else value
        parts.append(value if isinstance(value, str) else key.split(".")[1] + format_value(value))
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")


def dumps(config: Config) -> str:
    """Write every key as TOML; loading the text gives an equal Config."""
    sections = config.model_dump().items()
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {format_toml(value)}\n" for key, value in keys.items())
        for name, keys in sections
    )


def differences(old: Config, new: Config) -> list[str]:
    """List the keys that differ, a line each, such as `model.router: 'kern' -> 'softmax'`.

    Not data.name where `old` has a mixture, which takes its place.
    """
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    if old.data.mix:
        after["data.name"] = before["data.name"]
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in KEYS if before[key] != after[key]]


def help_text() -> str:
    """Describe every key by default, meaning and type, grouped by section, at most 120 columns wide."""
    wide = max(map(len, KEYS)) + len("--")
    lines = []
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for key, schema in KEYS.items():
            if key.startswith(section + "."):
                start = f"  {'--' + key:{wide}}  {json.dumps(schema['default']):10}  "
                indents = {"initial_indent": start, "subsequent_indent": " " * len(start)}
                meaning = f"{schema['description']} ({describe_type(key)})"
                lines.append(textwrap.fill(meaning, 120, **indents, break_on_hyphens=False))
    return "\n".join(lines[1:])


def from_command_line(argv: Sequence[str], world_size: int = 1) -> Config:
    """Load the Config of the command line `FILE [--section.key=value ...]`; `argv` excludes the program's name.

    `--config FILE` and `--section.key value` work too. `--help` prints every key and exits with 0; a wrong command line
    or config prints the errors to stderr and exits with 2. Ranks other than 0 exit silently.
    """
    if "-h" in argv or "--help" in argv:
        _exit(0, f"{USAGE}\n\n{help_text()}")
    try:
        return load(*split_command_line(argv), world_size)
    except ConfigError as error:
        tell_torchrun(str(error))
        _exit(2, f"error: {error}")


def _exit(status: int, text: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr if status else sys.stdout)
    raise SystemExit(status)


def tell_torchrun(error: str) -> None:
    """Leave an error for torchrun, which prints it after its own trace."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": f"error: {error}", "timestamp": int(time.time())}))


def split_command_line(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the config file and `--key=value` overrides.

    Raises:
        ConfigError: not exactly one file, or an override without a value.
    """
    files, overrides = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            files.append(word)
            continue
        key, equals, value = word.partition("=")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{key} has no value; write {key}=VALUE")
        if key == "--config":
            files.append(value)
        else:
            overrides.append(f"{key}={value}")
    if len(files) != 1:
        found = f"found {len(files)}: {', '.join(files)} (overrides start with --)" if files else "found none"
        raise ConfigError(f"one config file is needed, {found}\n{USAGE}\nevery key: python train.py --help")
    return files[0], overrides


def _read(path: str | Path, overrides: Sequence[str], lists: bool = False) -> tuple[dict, dict, dict[tuple, list]]:
    """Read the file and the overrides, and check every value alone.

    Returns:
        The settings by dotted key (file, then overrides), those of the file alone, and the sweep's axes {keys: rows}.
        With `lists`, an override whose value is a list is an axis.
    """
    table = _read_toml(Path(path))
    sweep = table.pop("sweep", {})
    in_file = {key: value for key, value in _flatten(table).items() if key not in SECTIONS or value != {}}
    # A run's own file has every key of its day: what it lacks is younger.
    if Path(path).name == "config.toml" and {"run.name", "log.group", "optim.eps"} <= in_file.keys():
        before = {key: of for key, of in KEYS.items() if "before" in of and in_file.get(of.get("with", ""), True)}
        in_file = {key: of["before"] for key, of in before.items()} | in_file
    given, opened = {}, {}
    for text in overrides:
        key, value = _parse_override(text, lists)
        (opened if lists and isinstance(value, list) else given)[key] = value

    errors = find_errors(in_file, path)
    if not isinstance(sweep, dict):
        errors.append(f"{path}: sweep: found {shown(sweep)}, expected a section: [sweep] with lists by dotted key")
        sweep = {}
    axes, seen = {}, {}
    for text, rows in (_flatten(sweep) | opened).items():
        source = COMMAND_LINE if text in opened else f"{path} [sweep]"
        keys = tuple(key.strip() for key in text.split(","))
        wrong = _find_axis_errors(text, keys, rows, source)
        for key in keys:
            if seen.setdefault(key, text) != text or keys.count(key) > 1:
                wrong.append(f"{source}: {quoted(key)}: found twice ({text}; {seen[key]}); keep it in one axis, once")
        partly = given.keys() & set(keys)
        if not wrong and partly and len(partly) < len(keys):
            rest = " ".join(_as_overrides([key for key in keys if key not in given], ["VALUE"] * len(keys)))
            wrong.append(f"{source}: {text}: linked, but the command line sets only {', '.join(partly)}; add {rest}")
        errors += dict.fromkeys(wrong)
        axes[keys] = rows if wrong or len(keys) > 1 else [[value] for value in rows]
    errors += find_errors(given, COMMAND_LINE)
    _raise_if(errors, path, overrides)

    open_keys = {key for keys in axes for key in keys} - given.keys()
    settings = {key: value for key, value in (in_file | given).items() if key not in open_keys}
    return settings, in_file, axes


def _find_axis_errors(text: str, keys: tuple[str, ...], rows: Any, source: str) -> list[str]:
    """List what is wrong with the values of one axis, each checked alone."""
    if not isinstance(rows, list) or not rows:
        return [f"{source}: {quoted(text)}: found {shown(rows)}, expected a list of values"]
    if len(keys) == 1:
        return [error for value in rows if (error := find_error(text, value, source))]
    errors = []
    for row in rows:
        if isinstance(row, list) and len(row) == len(keys):
            errors += find_errors(dict(zip(keys, row, strict=True)), source)
        else:
            names = ", ".join(key.split(".")[-1] for key in keys)
            errors.append(f"{source}: {quoted(text)}: found {shown(row)}, expected lists of {len(keys)}: [{names}]")
    return errors


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        if not path.is_absolute() and (CHECKOUT / path).is_file() and Path.cwd() != CHECKOUT:
            raise ConfigError(f"{path}: {error.strerror}; start from the checkout: cd {CHECKOUT}") from None
        files = sorted({*path.parent.glob("*.toml"), *Path("config").rglob("*.toml")})
        close = difflib.get_close_matches(path.stem, {file.stem for file in files}, 1)
        if meant := [str(file) for file in files if file.stem in close]:
            raise ConfigError(f"{path}: {error.strerror}; did you mean {' or '.join(meant)}?") from None
        nearby = sorted(map(str, path.parent.glob("*.toml"))) or sorted(map(str, Path("config").glob("*.toml")))
        raise ConfigError(f"{path}: {error.strerror}; found nearby: {', '.join(nearby) or 'none'}") from None
    except (ValueError, RecursionError) as error:  # also: not UTF-8, a number of 5,000 digits, deep brackets
        raise ConfigError(f"{path} is not TOML: {error}; strings need quotes, booleans are true or false") from None


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
    if kind == "boolean" and value.lower() in BOOLEANS:
        return key, BOOLEANS[value.lower()]
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value  # the check of its type will report it
    return key, table["value"] if len(table) == 1 else value  # more lines would be more settings


def _as_overrides(keys: Sequence[str], row: Sequence) -> list[str]:
    return [f"--{key}={format_value(value)}" for key, value in zip(keys, row, strict=False)]


def _flatten(table: dict, prefix: str = "") -> dict[str, Any]:
    """`{"model": {"router": "kern"}}` -> `{"model.router": "kern"}`; an empty table, or a key's own, stays a value."""
    flat = {}
    for key, value in table.items():
        deeper = isinstance(value, dict) and value and KEYS.get(prefix + key, {}).get("type") != "object"
        flat |= _flatten(value, f"{prefix}{key}.") if deeper else {prefix + key: value}
    return flat


def _nest(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`{"model.router": "kern"}` -> `{"model": {"router": "kern"}}`."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def _raise_if(errors: list[str], path: str | Path, overrides: Sequence[str]) -> None:
    if errors:
        count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        raise ConfigError("\n  ".join([f"{' '.join([str(path), *overrides])}: {count}", *errors]))
