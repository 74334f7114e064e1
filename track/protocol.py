"""The protocol of a track: its [track] table, the settings it draws, and the runs of an entry."""

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
# keys that an entry may set besides its router
OPTIONS = select_keys("track_option")
# {drawn key: its name in the table}
BALANCE = {key: schema["track_balance"] for key, schema in KEYS.items() if schema["track_balance"]}
# one for each third of a uniform draw; the order decides the settings of all records
BALANCE_METHODS = (None, "balance_loss_coef", "bias_update_rate")


class Task(NamedTuple):
    """A run of an entry."""

    round: str  # tuning: draw, final; judged: judge; only of the reference: draft, length
    draw: int  # index into `Protocol.draw_settings`
    seed: int
    length: float = 1.0  # factor on the number of tokens

    @property
    def name(self) -> str:
        """Name of the run."""
        length = "" if self.length == 1 else f"-x{self.length:g}"
        return f"{self.round}-draw{self.draw}-seed{self.seed}{length}"


class Protocol(Section):
    """The rules of a contest. Fields without a comment are keys of [track] in the config file."""

    file: str  # config file of the runs
    runs: Path  # folder of the runs
    fixed_sha256: str  # digest of the whole config file
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
    max_steps: int  # train.max_steps
    warmup_steps: int  # optim.warmup_steps
    windows: int  # eval.windows
    draft: bool = False  # see `as_draft`

    @property
    def name(self) -> str:
        """Name of the track, that of the config file."""
        return Path(self.file).stem

    @property
    def records(self) -> Path:
        """Folder of the records."""
        return RECORDS / self.name

    def as_draft(self) -> "Protocol":
        """Return a protocol with fewer draws, no finals, and seeds that no entry is judged by."""
        changes = {
            "draws": {**self.draws, "count": DRAFT_DRAWS},
            "finalists": 1,
            "judge_seeds": self.draft_seeds,
            "draft": True,
        }
        return self.model_copy(update=changes)

    def draw_settings(self) -> list[dict[str, float]]:
        """Draw the settings to try, the same for every router: values of config keys.

        The first draws do not depend on how many are made.
        """
        uniform = random.Random(self.draw_seed).random
        settings = []
        for _ in range(self.draws["count"]):
            drawn = {}
            for key in ("lr", "router_lr_ratio", "expert_out_lr_ratio"):
                drawn[f"optim.{key}"] = self._scale(key, uniform())
            gate_norm = self._scale("gate_norm", uniform())
            if uniform() < self.draws["own_gate_norm"]:
                gate_norm = 0.0  # keeps the norm that the router has by itself
            drawn["model.gate_norm"] = gate_norm
            method = BALANCE_METHODS[int(3 * uniform())]
            strength = uniform()  # drawn for every method, so that later draws do not move
            if method:
                drawn[f"train.{method}"] = self._scale(method, strength)
            settings.append(drawn)
        return settings

    def _scale(self, key: str, u: float) -> float:
        """Map uniform `u` in [0, 1) to log-uniform in the range of the key, to three digits."""
        low, high = self.draws[key]
        return float(f"{low * (high / low) ** u:.3g}")

    def list_tasks(self, name: str, losses: Mapping[Task, float]) -> list[Task]:
        """List the runs of an entry as far as its `losses` so far (nats per byte) decide them.

        The draws with the lowest losses are run with one more seed; the best of these by the mean
        is judged.
        """
        draws = [Task("draw", draw, self.tune_seed) for draw in range(self.draws["count"])]
        if not losses.keys() >= set(draws):
            return draws
        best = sorted(draws, key=lambda task: losses[task])
        if self.finalists == 1:
            return draws + self._list_judged(name, best[0].draw)
        finals = []
        sums = {}  # {draw: loss with both seeds, nats per byte}
        for first in best[: self.finalists]:
            second = Task("final", first.draw, self.final_seed)
            finals.append(second)
            if second in losses:
                sums[first.draw] = losses[first] + losses[second]
        if len(sums) < len(finals):
            return draws + finals
        winner = min(sums, key=lambda draw: sums[draw])
        return draws + finals + self._list_judged(name, winner)

    def _list_judged(self, name: str, draw: int) -> list[Task]:
        """List the runs of the settings that won: of every entry, and more of the reference."""
        tasks = [Task("judge", draw, seed) for seed in self.judge_seeds]
        if name == self.reference and not self.draft:
            tasks += [Task("draft", draw, seed) for seed in self.draft_seeds]
            for length in self.lengths:
                tasks += [Task("length", draw, seed, length) for seed in self.length_seeds]
        return tasks

    def count_tasks(self, name: str) -> int:
        """Count all runs of an entry."""
        finals = 0
        if self.finalists > 1:
            finals = min(self.finalists, self.draws["count"])
        return self.draws["count"] + finals + len(self._list_judged(name, 0))

    def overrides(
        self, router: str, task: Task, options: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Make the command line of a run, without its folder.

        Quantile balancing replaces the drawn balance.
        """
        options = options or {}
        drawn = self.draw_settings()[task.draw]
        if options.get("train.bias_update") == "quantile":
            for key in BALANCE:
                drawn.pop(key, None)
        values = {"model.router": router, **drawn, **options, "run.seed": task.seed}
        if task.length != 1:
            steps = round(self.max_steps * task.length)
            values["train.max_steps"] = steps
            values["eval.interval"] = steps
            values["optim.warmup_steps"] = round(self.warmup_steps * task.length)
        return [f"--{key}={value}" for key, value in values.items()]


def load_protocol(file: str) -> Protocol:
    """Load the protocol of a config file.

    Raises ConfigError if its other tables are wrong, ValueError if [track] is.
    """
    config = configure.load(file)
    table = tomllib.loads(Path(file).read_text())
    fields = {
        "file": file,
        "runs": Path(config.run.dir, f"track-{Path(file).stem}"),
        "fixed_sha256": sha256_of(table),
        "max_steps": config.train.max_steps,
        "warmup_steps": config.optim.warmup_steps,
        "windows": config.eval.windows,
        **table.get("track", {}),
    }
    return Protocol.model_validate(fields)


def read_options(file: str, texts: Sequence[str]) -> dict[str, Any]:
    """Read KEY=VALUE texts; settings equal to the defaults are left out.

    Raises ValueError for keys that are not in OPTIONS, and for wrong values.
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
