"""The ladder: does a router's gain over the reference grow with the model?

An entry's best drawn settings are trained on rungs above the contest's, by the same rules. Its gain
on a rung is ln of how much more compute the reference needs for the entry's loss; what compute is
worth is read from the reference's own losses up the ladder.
"""

import math
import sys
import tomllib
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field, ValidationError

from common.files import check_regular
from common.text import Table
from configure import Config
from configure.schema import Section
from data.bins import describe_faults, sha256_of
from runtime.memory import flops_per_token
from track.contest import (
    Losses,
    Protocol,
    Rung,
    Task,
    estimate_noise,
    judged_cells,
    list_judged,
    score_rung,
)
from track.record import losses_of, read_record

FILE = Path(__file__).with_name("ladder.toml")
SAMPLES = 200_000  # of the errors: limits vary by 1% over six seeds, with 20,000 by 5%
TINY = 1e-9  # in place of a number that must be positive


class Rules(Section):
    """The file ladder.toml, which explains the fields."""

    settings: int = Field(ge=1)
    tuning_sd: float = Field(ge=0)
    holds: float
    rungs: list[Rung] = Field(min_length=1)  # above the contest's


class Ladder(Rules):
    """The rules with what follows from them and from the contest."""

    protocol: Protocol  # the contest's with the rungs above its own, and a digest of both
    own_rungs: int  # of the contest: their runs are in an entry's record
    compute: list[float]  # floating-point operations of a run on each rung


def load_ladder(protocol: Protocol, n_rungs: int, file: Path = FILE) -> Ladder:
    """Load the rules of a ladder of the contest's rungs and those above.

    Raises:
        ValueError: the file is wrong, or has fewer rungs.
    """
    check_regular(file)
    try:
        rules = Rules.model_validate(tomllib.loads(file.read_text()))
    except ValidationError as error:
        raise ValueError(f"{file}: {describe_faults(error)}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from None
    own = len(protocol.rungs)
    if not own < n_rungs <= own + len(rules.rungs):
        raise ValueError(f"--rungs {n_rungs}: expected {own + 1} to {own + len(rules.rungs)}")
    numbers = rules.model_dump(exclude={"rungs"})
    rungs = [rung.model_dump(exclude={"minutes"}) for rung in rules.rungs]
    update = {
        "rungs": protocol.rungs + rules.rungs[: n_rungs - own],
        "sha256": sha256_of([protocol.sha256, numbers, rungs]),
        "records": protocol.records / "ladder",
    }
    extended = protocol.model_copy(update=update)
    compute = [count_compute(extended.load(rung)) for rung in range(n_rungs)]
    return Ladder(
        settings=rules.settings,
        tuning_sd=rules.tuning_sd,
        holds=rules.holds,
        rungs=rules.rungs,
        protocol=extended,
        own_rungs=own,
        compute=compute,
    )


def count_compute(config: Config) -> float:
    """Floating-point operations of a run."""
    tokens = config.train.max_steps * config.train.batch_size * config.model.block_size
    return float(flops_per_token(config.model) * tokens)


# ---- runs
def choose_draws(ladder: Ladder, entered: Losses) -> list[int]:
    """The best drawn settings of an entry, by the tuning runs alone."""
    draws = [task for task in entered if task.round == "draw"]
    best = sorted(draws, key=lambda task: entered[task])[: ladder.settings]
    return [task.draw for task in best]


def list_climb(ladder: Ladder, name: str, entered: Losses) -> list[Task]:
    """List the runs of an entry above the contest's rungs."""
    tasks = list_judged(ladder.protocol, name, choose_draws(ladder, entered))
    return [task for task in tasks if task.rung >= ladder.own_rungs]


def load_climbs(ladder: Ladder, entered: Mapping[str, Losses]) -> Mapping[str, Losses]:
    """Read {entry: its judged losses}, of entries that have run on every rung.

    Those of the contest's rungs are of all judged settings. Says which records are left out.

    Args:
        ladder: the rules.
        entered: {entry: losses of its complete record}.
    """
    climbs: dict[str, dict[Task, float]] = {}
    for name, losses in entered.items():
        path = ladder.protocol.records / f"{name}.json"
        if not path.exists():
            continue
        required = list_climb(ladder, name, losses)
        try:
            record = read_record(path)
        except ValueError as error:
            print(f"left out of the ladder: {error}", file=sys.stderr)
            continue
        if record["protocol_sha256"] != ladder.protocol.sha256:
            print(
                f"left out of the ladder: {path} is of other rules; move it away, and "
                f"python -m scripts.track ladder {name} trains it again",
                file=sys.stderr,
            )
            continue
        climbed = losses_of(record)
        missing = [task for task in required if task not in climbed]
        if missing:
            print(
                f"left out of the ladder: {path} lacks {len(missing)} of {len(required)} runs; "
                f"python -m scripts.track ladder {name} trains them",
                file=sys.stderr,
            )
            continue
        climbs[name] = {task: loss for task, loss in losses.items() if task.round == "judge"}
        climbs[name] |= {task: climbed[task] for task in required}
    return climbs


# ---- gains
class Gains(NamedTuple):
    """An entry's gains with the limits of their 95% intervals."""

    by_rung: np.ndarray  # (3, R): middle, low, high
    per_decade: np.ndarray  # (3,): change of the gain by ten times the compute


def measure_gains(ladder: Ladder, entry: Losses, reference: Losses) -> Gains:
    """Measure gains and their slope; errors by seeds and by tuning are drawn and carried through.

    Losses are means of the settings that ran on the last rung. The noise of a run is the same on
    every rung, and is estimated from all judged settings. Luck in tuning shifts all rungs of an
    entry alike.

    Raises:
        ValueError: the reference's loss does not fall from rung to rung, so compute has no worth.
    """
    rungs = range(len(ladder.compute))
    means = np.empty((2, len(rungs)))
    counts = np.empty((2, len(rungs)))
    squares = 0.0
    freedom = 0
    for row, losses in enumerate((entry, reference)):
        chosen = {task.draw for task in losses if task.rung == rungs[-1]}
        same = {task: loss for task, loss in losses.items() if task.draw in chosen}
        means[row] = [score_rung(same, rung) for rung in rungs]
        counts[row] = [sum(map(len, judged_cells(same, rung).values())) for rung in rungs]
        noise, noise_freedom = estimate_noise(losses)
        squares += noise * noise_freedom
        freedom += noise_freedom
    if np.any(np.diff(means[1]) >= 0):
        scores = ", ".join(f"{mean:.4f}" for mean in means[1])
        raise ValueError(
            f"{ladder.protocol.reference} has {scores} on the rungs: its loss must fall, to tell "
            "what compute is worth; check its records"
        )
    random = np.random.default_rng(0)
    shape = (SAMPLES, *means.shape)
    noise = squares / random.chisquare(freedom, (SAMPLES, 1, 1))  # as of Student's t
    luck = ladder.tuning_sd * random.standard_normal((SAMPLES, 2, 1))
    errors = np.sqrt(noise / counts) * random.standard_normal(shape) + luck
    logs = np.log(ladder.compute)
    middle, middle_change = convert_losses(means[None], logs)
    gains, changes = convert_losses(means + errors, logs)
    limits = np.quantile(gains, (0.025, 0.975), axis=0)
    change_limits = np.quantile(changes, (0.025, 0.975))
    per_decade = np.concatenate([middle_change, change_limits])
    return Gains(np.concatenate([middle, limits]), per_decade)


def convert_losses(losses: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gains (S, R), and their change by ten times the compute (S,).

    The reference's loss is taken as a floor plus a power of the compute. Its slope, what an e-fold
    of compute is worth, is then a power too; between two rungs it has its mean near their middle.

    Args:
        losses: (S, 2, R) of entry and reference.
        logs: (R,) logarithms of the compute.
    """
    entry, reference = losses[:, 0], losses[:, 1]
    mean_worth = -np.diff(reference, axis=1) / np.diff(logs)  # nats per e-fold of compute
    middles = (logs[1:] + logs[:-1]) / 2
    power, offset = np.polyfit(middles, np.log(np.maximum(mean_worth, TINY)).T, 1)[:, :, None]
    power = np.where(power, power, TINY)
    worth = np.exp(offset + power * logs)
    # The mean worth over a gain g is worth (e^(power g) - 1) / (power g). No compute brings the
    # reference below its floor: there the gain is a very large number.
    reached = np.maximum(power * (reference - entry) / worth, TINY - 1)
    gains = np.log1p(reached) / power
    slopes = np.polyfit(logs, gains.T, 1)[0]
    return gains, slopes * math.log(10)


def judge_growth(ladder: Ladder, gains: Gains) -> str:
    """The verdict on a ladder."""
    _, low, high = gains.per_decade
    if low > 0:
        return "grows"
    if high < 0:
        return "fades"
    return "holds" if -ladder.holds < low and high < ladder.holds else "undecided"


# ---- table and picture
def tabulate(ladder: Ladder, losses: Mapping[str, Losses]) -> Table:
    """The gains, a row an entry; `losses` are of every rung, the reference's among them.

    Raises:
        ValueError: the reference diverged, or its loss does not fall from rung to rung.
    """
    n_rungs = len(ladder.protocol.rungs)
    head = ["router", *(f"gain {number}" for number in range(1, n_rungs + 1))]
    head += ["per tenfold", "verdict"]
    reference = ladder.protocol.reference
    diverged = list_diverged(losses[reference])
    if diverged:
        raise ValueError(f"{reference} diverged on rung {diverged[0]}: nothing to compare with")
    rows = []
    for name, entry in losses.items():
        if name == reference:
            continue
        diverged = list_diverged(entry)
        if diverged:
            blank = [""] * (n_rungs + 1)
            rows.append([name, *blank, f"diverged on rung {diverged[0]}"])
            continue
        gains = measure_gains(ladder, entry, losses[reference])
        cells = [format_limits(column) for column in gains.by_rung.T]
        rows.append([name, *cells, format_limits(gains.per_decade), judge_growth(ladder, gains)])
    return head, rows


def list_diverged(losses: Losses) -> list[int]:
    """The numbers of the rungs, from 1, where a run diverged."""
    return sorted({task.rung + 1 for task, loss in losses.items() if not math.isfinite(loss)})


def format_limits(limits: np.ndarray) -> str:
    """Format middle, low and high (3,)."""
    middle, low, high = limits
    return f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]"


def plot(ladder: Ladder, losses: Mapping[str, Losses]) -> Figure:
    """Gains by compute, a line an entry."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="grey", linewidth=1, label=ladder.protocol.reference)
    for number, (name, entry) in enumerate(losses.items()):
        if name == ladder.protocol.reference:
            continue
        if list_diverged(entry):
            axes.plot([], [], label=f"{name}: diverged")
            continue
        gains = measure_gains(ladder, entry, losses[ladder.protocol.reference])
        middle, low, high = gains.by_rung
        compute = np.multiply(ladder.compute, 1.04**number)  # intervals must not lie on one another
        errors = (middle - low, high - middle)
        axes.errorbar(compute, middle, errors, capsize=3, marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("compute of a run, FLOPs")
    axes.set_ylabel("gain in ln compute, 95% interval")
    axes.legend()
    return figure


# ---- does rung 1 tell what rung 2 says?
def count_agreements(losses: Mapping[str, Losses]) -> tuple[int, int]:
    """Pairs of entries that rung 1 orders as rung 2 does, and all pairs, by mean losses."""
    agreeing = 0
    pairs = list(combinations(losses.values(), 2))
    for left, right in pairs:
        first, second = (score_rung(left, rung) - score_rung(right, rung) for rung in (0, 1))
        agreeing += first * second > 0
    return agreeing, len(pairs)
