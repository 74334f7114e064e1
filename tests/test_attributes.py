"""configure/schema.py: keys' attributes, by tables of their own and by what reports do."""

import re

import pytest
from fake_runs import with_other
from runs import REPO_ROOT

from configure import load
from configure.schema import KEYS, has_effect, select_keys
from report.frame import group_runs
from runtime.runs import Run

# Settings without effect, and under which they have one.
CONDITIONAL = {key: schema["acts_if"] for key, schema in KEYS.items() if schema["acts_if"]}
VALUES = {"train.balance_loss_coef": "0.1"}
DEFAULTS = {key: schema["default"] for key, schema in KEYS.items()}


@pytest.fixture
def base(write):
    """A config in which every key has an effect."""
    settings = sorted({*CONDITIONAL.values()} - {"optim.transfer=mup"})
    settings = [text if "=" in text else f"{text}={VALUES[text]}" for text in settings]
    config = load(write(), settings)
    optim = config.optim.model_copy(update={"transfer": "mup"})  # train.init_from excludes it
    return config.model_copy(update={"optim": optim})


def count_arms(*configs):
    """The number of variants of each group in a report of these runs, each of its own seed."""
    runs = []
    for seed, config in enumerate(configs):
        own = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        losses = {step: {"step": step, "val/loss": 2.0} for step in (0, config.train.max_steps)}
        run = Run(REPO_ROOT / f"absent{seed}")
        run.config, run.evaluations, run.newest = own, losses, {}
        runs.append(run)
    return [len(group.runs) for group in group_runs(runs)[0]]


@pytest.mark.parametrize("key", KEYS)
def test_reports_compare_runs_by_what_a_key_changes(base, key):
    """Whether runs with another value count as equal, as arms of a comparison, or as apart."""
    arms = {"neutral": [1], "option": [2], "router": [2], "setting": [1, 1]}
    assert count_arms(base, with_other(base, key)) == arms[KEYS[key]["report"]]


def test_a_key_without_effect_does_not_separate_runs(write):
    default = load(write())
    assert {key for key in KEYS if not has_effect(key, DEFAULTS.get)} == CONDITIONAL.keys()
    for key in CONDITIONAL:
        assert count_arms(default, with_other(default, key)) == [1]


def test_documentation_names_what_may_change():
    text = (REPO_ROOT / "docs/reliability.md").read_text()
    paragraph = re.search(r"\*\*What may change between starts.*?\n\n", text, re.DOTALL)[0]
    named = re.findall(r"`(\w+\.\w+)`", paragraph)
    assert sorted(named) == sorted(select_keys("resume"))
