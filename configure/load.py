"""From a TOML file and a command line to a checked `Config`, and back to text.

Precedence: defaults < file < overrides such as `--model.router=kern`. A file's `[sweep]` lists axes: a dotted key with
the values it takes, or several keys, linked, with the rows of values they take. The points are all combinations:

    [sweep]
    "model.router" = ["softmax", "kern"]
    "model.n_expert, model.top_k, model.expert_hidden" = [[64, 8, 384], [128, 16, 192]]
    "run.seed" = [0, 1, 2]

An override of its keys closes an axis, and a run needs all axes closed. A run that has no name takes one that stays
when axes are added later: file, router, then whatever axes and seed give it that the file does not.
"""

import difflib
import itertools
import json
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    """The checked settings of one run on `world_size` ranks; `run.name` and `log.group` are filled in.

    `overrides` are `"--section.key=value"` strings, the dashes optional; of two for one key the later holds.
    Raises ConfigError, naming all faults at once, for a file or override that is wrong or leaves a sweep axis open.
    """
    settings, in_file, axes = _read(path, overrides)
    still_open = {keys: rows for keys, rows in axes.items() if keys[0] not in settings}
    if still_open:
        names = ", ".join(key for keys in still_open for key in keys)
        raise ConfigError(
            f"{path} sweeps {names}, and one run needs one value of each\n"
            f"  all of them: python -m scripts.sweep {path}\n"
            f"  one of them: python train.py {path} "
            + " ".join(" ".join(_as_overrides(keys, rows[0])) for keys, rows in still_open.items())
        )
    values = {key: schema["default"] for key, schema in KEYS.items()} | settings
    if not values["run.name"]:
        given = {key: schema["default"] for key, schema in KEYS.items()} | in_file
        settings["run.name"] = _name(Path(path).stem, values, given, axes)
    settings["log.group"] = values["log.group"] or re.sub(r"[^\w.-]+", "-", Path(path).stem)  # text that TOML can hold
    config = Config.model_validate(_nest(settings))
    _raise_if(check(config, world_size), path, overrides)
    return config


def sweep_points(path: str | Path, overrides: Sequence[str] = ()) -> list[list[str]]:
    """Overrides of each run of a sweep: `overrides` plus one value of every open axis, the last axis varying fastest.

    A list among the `overrides`, such as `--run.seed=[0,1,2]`, is an axis too, in place of the file's or as the last. A
    file without open axes gives one point. Every point has been loaded once, so a sweep fails before its first run;
    raises ConfigError as `load` does, and where two points would share a run's folder.
    """
    settings, _, axes = _read(path, overrides, lists=True)
    choices = [[_as_overrides(keys, row) for row in rows] for keys, rows in axes.items() if keys[0] not in settings]
    fixed = [text for text in overrides if _values(text) is None]
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


def _name(stem: str, values: dict[str, Any], in_file: dict[str, Any], axes: Iterable[tuple]) -> str:
    """Folder of a run: file, router, what its axes give it that the file does not, seed if the file has another.

    So a run keeps its name when an axis is added that holds the file's own value. Of linked keys the first speaks.
    """
    parts = [stem, values["model.router"]]
    axes = [[key for key in keys if key not in ("model.router", "run.seed")] for keys in axes]
    for keys in [*axes, ["run.seed"]]:
        if any(values[key] != in_file[key] for key in keys):
            value = values[keys[0]]
            parts.append(value if isinstance(value, str) else keys[0].split(".")[1] + _as_override(value))
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")


def dumps(config: Config) -> str:
    """TOML text of every key; loading it gives an equal Config."""
    sections = config.model_dump().items()
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(v)}\n" for key, v in keys.items()) for name, keys in sections
    )


def _toml(value: str | int | float | bool) -> str:
    """JSON is TOML, but for one character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


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


def _read(path: str | Path, overrides: Sequence[str], lists: bool = False) -> tuple[dict, dict, dict[tuple, list]]:
    """Settings by dotted key (file, then overrides), those of the file alone, and the sweep's axes {keys: rows}, every
    value checked alone. With `lists` an override that is a list is an axis."""
    table = _read_toml(Path(path))
    sweep = table.pop("sweep", {})
    try:
        in_file = _flatten(table)
        listed = _flatten(sweep) if isinstance(sweep, dict) else {}
    except RecursionError:
        raise ConfigError(
            f"{path}: tables nested without end; a setting is [section] and below it key = value"
        ) from None
    in_file = {key: value for key, value in in_file.items() if key not in SECTIONS or value != {}}  # without lines
    given = dict(_parse_override(text) for text in overrides if not (lists and _values(text) is not None))
    opened = dict(values for text in overrides if lists and (values := _values(text)) is not None)

    faults = [fault for key, value in in_file.items() if (fault := _fault(key, value, path))]
    if not isinstance(sweep, dict):
        faults.append(f"{path}: sweep: found {_shown(sweep)}, expected a section: [sweep] with lists by dotted key")
    axes, seen = {}, {}
    for text, rows in (listed | opened).items():
        source = COMMAND_LINE if text in opened else f"{path} [sweep]"
        keys = tuple(key.strip() for key in text.split(","))
        wrong = _faults_of_axis(text, keys, rows, source)
        for key in keys:
            if seen.setdefault(key, text) != text or keys.count(key) > 1:
                wrong.append(f"{source}: {_named(key)}: found twice ({text}; {seen[key]}); keep it in one axis, once")
        partly = given.keys() & set(keys)
        if not wrong and partly and len(partly) < len(keys):
            rest = " ".join(_as_overrides([key for key in keys if key not in given], ["VALUE"] * len(keys)))
            wrong.append(f"{source}: {text}: linked, and the command line has {', '.join(partly)} alone; add {rest}")
        faults += dict.fromkeys(wrong)
        axes[keys] = rows if wrong or len(keys) > 1 else [[value] for value in rows]
    faults += [fault for key, value in given.items() if (fault := _fault(key, value, COMMAND_LINE))]
    _raise_if(faults, path, overrides)

    open_keys = {key for keys in axes for key in keys} - given.keys()
    in_file = {key: value for key, value in in_file.items() if key in KEYS}
    settings = {key: value for key, value in (in_file | given).items() if key in KEYS and key not in open_keys}
    return settings, in_file, axes


def _faults_of_axis(text: str, keys: tuple[str, ...], rows: Any, source: str) -> list[str]:
    """What is wrong with the values of one axis, each alone."""
    if not isinstance(rows, list) or not rows:
        return [f"{source}: {_named(text)}: found {_shown(rows)}, expected a list of values"]
    if len(keys) == 1:
        return [fault for value in rows if (fault := _fault(text, value, source))]
    faults = []
    for row in rows:
        if isinstance(row, list) and len(row) == len(keys):
            faults += [fault for key, value in zip(keys, row, strict=True) if (fault := _fault(key, value, source))]
        else:
            example = ", ".join(key.split(".")[-1] for key in keys)
            faults.append(f"{source}: {_named(text)}: found {_shown(row)}, expected lists of {len(keys)}: [{example}]")
    return faults


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


def _values(text: str) -> tuple[str, list] | None:
    """`--run.seed=[0, 1]` -> `("run.seed", [0, 1])`; None if the value is no list."""
    key, _, value = text.lstrip("-").partition("=")
    if not value.startswith("["):
        return None
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return None
    return (key, table["value"]) if len(table) == 1 and isinstance(table["value"], list) else None


def _as_overrides(keys: Sequence[str], row: Sequence) -> list[str]:
    return [f"--{key}={_as_override(value)}" for key, value in zip(keys, row, strict=False)]


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
