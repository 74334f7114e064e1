"""Attributes of config keys besides their types, so that no other file lists keys.

`key` declares a key with its attributes. schema.py's `select_keys` finds the keys that have one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field


def key(
    default: Any,
    description: str,
    *,
    resume: bool = False,
    decay_branch: bool = False,
    acts_if: str = "",
    in_every_run: bool = False,
    scaled: bool = False,
    report: Literal["", "setting", "option", "neutral", "router"] = "",
    label: Literal["", "first", "last"] = "",
    report_as: Mapping[str, Any] | None = None,
    validation_text: bool = False,
    fixed_by_weights: bool = False,
    exported: bool = False,
    outside_model: bool = False,
    chooses: bool = False,
    other_names: str = "",
    choices: Sequence[str] = (),
    **limits: Any,
) -> Any:
    """Declare a config key. A key without attributes is fixed for a run and separates settings.

    Args:
        default: its value in a file that does not set it.
        description: its meaning, which `--help` prints.
        resume: a run may resume with another value.
        decay_branch: a branch (train.branch_from) may have another value than its trunk.
        acts_if: the key has an effect only if this one is set ("train.init_from") or has this value
            ("optim.name=muon").
        in_every_run: config.toml of every run has it, and hardly a file that a user writes.
        scaled: a count of steps or windows, which a rehearsal (sweep --scale) shortens. 0, which
            disables, and -1, a part of the run, stay.
        report: runs with different values are not compared ("setting"), are arms of one comparison
            ("option"), or count as equal, because the key moves no loss except by rounding
            ("neutral"). "router" is the name of an arm. By default "neutral" if a run may resume
            with another value, else "setting".
        label: where a report needs keys to name a setting, this comes "first". An option that is
            "last" is named only where arms of one router differ in nothing else.
        report_as: {value: the value with the same losses, which reports count instead}.
        validation_text: losses of runs can be paired only if they have the same value.
        fixed_by_weights: initial weights (train.init_from) need the value that they had.
        exported: config.json of exports has it under its own name or transformers'.
        outside_model: it shapes what the model computes, though it is no key of [model].
        chooses: it sets which experts a token takes.
        other_names: what other projects call it, separated by spaces.
        choices: allowed values of a text that also has other values.
        **limits: ge, le, gt, lt, pattern and others of `pydantic.Field`.
    """
    attributes: dict[str, Any] = {
        "resume": resume,
        "decay_branch": decay_branch,
        "acts_if": acts_if,
        "in_every_run": in_every_run,
        "scaled": scaled,
        "report": report or ("neutral" if resume else "setting"),
        "label": label,
        "report_as": dict(report_as or {}),
        "validation_text": validation_text,
        "fixed_by_weights": fixed_by_weights,
        "exported": exported,
        "outside_model": outside_model,
        "chooses": chooses,
        "other_names": other_names,
    }
    if choices:
        attributes["enum"] = list(choices)
    return Field(default, description=description, json_schema_extra=attributes, **limits)
