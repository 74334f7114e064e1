"""One setting at a time: what is wrong with it, in words, and its value as text."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configure.schema import FILE_NAME, KEYS, SECTIONS


def find_errors(settings: dict[str, Any], source: str | Path) -> list[str]:
    """List what is wrong with settings by dotted key, each checked alone."""
    return [error for key, value in settings.items() if (error := find_error(key, value, source))]


def find_error(key: str, value: Any, source: str | Path) -> str | None:
    """Describe what is wrong with one setting; None if it is valid."""
    if key in SECTIONS:
        return f"{source}: {key}: found {shown(value)}, expected a section: [{key}] in a file, or --{key}.KEY=VALUE"
    table = key.rpartition(".")[0]
    if KEYS.get(table, {}).get("type") == "object":
        return f"{source}: {quoted(key)}: {table} is set as a whole, as --{table}='{{books = 0.5, arxiv = 0.5}}'"
    if key not in KEYS:
        return f"{source}: {quoted(key)}: unknown key{_did_you_mean(key, [*KEYS, *SECTIONS])}"
    section, name = key.split(".")
    try:
        SECTIONS[section].model_validate({name: value})
    except ValidationError as error:
        where = error.errors()[0]["loc"]
        if len(where) > 1:  # one entry of a table
            return f"{source}: {_describe_entry(key, str(where[1]), value, is_name=len(where) > 2)}"
        found = f"found {shown(value)} ({type(value).__name__}), expected {describe_type(key)}"
        hint = _did_you_mean(value, KEYS[key].get("enum", [])) if isinstance(value, str) else ""
        return f"{source}: {key}: {found}{hint}"
    return None


def _describe_entry(key: str, name: str, table: dict, is_name: bool) -> str:
    """What is wrong with one entry of a table: its name, or its number."""
    if is_name:
        return f"{key}: found the name {shown(name)}, expected letters, digits, '.', '_' and '-'"
    value = table[name]
    return f"{key}.{quoted(name)}: found {shown(value)} ({type(value).__name__}), expected finite float > 0"


def quoted(key: str) -> str:
    """A key, quoted where its characters would not show."""
    return key if key and key.isprintable() else repr(key)


def shown(value: Any) -> str:
    """Show the value as Python writes it, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'optim.lr'?` for `train.lr`: the right key in the wrong section first, then the nearest text."""
    same_key = [other for other in known if other.split(".")[-1] == name.split(".")[-1]]
    near = difflib.get_close_matches(name, same_key or known, n=1, cutoff=0 if same_key else 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def describe_type(key: str) -> str:
    """Describe a key's type and range, such as `int >= 1` or `one of learned, rope`."""
    schema = KEYS[key]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "string":
        pattern = schema.get("pattern", "")
        if FILE_NAME in pattern:
            return "string of letters, digits, '.', '_' and '-'"
        words = "names" if "A-Z" in pattern else "numbers"
        return f"{words} with ',' between" if pattern else "printable string"
    if schema["type"] == "object":
        return "table of names and numbers > 0, such as {books = 0.5, arxiv = 0.5}"
    if schema["type"] == "boolean":
        return "bool, true or false"
    bounds = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
    limits = [f"{sign} {schema[bound]}" for sign, bound in bounds.items() if bound in schema]
    return " ".join(["int" if schema["type"] == "integer" else "finite float", ", ".join(limits)])


def format_toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {format_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def format_value(value: Any) -> str:
    """Text after `--section.key=` that is read back as `value`."""
    return value if isinstance(value, str) else format_toml(value)
