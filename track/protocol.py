"""The protocol: the table [track] of its config file, the settings that it draws, and the runs of an entry."""

import random
import tomllib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import configure
from configure.schema import KEYS, Section, select_keys
from data.bins import sha256_of

REPO_ROOT = Path(__file__).parents[1]
RECORDS = REPO_ROOT / "track/records"
DRAFT_DRAWS = 4
# keys that an entry may set beside its router
OPTIONS = select_keys("track_option")
# drawn keys, as the table has them
BALANCE = {key: schema["track_balance"] for key, schema in KEYS.items() if schema["track_balance"]}


class Task(NamedTuple):
    """A run of an entry."""

    round: str  # draw, final (tuning); judge; draft, length (of the reference alone)
    draw: int  # number of its settings
    seed: int
    length: float = 1.0  # times the tokens

    @property
    def name(self) -> str:
        """Its run's name."""
        length = "" if self.length == 1 else f"-x{self.length:g}"
        return f"{self.round}-draw{self.draw}-seed{self.seed}{length}"


class Protocol(Section):
    """What an entry does: its fields are the keys of [track], which the config file explains."""

    file: str  # the config file of its runs
    runs: Path  # the folder of its runs
    fixed_sha256: str  # of all that the config file sets
    version: int
    reference: str
    second: str
    margin: float  # nats per byte
    text: list[str]
    data_sha256: str
    draw_seed: int
    tune_seed: int
    final_seed: int
    finalists: int
    judge_seeds: list[int]
    draft_seeds: list[int]
    lengths: list[float]
    length_seeds: list[int]
    draws: dict[str, Any]
    max_steps: int
    warmup_steps: int
    windows: int  # of an evaluation
    draft: bool = False

    @property
    def name(self) -> str:
        """Of the track: the config file's."""
        return Path(self.file).stem

    @property
    def records(self) -> Path:
        """The folder of its records."""
        return RECORDS / self.name

    def as_draft(self, seeds: int) -> "Protocol":
        """Fewer draws, no finals, and `seeds` seeds of drafts, which no entry is judged by."""
        draws = self.draws | {"count": DRAFT_DRAWS}
        fewer = {"draws": draws, "finalists": 1, "judge_seeds": self.draft_seeds[:seeds]}
        return self.model_copy(update=fewer | {"draft": True})

    def draw_settings(self) -> list[dict[str, float]]:
        """The settings to try, the same for every router: values of config keys, to three digits.

        A longer list begins like a shorter one.
        """
        generator, settings = random.Random(self.draw_seed), []
        for _ in range(self.draws["count"]):
            part = {
                key: generator.random()
                for key in ("lr", "router_lr_ratio", "expert_out_lr_ratio", "gate_norm")
            }
            own_norm, balance, strength = generator.random(), generator.random(), generator.random()
            drawn = {
                f"optim.{key}": self._scale(key, part[key]) for key in part if key != "gate_norm"
            }
            own = own_norm < self.draws["own_gate_norm"]
            drawn["model.gate_norm"] = 0.0 if own else self._scale("gate_norm", part["gate_norm"])
            if method := (None, "balance_loss_coef", "bias_update_rate")[int(3 * balance)]:
                drawn[f"train.{method}"] = self._scale(method, strength)
            settings.append(drawn)
        return settings

    def _scale(self, key: str, part: float) -> float:
        """Log-uniform in the range of the key, from uniform in [0, 1)."""
        low, high = self.draws[key]
        return float(f"{low * (high / low) ** part:.3g}")

    def list_tasks(self, name: str, losses: Mapping[Task, float]) -> list[Task]:
        """Every run of an entry that its `losses` so far (nats per byte) decide; for a complete entry all runs.

        The draws with the lowest losses are run with one more seed; the best of these by the mean
        is judged.
        """
        tasks = [Task("draw", draw, self.tune_seed) for draw in range(self.draws["count"])]
        if not losses.keys() >= set(tasks):
            return tasks
        best = sorted(tasks, key=lambda task: losses[task])[: self.finalists]
        finals = (
            [Task("final", task.draw, self.final_seed) for task in best]
            if self.finalists > 1
            else []
        )
        tasks += finals
        if not losses.keys() >= set(finals):
            return tasks
        sums = {
            first.draw: losses[first] + losses[second]
            for first, second in zip(best, finals, strict=bool(finals))
        }
        winner = min(sums, key=sums.__getitem__) if sums else best[0].draw
        tasks += [Task("judge", winner, seed) for seed in self.judge_seeds]
        if name == self.reference and not self.draft:
            tasks += [Task("draft", winner, seed) for seed in self.draft_seeds]
            tasks += [
                Task("length", winner, seed, length)
                for length in self.lengths
                for seed in self.length_seeds
            ]
        return tasks

    def count_tasks(self, name: str) -> int:
        """How many runs an entry has in all."""
        tasks = dict.fromkeys(self.list_tasks(name, {}), 0.0)
        while more := [task for task in self.list_tasks(name, tasks) if task not in tasks]:
            tasks |= dict.fromkeys(more, 0.0)
        return len(tasks)

    def overrides(
        self, router: str, task: Task, options: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The command line of a run, but for its folder.

        Quantile balancing takes the place of the drawn balance.
        """
        drawn, options = self.draw_settings()[task.draw], options or {}
        if options.get("train.bias_update") == "quantile":
            drawn = {key: value for key, value in drawn.items() if key not in BALANCE}
        values = {"model.router": router, **drawn, **options, "run.seed": task.seed}
        if task.length != 1:
            steps = round(self.max_steps * task.length)
            values |= {"train.max_steps": steps, "eval.interval": steps}
            values["optim.warmup_steps"] = round(self.warmup_steps * task.length)
        return [f"--{key}={value}" for key, value in values.items()]


def load_protocol(file: str) -> Protocol:
    """The protocol of a config file.

    Raises ConfigError if its other tables are wrong, ValueError if [track] is.
    """
    config = configure.load(file)
    table = tomllib.loads(Path(file).read_text())
    fields = {"max_steps": config.train.max_steps, "warmup_steps": config.optim.warmup_steps}
    fields |= {"windows": config.eval.windows, **table.get("track", {})}
    runs = Path(config.run.dir, f"track-{Path(file).stem}")
    return Protocol.model_validate(
        {"file": file, "runs": runs, "fixed_sha256": sha256_of(table), **fields}
    )


def read_options(file: str, texts: Sequence[str]) -> dict[str, Any]:
    """The settings KEY=VALUE that are not the defaults.

    Raises ValueError for other keys than OPTIONS, wrong values.
    """
    keys = [text.partition("=")[0] for text in texts]
    for key in keys:
        if key not in OPTIONS:
            raise ValueError(
                f"--set {key}: an entry may set {' and '.join(OPTIONS)}; all else is fixed or drawn"
            )
    config = configure.load(file, texts)
    values = {key: attrgetter(key)(config) for key in keys}
    return {key: value for key, value in values.items() if value != configure.KEYS[key]["default"]}
