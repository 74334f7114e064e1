"""Paired differences with 95% intervals, what they say about the paper's claims, and which of two routers is lower."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from eval import paper
from scripts.report.runs import Arm, Setting

CONFIDENCE = 0.95
MARGIN = 0.005  # nats per token; the paper's own standard deviation over seeds at 50K is 0.004 to 0.005
SUPPORTED, CONTRADICTED, UNDECIDED, MIXED = "supported", "contradicted", "undecided", "mixed"

HOW = """\
Differences are paired by seed and validation window; the intervals take both as crossed random effects
(estimate_interval in scripts/report/claims.py). **Undecided**: the interval contains zero, or there is one seed.
**Mixed**: one setting contradicts another. Verdicts are about runs of this size, each alone: of many undecidable
ones, one in twenty is decided by chance."""
HOW_CLAIMS = f"""\
**Supported**: the interval is on the claim's side of zero; for "ends like", within ±{MARGIN} nats, the paper's own
deviation over seeds. **Contradicted**: on the other side, or outside."""
HOW_PAIRS = """\
Loss of the first router minus that of the second, at the last step that all runs of a setting have. **Lower**,
**higher**: the first router's loss is, by an interval that is on that side of zero."""


class Interval(NamedTuple):
    """A mean difference and the ends of its 95% interval, nats per token, and the number of seeds behind it."""

    mean: float
    low: float
    high: float
    seeds: int

    def decide(self, below: str, above: str) -> str:
        """`below` or `above`, the side of zero that the interval is on; UNDECIDED if it touches zero or has no ends."""
        return below if self.high < 0 else above if self.low > 0 else UNDECIDED

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.low) else f" [{self.low:+.4f}, {self.high:+.4f}]")


def estimate_interval(differences: Sequence[np.ndarray], texts: Sequence[Any] | None = None) -> Interval:
    """Mean difference over settings with its interval, from crossed random effects of seeds and windows.

    For d[s, w], seed s of S and window w of W, the mean has the variance V = V_s + V_w, V_s = Var_s(mean_w d) / S and
    V_w = Var_w(mean_s d) / W; their common remainder is counted twice, so V errs to the large side. The interval is
    mean ± (t_s·V_s + t_w·V_w) / √V, with the quantiles of Student's t for S - 1 and W - 1 degrees of freedom. Over
    settings, each seed's differences are averaged first, and each window's over settings that share windows.

    Args:
        differences: one (S seeds, W windows) array per setting, nats per token, of the same seeds in each.
        texts: one value per setting; settings of equal values share their windows. By default none do.

    Returns:
        With one seed the interval is over windows alone; with one window its ends are NaN.

    Source: the approximate t of Cochran and Cox, Experimental Designs.
    """
    from scipy.stats import t  # only reports need scipy

    seeds, settings = len(differences[0]), len(differences)
    mean = float(np.mean([d.mean() for d in differences]))
    sharing = defaultdict(list)
    for text, d in zip(texts or range(settings), differences, strict=True):
        sharing[text].append(d.mean(0))
    effects = [np.sum(means, 0) / settings for means in sharing.values()]  # by window, each a part of the mean
    if seeds > 1:
        effects.append(np.mean([d.mean(1) for d in differences], 0))
    if any(len(values) == 1 for values in effects):
        return Interval(mean, math.nan, math.nan, seeds)
    variances = [values.var(ddof=1) / len(values) for values in effects]
    quantiles = [t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) for values in effects]
    half = float(np.dot(variances, quantiles) / math.sqrt(sum(variances))) if any(variances) else 0.0
    return Interval(mean, mean - half, mean + half, seeds)


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


CLAIMS = [Claim(source, words, **of) for source, claims in paper.CLAIMS.items() for words, of in claims.items()]


class Finding(NamedTuple):
    """What the runs say of a claim: {setting's label: (interval, verdict)}, and the same over several settings."""

    claim: Claim
    words: str
    cells: dict[str, tuple[Interval, str]]
    overall: tuple[Interval, str] | None


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
    return findings


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
    return [_judge(claim, words, pairs) for (claim, words), pairs in found.items()]


def _judge(claim: Claim, words: str, pairs: Sequence[tuple[Setting, Arm, Arm]]) -> Finding:
    """The Finding of a claim about two arms in each of several settings."""
    cells = {pair[0].label: judged for pair in pairs if (judged := _judge_pairs(claim, [pair]))}
    overall = _judge_pairs(claim, pairs) if len(pairs) > 1 else None
    if overall and {claim.below, claim.above} <= {overall[1], *(verdict for _, verdict in cells.values())}:
        overall = overall[0], MIXED
    return Finding(claim, words, cells, overall)


def _name_constants(arm: Arm, other: Arm) -> str:
    """What tells both arms from others of their routers, in brackets."""
    mine, theirs = (one.label.removeprefix(one.router).removeprefix(", ") for one in (arm, other))
    return f" ({arm.label}; {other.label})" if mine != theirs else f" ({mine})" if mine else ""


def _judge_pairs(claim: Claim, pairs: Sequence[tuple[Setting, Arm, Arm]]) -> tuple[Interval, str] | None:
    """Interval and verdict of the mean over settings, by the seeds that all of them have; None without any."""
    seeds = sorted(set.intersection(*(set(arm.shared_seeds(other)) for _, arm, other in pairs)))
    if not seeds:
        return None
    steps = [(step, arm, other) for of, arm, other in pairs if (step := claim.step(of)) is not None]
    differences = [pair_differences(arm, other, step, seeds) for step, arm, other in steps]
    keys = ("data.name", "model.block_size")
    texts = [(*map(pair[0].values.get, keys), d.shape[1]) for pair, d in zip(pairs, differences, strict=True)]
    found = estimate_interval(differences, texts)
    return found, claim.judge(found)
