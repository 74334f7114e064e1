"""Paired differences of arms, what they say about the paper's claims, and which of two routers is lower."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from eval import paper
from eval.intervals import CONFIDENCE, UNDECIDED, Interval, correct_family, estimate_interval
from scripts.report.settings import Arm, Setting, find_documents

MARGIN = 0.005  # nats per token; the paper's own standard deviation over seeds at 50K is 0.004 to 0.005
SUPPORTED, CONTRADICTED, MIXED = "supported", "contradicted", "mixed"

HOW = """\
Differences are paired by seed and validation window. Intervals assume that seeds are independent draws, and so are the
documents that the windows are of; windows of one document are not (eval/intervals.py; `python -m scripts.coverage`
simulates how often they contain the truth). **Undecided**: the interval contains zero, or there is one seed. **Mixed**:
one setting contradicts another. A verdict is about runs of this size, and alone: of many undecidable ones, one in
twenty is decided by chance. **Holm** corrects for that. Its family is a column of a table: all claims, or all pairs, of
one setting or over all settings. Its p-value is the verdict's, corrected: at 0.05 or more the verdict is undecided as
one of its family."""
HOW_CLAIMS = f"""\
**Supported**: the interval is on the claim's side of zero; for "ends like", within ±{MARGIN} nats, the paper's own
deviation over seeds. **Contradicted**: on the other side, or outside."""
HOW_PAIRS = """\
Loss of the first router minus that of the second, at the last step that all runs of a setting have. **Lower**,
**higher**: the first router's loss is, by an interval that is on that side of zero."""


def compare_arms(left: Arm, right: Arm, step: int) -> Interval:
    """The mean of `pair_differences` with its interval."""
    d = pair_differences(left, right, step)
    return estimate_interval([d], documents=[find_documents((left, right), d.shape[1])])


def pair_differences(left: Arm, right: Arm, step: int, seeds: Sequence[int] | None = None) -> np.ndarray:
    """Loss of `left` minus that of `right` at `step`: (`seeds`, by default all shared; windows), fp64, nats per token.

    Runs without logged losses of windows count as one window.
    """
    rows = [[arm.runs[seed].evaluations[step] for arm in (left, right)] for seed in seeds or left.shared_seeds(right)]
    windows = all("val/window_losses" in line for row in rows for line in row)
    losses = [[line["val/window_losses"] if windows else [line["val/loss"]] for line in row] for row in rows]
    return np.array([np.subtract(ours, theirs) for ours, theirs in losses], dtype=np.float64)


class Claim(NamedTuple):
    """A line of eval/paper_claims.toml, or two arms without a claim."""

    source: str
    words: str
    left: str
    right: str
    tenth: int | None = 10  # None: the last step that all runs of a setting have
    equal: bool = False
    active: str = "any"
    below: str = SUPPORTED  # verdicts by the side of zero
    above: str = CONTRADICTED

    def step(self, setting: Setting) -> int | None:
        """The step at which it is judged in that setting, if it is about models with that part of experts active."""
        share = setting.values["model.top_k"] / setting.values["model.n_expert"]
        applies = {"any": True, "few": share < 0.5, "all": share == 1}[self.active]
        return (setting.end if self.tenth is None else setting.tenths.get(self.tenth)) if applies else None

    def judge(self, found: Interval) -> str:
        """The verdict by the Interval of left minus right."""
        if found.seeds < 2 or math.isnan(found.low):
            return f"{UNDECIDED} (one {'seed' if found.seeds < 2 else 'window'})"
        if self.equal:
            within, outside = max(-found.low, found.high) <= MARGIN, found.low > MARGIN or found.high < -MARGIN
            return SUPPORTED if within else CONTRADICTED if outside else UNDECIDED
        return found.decide(self.below, self.above)

    def distance(self, found: Interval) -> float | None:
        """From the mean to where the verdict changes; None: to zero."""
        return abs(abs(found.mean) - MARGIN) if self.equal else None

    def p_value(self, found: Interval) -> float:
        """That of the verdict being wrong; NaN with one seed, or one window."""
        return math.nan if found.seeds < 2 else found.p_value(self.distance(found))


CLAIMS = [Claim(source, words, **of) for source, claims in paper.CLAIMS.items() for words, of in claims.items()]


class Judged(NamedTuple):
    """An interval, its verdict, that one's p-value, and the same corrected for its family; NaN where none is tested."""

    interval: Interval
    verdict: str
    p_value: float = math.nan
    corrected: float = math.nan

    @property
    def holm(self) -> str:
        """What the correction says of a decided verdict, in brackets; empty for others."""
        if self.p_value > 1 - CONFIDENCE or self.verdict == MIXED or math.isnan(self.corrected):
            return ""
        return f" (Holm: {UNDECIDED}, p {self.corrected:.2g})" * self.lost or f" (Holm: p {self.corrected:.2g})"

    @property
    def lost(self) -> bool:
        """Whether it is decided alone, but not as one of its family."""
        return self.p_value < 1 - CONFIDENCE <= self.corrected


class Finding(NamedTuple):
    """What the runs say of a claim: {setting's label: Judged}, and the same over several settings."""

    claim: Claim
    words: str
    cells: dict[str, Judged]
    overall: Judged | None
    arms: tuple[str, str]  # labels


def judge_claims(settings: Sequence[Setting]) -> list[Finding]:
    """Judge every claim that the runs bear on, for each pair of arms."""
    findings = []
    for claim in CLAIMS:
        found = defaultdict(list)  # words: [(setting, its two arms)]
        for setting in settings:
            if claim.step(setting) is not None:
                for arm in setting.arms:
                    for other in setting.counterparts(arm, claim.right) if arm.router == claim.left else ():
                        found[claim.words + _name_constants(arm, other)].append((setting, arm, other))
        findings += [_judge(claim, words, pairs) for words, pairs in found.items()]
    return correct_findings(findings)


def judge_pairs(settings: Sequence[Setting]) -> list[Finding]:
    """Which of every two arms has the lower loss; of two routers with several constants each, those most alike."""
    found = defaultdict(list)  # claim and words: [(setting, its two arms)]
    for setting in settings:
        arms = setting.arms[::-1] if setting.end else ()  # routers that someone added first
        for arm, other in combinations(arms, 2):
            names, same = (arm.router, other.router), arm.router == other.router and arm.shared_seeds(other)
            if same or arm in setting.counterparts(other, names[0]) or other in setting.counterparts(arm, names[1]):
                claim = Claim("", "{} against {}".format(*names), *names, tenth=None, below="lower", above="higher")
                found[claim, claim.words + _name_constants(arm, other)].append((setting, arm, other))
    return correct_findings([_judge(claim, words, pairs) for (claim, words), pairs in found.items()])


def _judge(claim: Claim, words: str, pairs: Sequence[tuple[Setting, Arm, Arm]]) -> Finding:
    """The Finding of a claim about two arms in each of several settings."""
    cells = {pair[0].label: judged for pair in pairs if (judged := _judge_pairs(claim, [pair]))}
    overall = _judge_pairs(claim, pairs) if len(pairs) > 1 else None
    if overall and {claim.below, claim.above} <= {overall.verdict, *(cell.verdict for cell in cells.values())}:
        overall = overall._replace(verdict=MIXED)
    return Finding(claim, words, cells, overall, (pairs[0][1].label, pairs[0][2].label))


def correct_findings(findings: Sequence[Finding]) -> list[Finding]:
    """The same with p-values corrected, each column being a family: a setting, or all settings."""
    columns = defaultdict(list)  # label, None over all settings: findings' places with a test
    for i, finding in enumerate(findings):
        for label, judged in [*finding.cells.items(), (None, finding.overall)]:
            if judged and not math.isnan(judged.p_value):
                columns[label].append((i, judged))
    fixed = [finding._replace(cells={**finding.cells}) for finding in findings]
    for label, column in columns.items():
        found, arms = [judged.interval for _, judged in column], [tuple(sorted(findings[i].arms)) for i, _ in column]
        distances = [findings[i].claim.distance(judged.interval) for i, judged in column]
        for (i, judged), p in zip(column, correct_family(found, arms, distances), strict=True):
            if label is None:
                fixed[i] = fixed[i]._replace(overall=judged._replace(corrected=p))
            else:
                fixed[i].cells[label] = judged._replace(corrected=p)
    return fixed


def _name_constants(arm: Arm, other: Arm) -> str:
    """What tells both arms from others of their routers, in brackets."""
    mine, theirs = (one.label.removeprefix(one.router).removeprefix(", ") for one in (arm, other))
    return f" ({arm.label}; {other.label})" if mine != theirs else f" ({mine})" if mine else ""


def _judge_pairs(claim: Claim, pairs: Sequence[tuple[Setting, Arm, Arm]]) -> Judged | None:
    """Interval and verdict of the mean over settings, by the seeds that all of them have; None without any."""
    seeds = sorted(set.intersection(*(set(arm.shared_seeds(other)) for _, arm, other in pairs)))
    if not seeds:
        return None
    steps = [(step, arm, other) for of, arm, other in pairs if (step := claim.step(of)) is not None]
    differences = [pair_differences(arm, other, step, seeds) for step, arm, other in steps]
    corpora = [(of.values["data.name"], of.values["data.mix"]) for of, *_ in pairs]
    keys = ("data.name", "data.mix", "model.block_size", "eval.spread")
    texts = [(*map(pair[0].values.get, keys), d.shape[1]) for pair, d in zip(pairs, differences, strict=True)]
    documents = [find_documents(pair[1:], d.shape[1]) for pair, d in zip(pairs, differences, strict=True)]
    found = estimate_interval(differences, texts, documents, corpora)
    return Judged(found, claim.judge(found), claim.p_value(found))
