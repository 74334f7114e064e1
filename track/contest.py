"""The contest of routers, from top to bottom: protocol, tuning, judging, score.

A router brings a formula and options. Drawn settings, the same for all, are tried on a small model,
the first rung. The best are judged on every rung, by seeds that follow from the entry's name. An
entry has one test, against the reference; other entries change nothing in it.
"""

import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, ValidationError

import configure
from common.files import check_regular
from configure.schema import KEYS, Section, select_keys
from data.bins import describe_faults, sha256_of
from gate_norm import score_deviation
from report.comparisons import Difference
from track.fixed_keys import check_fixed_keys

RECORDS = Path(__file__).parent / "records"
OPTIONS = ("model.router", *select_keys("track_option"))  # keys that an entry may set
# keys that each run sets, or that change no loss
FREE = {"run.seed", "data.dir", *OPTIONS, *select_keys("resume")} - {"train.max_steps"}
BALANCE_METHODS = (None, "balance_loss_coef", "bias_rate")  # one for each third of a uniform draw


# ---- protocol
class Rung(Section):
    """A model that entries are judged on."""

    seeds: int = Field(ge=1)  # of each judged setting
    minutes: float  # of one run on one thread, to tell the time that is left
    overrides: list[str] = []  # what differs from the config file


class Protocol(Section):
    """The rules. Fields without a comment are keys of [track], explained in the config file."""

    file: str  # config file of the runs
    runs: Path  # folder of the runs
    records: Path  # folder of the records
    sha256: str  # of the rules and of the resolved value of every key; records and seeds have it
    draft: bool = False  # see `as_draft`
    edition: int
    reference: str
    text: list[str]
    data_sha256: str
    settings: int
    alpha: float
    margin: float
    tuning_sd: float
    seed_sd: float
    rerun_sd: float
    curve: list[float]
    curve_settings: int
    draws: dict[str, Any]
    rungs: list[Rung]
    entries: dict[str, dict[str, Any]]

    def as_draft(self) -> "Protocol":
        """The same on the first rung alone, with other seeds: a draft must not choose an entry."""
        return self.model_copy(update={"rungs": self.rungs[:1], "draft": True})

    def load(self, rung: int, overrides: Sequence[str] = ()) -> configure.Config:
        """The settings of a run on a rung, which are counted from 0."""
        return configure.load(self.file, [*self.rungs[rung].overrides, *overrides])


def load_protocol(file: str) -> Protocol:
    """Load the rules of a config file.

    Raises:
        ValueError: they are wrong, or a key has another value than FILE.json beside it lists.
    """
    check_regular(Path(file))
    runs = Path(configure.load(file).run.dir, f"track-{Path(file).stem}")
    table = tomllib.loads(Path(file).read_text()).get("track", {})
    own = {"file": file, "sha256": "", "runs": runs, "records": RECORDS / Path(file).stem}
    try:
        protocol = Protocol.model_validate({**table, **own})
    except ValidationError as error:
        raise ValueError(f"{file}: track.{describe_faults(error)}") from None
    if protocol.rungs[0].seeds < 2:
        raise ValueError(f"{file}: track.rungs: the first needs seeds = 2 or more, for the noise")
    fixed = []  # {key: value} of every rung, whether from the file or by default
    for rung in range(len(protocol.rungs)):
        config = protocol.load(rung)
        fixed.append({key: attrgetter(key)(config) for key in KEYS if key not in FREE})
    listed = Path(file).with_suffix(".json")
    if listed.exists():
        fixed = check_fixed_keys(listed, fixed)
    rules = {key: value for key, value in table.items() if key != "entries"}
    return protocol.model_copy(update={"sha256": sha256_of([rules, fixed])})


class Task(NamedTuple):
    """A run of an entry."""

    round: str  # draw, judge, or curve (more lengths of the reference)
    rung: int
    draw: int  # index into `draw_settings`
    seed: int
    length: float = 1.0  # factor on the rung's number of tokens

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{self.round}{self.rung + 1}-draw{self.draw}-x{self.length:g}-seed{self.seed}"


Losses = Mapping[Task, float]  # nats per byte; infinite where the run diverged


# ---- tuning
def draw_settings(protocol: Protocol) -> list[dict[str, float]]:
    """Draw the settings, the same for every router: each dimension has one draw in each stratum."""
    draws = protocol.draws
    uniform = random.Random(draws["seed"]).random
    columns = {}
    for name in ("lr", "expert_out_lr_ratio", "router_lr_ratio", "gate_norm", "own", "balance"):
        order = sorted(range(draws["count"]), key=lambda _: uniform())
        columns[name] = [(stratum + uniform()) / draws["count"] for stratum in order]
    settings = []
    for draw in range(draws["count"]):
        u = {name: column[draw] for name, column in columns.items()}
        drawn = {}
        for key in ("lr", "expert_out_lr_ratio", "router_lr_ratio"):
            drawn[f"optim.{key}"] = scale_log(draws[key], u[key])
        drawn["model.gate_norm"] = scale_log(draws["gate_norm"], u["gate_norm"])
        if u["own"] < draws["own_gate_norm"]:
            drawn["model.gate_norm"] = 0.0  # keeps the norm that the router has by itself
        third = int(3 * u["balance"])
        method = BALANCE_METHODS[third]
        if method:
            drawn[method] = scale_log(draws[method], 3 * u["balance"] - third)
        settings.append(drawn)
    return settings


def scale_log(limits: Sequence[float], u: float) -> float:
    """Map `u` in [0, 1) to log-uniform between the limits, to three digits."""
    low, high = limits
    return float(f"{low * (high / low) ** u:.3g}")


def make_overrides(protocol: Protocol, options: Mapping[str, Any], task: Task) -> list[str]:
    """The command line of a run, without its folder; `options` are the entry's.

    Drawn rates are multiplied by the width of the first rung over this one's. Quantile balancing
    replaces the drawn balance.
    """
    config = protocol.load(task.rung, [f"model.router={options['model.router']}"])
    model = config.model
    values = {**options, **draw_settings(protocol)[task.draw], "run.seed": task.seed}
    width_ratio = protocol.load(0).model.n_embd / model.n_embd
    values["optim.lr"] = float(f"{values['optim.lr'] * width_ratio:.4g}")
    coefficient = values.pop("balance_loss_coef", 0.0)
    rate = values.pop("bias_rate", 0.0)
    if options.get("train.bias_update") != "quantile":
        rate = float(f"{rate * score_deviation(model):.4g}")
        values |= {"train.balance_loss_coef": coefficient, "train.bias_update_rate": rate}
    for key in ("train.max_steps", "eval.interval", "optim.warmup_steps"):
        values[key] = round(attrgetter(key)(config) * task.length)
    given = [f"{key}={value}" for key, value in values.items()]
    return [f"--{override}" for override in protocol.rungs[task.rung].overrides + given]


# ---- judging
def derive_seed(*origin: Any) -> int:
    """A seed that nobody can choose: 28 bits of a sha256."""
    return int(sha256_of(origin)[:7], 16)


def list_tasks(protocol: Protocol, name: str, losses: Losses) -> list[Task]:
    """List the runs of an entry as far as its `losses` so far decide them."""
    origin = f"{name} (draft)" if protocol.draft else name
    seed = derive_seed(protocol.sha256, origin, "draw")
    length = protocol.draws["length"]
    draws = [Task("draw", 0, draw, seed, length) for draw in range(protocol.draws["count"])]
    if not losses.keys() >= set(draws):
        return draws
    best = sorted(draws, key=lambda task: losses[task])[: protocol.settings]
    chosen = [task.draw for task in best]
    tasks = draws + list_judged(protocol, origin, chosen)
    if name == protocol.reference and not protocol.draft:
        for rung in range(len(protocol.rungs)):
            for draw in chosen[: protocol.curve_settings]:
                for length in protocol.curve:
                    seed = derive_seed(protocol.sha256, origin, "curve", rung, draw, length)
                    tasks.append(Task("curve", rung, draw, seed, length))
    return tasks


def list_judged(protocol: Protocol, origin: str, draws: Sequence[int]) -> list[Task]:
    """List the judged runs; their seeds follow from the entry's name, or from a commit."""
    tasks = []
    for rung, rules in enumerate(protocol.rungs):
        for draw in draws:
            for number in range(rules.seeds):
                seed = derive_seed(protocol.sha256, origin, "judge", rung, draw, number)
                tasks.append(Task("judge", rung, draw, seed))
    return tasks


# ---- score
def judged_cells(losses: Losses, rung: int) -> dict[int, list[float]]:
    """{judged setting: its losses} on a rung."""
    cells: dict[int, list[float]] = {}
    for task, loss in losses.items():
        if (task.round, task.rung) == ("judge", rung):
            cells.setdefault(task.draw, []).append(loss)
    return cells


def score_rung(losses: Losses, rung: int) -> float:
    """The mean loss of a rung's judged runs, over settings and seeds; infinite if one diverged."""
    return float(np.mean(np.concatenate(list(judged_cells(losses, rung).values()))))


def estimate_noise(losses: Losses) -> tuple[float, int]:
    """Variance of a run by its seed, from the spread within settings on all rungs; its freedom."""
    squares = 0.0
    freedom = 0
    for rung in {task.rung for task in losses if task.round == "judge"}:
        for cell in judged_cells(losses, rung).values():
            squares += float(np.var(cell)) * len(cell)
            freedom += len(cell) - 1
    return squares / freedom, freedom


def compare(protocol: Protocol, entry: Losses, other: Losses, rungs: Sequence[int]) -> Difference:
    """The mean over rungs of the entry's loss minus the other's, with its standard error.

    The variance by seeds is estimated; that by tuning is fixed by the protocol, because the few
    judged settings cannot estimate it. Degrees of freedom are Satterthwaite's.
    """
    gaps = [score_rung(entry, rung) - score_rung(other, rung) for rung in rungs]
    difference = float(np.mean(gaps))
    if not math.isfinite(difference):
        return Difference(math.inf, 0)
    variance = 2 * protocol.tuning_sd**2
    squares = 0.0
    for losses in (entry, other):
        noise, noise_freedom = estimate_noise(losses)
        inverse = 0.0
        for rung in rungs:
            inverse += 1 / sum(len(cell) for cell in judged_cells(losses, rung).values())
        part = noise * inverse / len(rungs) ** 2
        variance += part
        squares += part**2 / noise_freedom
    freedom = variance**2 / squares if squares else 1e6  # runs without noise: normal
    return Difference(difference, len(rungs), math.sqrt(variance), freedom, "seeds")


def judge_sign(protocol: Protocol, difference: Difference) -> str:
    """The verdict of an entry's only test, two-sided."""
    if math.isfinite(difference.mean) and difference.p_value() >= protocol.alpha:
        return "undecided"
    return "lower" if difference.mean < 0 else "higher"


def measure_curve(losses: Losses, rung: int) -> np.ndarray:
    """The reference's loss by length, relative to length 1, made monotone.

    Returns (3, P): logarithms of the lengths; shifts of the loss, nats per byte; standard errors.
    """
    cells = judged_cells(losses, rung)
    noise, _ = estimate_noise(losses)
    shifts: dict[float, list[float]] = {1.0: [0.0]}
    variances = {1.0: 0.0}
    for task, loss in losses.items():
        if (task.round, task.rung) == ("curve", rung) and math.isfinite(loss):
            cell = cells[task.draw]
            shifts.setdefault(task.length, []).append(loss - float(np.mean(cell)))
            variances[task.length] = noise * (1 + 1 / len(cell)) / len(shifts[task.length])
    lengths = sorted(shifts)
    falling = np.minimum.accumulate([np.mean(shifts[length]) for length in lengths])
    errors = np.sqrt([variances[length] for length in lengths])
    return np.array([np.log(lengths), falling, errors])


def multiply_compute(curve: np.ndarray, difference: Difference) -> list[float]:
    """How much more compute the reference needs for the entry's loss: middle, low, high (95%).

    Between its lengths the reference's loss is taken as linear in the logarithm of the length. The
    interval is that of the difference, widened by the curve's error; it ends with the curve.
    """
    log_lengths, shifts, errors = curve
    middle = np.interp(-difference.mean, -shifts, log_lengths)
    curve_error = np.interp(middle, log_lengths, errors)
    half = difference.half_width * math.hypot(1, curve_error / difference.error)
    losses = np.array([difference.mean, difference.mean + half, difference.mean - half])
    return np.exp(np.interp(-losses, -shifts, log_lengths)).tolist()
