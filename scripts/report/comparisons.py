"""Which of two arms has the lower loss, in a setting and over all of them, and what that says of the paper's claims.

All pairs that are compared at one step of a setting are one family (`statistics.judge_family`), and so are all pairs
over all settings. Every table and picture shows the verdicts of these families, so a pair has one verdict. A claim
takes that of its pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from eval import paper
from scripts.report.settings import Arm, Setting, label_value
from scripts.report.statistics import (
    EQUIVALENT,
    HIGHER,
    LOWER,
    UNDECIDED,
    Difference,
    Verdict,
    estimate_difference,
    judge_family,
)

MARGIN = 0.005  # nats per token, of "ends like"; the paper's own standard deviation over seeds is 0.004 to 0.005
SUPPORTED, CONTRADICTED = "supported", "contradicted"


@dataclass(frozen=True)
class Part:
    """Two arms of a setting at one step: None is the end, or the last step that all its runs have."""

    setting: Setting
    left: Arm
    right: Arm
    step: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The difference of two arms, left minus right, and its verdict."""

    left: Arm
    right: Arm
    difference: Difference
    verdict: Verdict

    @property
    def name(self) -> str:
        return f"{self.left.label} against {self.right.label}"


@dataclass(frozen=True)
class Claim:
    """A line of eval/paper_claims.toml: `left` ends below `right`, or (`equal`) within MARGIN of it."""

    source: str
    text: str
    left: str
    right: str
    tenth: int = 10
    equal: bool = False
    active: str = "any"

    def step(self, setting: Setting) -> int | None:
        """The step at which it is judged in that setting, if it is about models with that part of experts active."""
        share = setting.values["model.top_k"] / setting.values["model.n_expert"]
        applies = {"any": True, "few": share < 0.5, "all": share == 1}[self.active]
        return setting.tenths.get(self.tenth) if applies else None

    def judge(self, comparison: Comparison) -> str:
        """SUPPORTED or CONTRADICTED by the pair's verdict, or what kind of undecided."""
        word, difference = comparison.verdict.text, comparison.difference
        if not self.equal:
            return {LOWER: SUPPORTED, HIGHER: CONTRADICTED}.get(word, word)
        if word == EQUIVALENT:
            return SUPPORTED
        outside = difference.low > MARGIN or difference.high < -MARGIN
        return CONTRADICTED if word in (LOWER, HIGHER) and outside else UNDECIDED if word in (LOWER, HIGHER) else word


CLAIMS = [Claim(source, text, **entry) for source, entries in paper.CLAIMS.items() for text, entry in entries.items()]


def compare_parts(parts: Sequence[Part]) -> Difference | None:
    """Left minus right as the mean over parts and over the values of the key that both arms have.

    By the seeds that both arms have in all these places; None without any.
    """
    cells = [
        (part, part.left.cells[x], part.right.cells[x])
        for part in parts
        for x in part.left.cells
        if x in part.right.cells
    ]
    if not cells:
        return None
    seeds = sorted(set.intersection(*(left.keys() & right.keys() for _, left, right in cells)))
    if not seeds:
        return None
    losses, windows = np.zeros((len(cells), len(seeds))), []
    for i, (part, left, right) in enumerate(cells):
        for j, seed in enumerate(seeds):
            ours, theirs = (part.setting.evaluation(cell[seed], part.step) for cell in (left, right))
            losses[i, j] = ours["val/loss"] - theirs["val/loss"]
            if "val/window_losses" in ours and "val/window_losses" in theirs:
                windows.append(np.subtract(ours["val/window_losses"], theirs["val/window_losses"]))
    same_windows = len(windows) == losses.size and share_windows(parts)
    return estimate_difference(
        losses.mean(0), np.mean(windows, 0) if same_windows else None, parts[0].setting.documents
    )


def share_windows(parts: Sequence[Part]) -> bool:
    """Whether all parts were evaluated on the same windows of the same text."""
    keys = ("data.name", "data.mix", "model.block_size", "eval.spread")
    return len({(*map(part.setting.values.get, keys), part.left.runs[0].count_windows()) for part in parts}) == 1


def find_pairs(setting: Setting) -> list[tuple[Arm, Arm]]:
    """Arms to compare: of one router those that differ in one option, of two routers those most alike."""
    pairs = []
    for left, right in combinations(setting.arms[::-1], 2):  # routers that someone added come first
        differing = sum(left.options[key] != right.options[key] for key in left.options)
        if left.router == right.router:
            alike = differing == 1 and bool(left.shared_seeds(right))
        else:
            counterparts = setting.counterparts(right, left.router) + setting.counterparts(left, right.router)
            alike = left in counterparts or right in counterparts
        if alike:
            pairs.append((left, right))
    return pairs


def judge_parts(groups: Sequence[Sequence[Part]], margin: float | None = None) -> list[Comparison]:
    """A Comparison for each group of parts, all of them one family; without groups that lack a common seed."""
    known = [(group, difference) for group in groups if (difference := compare_parts(group))]
    verdicts = judge_family([difference for _, difference in known], margin)
    return [
        Comparison(group[0].left, group[0].right, difference, verdict)
        for (group, difference), verdict in zip(known, verdicts, strict=True)
    ]


def compare_setting(setting: Setting, step: int | None = None, margin: float | None = None) -> list[Comparison]:
    """Every pair of a setting at a step (None: the end). Nothing is compared before training."""
    if setting.key is None and (setting.end if step is None else step) == 0:
        return []
    return judge_parts([[Part(setting, left, right, step)] for left, right in find_pairs(setting)], margin)


def compare_over_settings(settings: Sequence[Setting], margin: float | None = None) -> list[Comparison]:
    """Every pair that several settings have, as the mean over them."""
    groups: dict[str, list[Part]] = {}
    for setting in settings:
        for left, right in find_pairs(setting) if setting.key or setting.end else ():
            groups.setdefault(f"{left.label} against {right.label}", []).append(Part(setting, left, right))
    return judge_parts([parts for parts in groups.values() if len(parts) > 1], margin)


def flip(comparison: Comparison) -> Comparison:
    """The same comparison, right minus left."""
    old, verdict = comparison.difference, comparison.verdict
    text = {LOWER: HIGHER, HIGHER: LOWER}.get(verdict.text, verdict.text)
    difference = Difference(-old.mean, old.seeds, old.error, old.freedom, old.over)
    return Comparison(comparison.right, comparison.left, difference, Verdict(text, verdict.p))


def find_comparison(comparisons: Sequence[Comparison], left: Arm, right: Arm) -> Comparison | None:
    """That of `left` minus `right`, whichever way round it was made; None if they were not compared."""
    for comparison in comparisons:
        if (comparison.left, comparison.right) == (left, right):
            return comparison
        if (comparison.left, comparison.right) == (right, left):
            return flip(comparison)
    return None


@dataclass(frozen=True)
class Finding:
    """What the runs of a setting say of a claim."""

    claim: Claim
    setting: Setting
    comparison: Comparison
    verdict: str


def judge_claims(settings: Sequence[Setting]) -> list[Finding]:
    """Judge every claim of the paper that the runs bear on, for each pair of arms."""
    findings = []
    families: dict[tuple, list[Comparison]] = {}
    for claim in CLAIMS:
        for setting in settings:
            step = None if setting.key else claim.step(setting)
            if step is None:
                continue
            family = (id(setting), step, claim.equal)
            if family not in families:
                families[family] = compare_setting(setting, step, MARGIN if claim.equal else None)
            for left in setting.arms:
                for right in setting.counterparts(left, claim.right) if left.router == claim.left else ():
                    if comparison := find_comparison(families[family], left, right):
                        findings.append(Finding(claim, setting, comparison, claim.judge(comparison)))
    return findings


def choose_best(setting: Setting, seeds: Sequence[int]) -> list[Comparison]:
    """Each arm at the value of the key with the lowest mean loss of `seeds`, compared by its other seeds.

    Raises ValueError if an arm lacks one of the seeds, or has no other seed.
    """
    best = []
    for arm in setting.arms:
        means = {}
        for x, cell in arm.cells.items():
            if missing := sorted(set(seeds) - set(cell)):
                raise ValueError(f"--choose-on {missing[0]}: {arm.label} has no run of this seed at {x:g}")
            means[x] = np.mean([setting.evaluation(cell[seed])["val/loss"] for seed in seeds])
        x = min(means, key=means.__getitem__)
        judged = {seed: run for seed, run in arm.cells[x].items() if seed not in seeds}
        if not judged:
            raise ValueError(f"--choose-on {', '.join(map(str, seeds))}: {arm.label} has no other seed to judge by")
        label = ", ".join(filter(None, [arm.options_label, label_value(setting.key, x)]))
        best.append(Arm(arm.router, arm.options, {None: judged}, label))
    best.sort(key=lambda arm: np.mean([setting.evaluation(run)["val/loss"] for run in arm.runs]))
    return judge_parts([[Part(setting, left, right)] for left, right in combinations(best, 2)])
