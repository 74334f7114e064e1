"""The contest of routers: its rules, the runs that they ask for, and the record of runs.

An arm is a router with its balancing. Every arm is trained at the same settings (rates, initial
gate norm) from the same seeds: the same windows, the same initial weights but the router's. So two
arms are compared in pairs, setting by setting. config/track/edition-3.toml has the numbers.
"""

import math
import os
import tomllib
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

import configure
from common.files import describe_invalid, exists, read_content
from configure.schema import Section

FILE = "config/track/edition-3.toml"
RECORDS = Path(__file__).parent / "records/edition-3"
COUNTING = "counting.json"  # {rung: loss of the count table}, by track/counting.py
DIMENSIONS = 5  # of [track.ranges]
ROOT = 1.1347241384015194  # of x^(DIMENSIONS + 1) = x + 1
UNIFORM = math.log(257)  # the loss of equal probabilities
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]


# ---- rules
class Arm(Section):
    """A router with its balancing."""

    router: str  # a name of ROUTERS, or a formula
    balance: Literal["loss", "quantile", "bias", "none"]
    hash_layers: int = Field(0, ge=0)


class Question(Section):
    """Is the loss of `arms` lower than that of `minus`?

    Of two arms the first is taken at even settings, the second at odd ones.
    """

    arms: list[Name] = []  # empty: the arm of the question's name
    minus: list[Name] = ["softmax-renorm-quantile"]
    settings: int = Field(8, ge=2)  # pairs: the first settings
    rung: str = "main"


class Rung(Section):
    """A model to train."""

    flops: float = Field(gt=0)  # of a run
    overrides: list[str] = []  # what differs from the config file


class Protocol(Section):
    """Table [track] of the config file, which explains the fields."""

    text: list[str]
    data_sha256: str
    alpha: float
    margin: float
    pilot_sd: float
    first_seed: int
    balances: dict[str, dict[str, Any]]  # keys of each balancing
    ranges: dict[str, list[float]] = Field(min_length=DIMENSIONS, max_length=DIMENSIONS)
    rungs: dict[str, Rung]
    arms: dict[str, Arm]
    questions: dict[Name, Question]
    growth: dict[Name, list[Name]] = {}  # the same question on several rungs


ArmAt = tuple[str, int]  # an arm and the number of a setting: a run


def load_protocol(file: str) -> Protocol:
    """Load the rules of a config file.

    Raises:
        ValueError: they are wrong.
    """
    configure.load(file)  # says what is wrong with TOML and keys
    table = tomllib.loads(Path(file).read_text()).get("track", {})
    return build_protocol(f"{file}: [track]", table)


def build_protocol(where: str, table: dict[str, Any]) -> Protocol:
    """Check the content of [track].

    Raises:
        ValueError: it is wrong, or a question names an arm or rung that is not listed. The message
            begins with `where`.
    """
    try:
        protocol = Protocol.model_validate(table)
    except ValidationError as error:
        raise ValueError(describe_invalid(where, error)) from None
    for name, question in protocol.questions.items():
        arms = {*(question.arms or [name]), *question.minus}
        if not arms <= protocol.arms.keys() or question.rung not in protocol.rungs:
            raise ValueError(f"{where}: questions.{name} has an arm or rung that is not there")
    for name, members in protocol.growth.items():
        rungs = {protocol.questions[one].rung for one in members if one in protocol.questions}
        if len(rungs) < max(2, len(members)):
            raise ValueError(f"{where}: growth.{name}: expected questions of different rungs")
    return protocol


def list_pairs(protocol: Protocol, name: str) -> list[tuple[ArmAt, ArmAt]]:
    """The pairs of a question, by setting: the arm, and what its loss is compared with."""
    question = protocol.questions[name]
    by_turns = zip(cycle(question.arms or [name]), cycle(question.minus), strict=False)
    numbered = enumerate(islice(by_turns, question.settings))
    return [((arm, setting), (minus, setting)) for setting, (arm, minus) in numbered]


# ---- settings
def draw_setting(protocol: Protocol, setting: int) -> dict[str, float]:
    """{key of [track.ranges]: value} of a setting, log-uniform, to three digits.

    Any first n settings are spread evenly over the ranges.

    Source: Roberts, The Unreasonable Effectiveness of Quasirandom Sequences, 2018.
    """
    values = {}
    for power, (name, (low, high)) in enumerate(protocol.ranges.items(), 1):
        share = (0.5 + (setting + 1) * ROOT**-power) % 1
        values[name] = float(f"{low * (high / low) ** share:.3g}")
    return values


def list_overrides(protocol: Protocol, arm: Arm, setting: int, width: int) -> list[str]:
    """What a run of `arm` sets on a rung of this width; the rung's own overrides come before."""
    keys: dict[str, Any] = {
        **draw_setting(protocol, setting),
        "model.router": arm.router,
        "model.n_hash_layer": arm.hash_layers,
        "run.seed": protocol.first_seed + setting,
    }
    keys["optim.lr"] = float(f"{keys['optim.lr'] * 64 / width:.4g}")
    if arm.balance != "loss":
        del keys["train.balance_loss_coef"]
    keys |= protocol.balances[arm.balance]
    return [f"--{key}={value}" for key, value in keys.items()]


# ---- the record: one run a line
class Made(Section):
    """The code and machine of a run. Runs are paired only if these are equal."""

    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # see `describe_code`
    torch: str
    device: str
    instructions: str  # that torch uses on the CPU, such as AVX512


class Line(Section):
    """A run of an arm at a setting."""

    arm: Name
    options: Arm
    setting: int = Field(ge=0)
    seed: int
    # nats per byte; None: it diverged, or ended above UNIFORM
    loss: float | None = Field(gt=0, lt=UNIFORM)
    # tokens of the busiest expert over the mean; float32 can round 1 down, and a share of 1 up
    load_imbalance: float | None = Field(None, ge=0.9999)
    dead_experts: float | None = Field(None, ge=0)
    zero_gates: float | None = Field(None, ge=0, le=1.0001)
    gate_norm: list[float] | None = Field(None, min_length=2, max_length=2)  # before, after
    made: Made
    date: str

    @property
    def run(self) -> ArmAt:
        """What was trained."""
        return self.arm, self.setting


def read_lines(protocol: Protocol, file: Path) -> list[Line]:
    """Read a record; no file is one without runs.

    Raises:
        ValueError: a line is no run, or there twice, or its arm or seed is not that of the rules.
    """
    if not exists(file):
        return []
    lines: list[Line] = []
    for number, text in enumerate(read_content(file).decode(errors="replace").splitlines(), 1):
        where = f"{file}, line {number}"
        try:
            line = Line.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"{describe_invalid(where, error)}; delete the line") from None
        seed = protocol.first_seed + line.setting
        if (protocol.arms.get(line.arm), seed) != (line.options, line.seed):
            raise ValueError(
                f"{where}: {line.arm} is another arm now, or has another seed: take another name"
            )
        if any(line.run == other.run and line.made == other.made for other in lines):
            raise ValueError(f"{where}: {line.arm}, setting {line.setting} is there before; delete")
        lines.append(line)
    return lines


def read_records(protocol: Protocol, folder: Path) -> dict[str, list[Line]]:
    """Read the records of all rungs."""
    return {rung: read_lines(protocol, folder / f"{rung}.jsonl") for rung in protocol.rungs}


def append_line(file: Path, line: Line) -> None:
    """Add a run to a record."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as record:
        record.write(line.model_dump_json() + "\n")
        record.flush()
        os.fsync(record.fileno())


def find_pair(lines: Sequence[Line], pair: tuple[ArmAt, ArmAt]) -> tuple[Line, Line] | None:
    """Both runs of a pair, made alike; None if there are none yet."""
    seconds = {line.made: line for line in lines if line.run == pair[1]}
    for line in lines:
        if line.run == pair[0] and line.made in seconds:
            return line, seconds[line.made]
    return None


def list_missing(
    protocol: Protocol, questions: Sequence[str], lines: Sequence[Line], made: Made
) -> list[ArmAt]:
    """The runs that the questions' pairs lack on this machine, in order of worth."""
    made_here = [line.run for line in lines if line.made == made]
    missing = []
    for name in questions:
        for pair in list_pairs(protocol, name):
            if find_pair(lines, pair):
                continue
            for run in pair:
                if run not in made_here + missing:
                    missing.append(run)
    return missing
