"""From a TOML file and a command line to a checked `Config`, and back to text.

Precedence: defaults < file < overrides such as `--model.router=kern`. A file's `[sweep]` lists axes, each a dotted key
with a list of values; an override of the same key closes an axis, and a run needs all axes closed.
"""

import difflib
import itertools
import json
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import ValidationError

from configure.schema import KEYS, SECTIONS, Config, check

COMMAND_LINE = "command line"
USAGE = """\
usage: python train.py FILE [--section.key=value ...]

Trains the model that FILE (TOML, such as config/quickstart.toml) describes. FILE holds what differs from the defaults
below; --section.key=value overrides both. Many GPUs: torchrun --nproc_per_node=8 train.py FILE [...]"""


class ConfigError(ValueError):
    """A config file or an override is wrong; the message names every fault with its remedy."""


def load(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """The checked settings of one run on `world_size` ranks; `run.name` is filled in.

    `overrides` are `"--section.key=value"` strings, the dashes optional; of two for one key the later holds.
    Raises ConfigError, naming all faults at once, for a file or override that is wrong or leaves a sweep axis open.
    """
    settings, axes = _read(path, overrides)
    still_open = [key for key in axes if key not in settings]
    if still_open:
        close = " ".join(f"--{key}={_as_override(axes[key][0])}" for key in still_open)
        raise ConfigError(
            f"{path} sweeps {', '.join(still_open)}, and one run needs one value of each\n"
            f"  all of them: python -m scripts.sweep {path}\n"
            f"  one of them: python train.py {path} {close}"
        )
    if not settings.get("run.name"):
        parts = [Path(path).stem, *(_as_override(settings[key]) for key in axes)]
        settings["run.name"] = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.") or "run"
    config = Config.model_validate(_nest(settings))
    _raise_if(check(config, world_size), path, overrides)
    return config


def sweep_points(path: str | Path, overrides: Sequence[str] = ()) -> list[list[str]]:
    """Overrides of each run of a sweep: `overrides` plus one value of every open axis, the last axis varying fastest.

    A file without open axes gives one point. Every point has been loaded once, so a sweep fails before its first run;
    raises ConfigError as `load` does, and where two points would share a run's folder.
    """
    settings, axes = _read(path, overrides)
    choices = [
        [f"--{key}={_as_override(value)}" for value in values] for key, values in axes.items() if key not in settings
    ]
    points = [[*overrides, *point] for point in itertools.product(*choices)]
    owner: dict[tuple[str, str], list[str]] = {}
    for point in points:
        run = load(path, point).run
        other = owner.setdefault((run.dir, run.name), point)
        if other is not point:
            raise ConfigError(
                f"{path}: two points of the sweep would write to {run.dir}/{run.name}: {' '.join(other)} and "
                f"{' '.join(point)}; leave run.name unset, and list each value of an axis once"
            )
    return points


def dumps(config: Config) -> str:
    """TOML text of every key; loading it gives an equal Config."""
    return tomli_w.dumps(config.model_dump())


def differences(old: Config, new: Config) -> list[str]:
    """One line a key that differs, such as `model.router: 'kern' -> 'softmax'`."""
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in KEYS if before[key] != after[key]]


def help_text() -> str:
    """Every key with its default, meaning and type, grouped by section, at most 120 columns wide."""
    wide = max(map(len, KEYS)) + len("--")
    lines = []
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for key, schema in KEYS.items():
            if key.startswith(section + "."):
                start = f"  {'--' + key:{wide}}  {json.dumps(schema['default']):10}  "
                meaning = f"{schema['description']} ({_expected(key)})"
                lines.append(
                    textwrap.fill(
                        meaning, 120, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
                    )
                )
    return "\n".join(lines[1:])


def from_command_line(argv: Sequence[str], world_size: int = 1) -> Config:
    """The Config that `train.py FILE [--section.key=value ...]` asks for; `argv` is without the program's name.

    `--config FILE` and `--section.key value` are understood too. `--help` prints every key and exits with 0, a wrong
    command line or config prints what is wrong to stderr and exits with 2; ranks other than 0 exit silently.
    """
    if "-h" in argv or "--help" in argv:
        _exit(0, f"{USAGE}\n\n{help_text()}")
    try:
        return load(*split_command_line(argv), world_size)
    except ConfigError as error:
        _exit(2, str(error))


def _exit(status: int, text: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr if status else sys.stdout)
    raise SystemExit(status)


def split_command_line(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Config file and `--key=value` overrides of a command line."""
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


def _read(path: str | Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, list]]:
    """Settings by dotted key (file, then overrides) and sweep axes, every value checked alone."""
    table = _read_toml(Path(path))
    sweep = table.pop("sweep", {})
    try:
        in_file = _flatten(table)
        axes = _flatten(sweep) if isinstance(sweep, dict) else {}
    except RecursionError:
        raise ConfigError(
            f"{path}: tables nested without end; a setting is [section] and below it key = value"
        ) from None
    in_file = {key: value for key, value in in_file.items() if key not in SECTIONS or value != {}}  # without lines
    given = dict(_parse_override(text) for text in overrides)

    faults = [fault for key, value in in_file.items() if (fault := _fault(key, value, path))]
    if not isinstance(sweep, dict):
        faults.append(f"{path}: sweep: found {_shown(sweep)}, expected a section: [sweep] with lists by dotted key")
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            faults.append(f"{path} [sweep]: {_named(key)}: found {_shown(values)}, expected a list of values")
        else:
            faults += [fault for value in values if (fault := _fault(key, value, f"{path} [sweep]"))]
    faults += [fault for key, value in given.items() if (fault := _fault(key, value, COMMAND_LINE))]
    _raise_if(faults, path, overrides)

    open_keys = axes.keys() - given.keys()
    settings = {key: value for key, value in (in_file | given).items() if key in KEYS and key not in open_keys}
    return settings, axes


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); make it readable, or name another file"
        ) from None
    if data is None:
        nearby = sorted(map(str, path.parent.glob("*.toml"))) or sorted(map(str, Path("config").glob("*.toml")))
        raise ConfigError(f"{path}: no such file; there are: {', '.join(nearby) or 'none nearby'}")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # also no UTF-8, a number of 5,000 digits, brackets without end
        raise ConfigError(f"{path} is not TOML: {error}; strings need quotes, booleans are true or false") from None


def _parse_override(text: str) -> tuple[str, Any]:
    """`--optim.lr=1e-3` -> `("optim.lr", 0.001)`: text for a text key, else a TOML value if it is one."""
    key, equals, value = text.lstrip("-").partition("=")
    if not equals:
        raise ConfigError(f"{COMMAND_LINE}: {text} has no value; write --{key}=VALUE")
    if key in KEYS and KEYS[key]["type"] == "string":
        return key, value
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value  # the check of its type will name it
    return key, table["value"] if len(table) == 1 else value  # more lines would be more settings


def _as_override(value: Any) -> str:
    """Text that `_parse_override` reads back as `value`."""
    return value if isinstance(value, str) else json.dumps(value)


def _flatten(table: dict, prefix: str = "") -> dict[str, Any]:
    """`{"model": {"router": "kern"}}` -> `{"model.router": "kern"}`; an empty table stays a value."""
    flat = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def _nest(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`{"model.router": "kern"}` -> `{"model": {"router": "kern"}}`."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def _fault(key: str, value: Any, source: str | Path) -> str | None:
    """What is wrong with one setting, alone; None if it is valid."""
    if key in SECTIONS:
        return f"{source}: {key}: found {_shown(value)}, expected a section: [{key}] in a file, or --{key}.KEY=VALUE"
    if key not in KEYS:
        return f"{source}: {_named(key)}: unknown key{_did_you_mean(key, [*KEYS, *SECTIONS])}"
    section, name = key.split(".")
    expected = None
    try:
        SECTIONS[section].model_validate({name: value})
    except ValidationError:
        expected = _expected(key)
    else:
        if isinstance(value, int) and abs(value) >= 2**63:
            expected = "a number below 2^63"
        elif isinstance(value, str) and not value.isprintable():
            expected = "printable text"
    if expected is None:
        return None
    hint = _did_you_mean(value, KEYS[key].get("enum", [])) if isinstance(value, str) else ""
    return f"{source}: {key}: found {_shown(value)} ({type(value).__name__}), expected {expected}{hint}"


def _named(key: str) -> str:
    return key if key and key.isprintable() else repr(key)


def _shown(value: Any) -> str:
    """The value as Python writes it, its beginning if that is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of 5,000 digits, tables without end
        return "a value too large to show"
    return text if len(text) <= 200 else f"{text[:200]}…"


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'optim.lr'?` for `train.lr`: the right key in the wrong section first, then the nearest text."""
    same_key = [other for other in known if other.split(".")[-1] == name.split(".")[-1]]
    near = difflib.get_close_matches(name, same_key or known, n=1, cutoff=0 if same_key else 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _expected(key: str) -> str:
    """Type and range of a key in words, such as `int >= 1` or `one of learned, rope`."""
    schema = KEYS[key]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "string":
        return "string of letters, digits, '.', '_' and '-'" if "pattern" in schema else "string"
    if schema["type"] == "boolean":
        return "bool, true or false"
    bounds = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
    limits = [f"{sign} {schema[bound]}" for sign, bound in bounds.items() if bound in schema]
    return " ".join(["int" if schema["type"] == "integer" else "finite float", ", ".join(limits)])


def _raise_if(faults: list[str], path: str | Path, overrides: Sequence[str]) -> None:
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError("\n  ".join([f"{' '.join([str(path), *overrides])}: {count}", *faults]))
