"""Paired differences with 95% intervals, and what they say of the paper's claims."""

import math
from collections import defaultdict
from functools import cache
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
MARGIN = 0.005  # nats a token; the paper's own standard deviation over seeds at 50K is 0.004 to 0.005
SUPPORTED, CONTRADICTED, UNDECIDED, MIXED = "supported", "contradicted", "undecided", "mixed"

HOW = f"""\
A difference is paired: both runs have the same seed, hence the same training windows in the same order and, if both
are mixtures, the same initial weights, and they are evaluated on the same validation windows. With d[s, w] the
difference of their losses for seed s and window w, S seeds and W windows, the mean over both has the variance
V = V_s + V_w, V_s = Var_s(mean_w d) / S for other seeds and V_w = Var_w(mean_s d) / W for other text of the corpus.
What is left over of the two, which shrinks with S·W, is in both terms, so V errs to the large side. The interval is
mean ± (t_s·V_s + t_w·V_w) / √V (Cochran and Cox), t_s and t_w the {CONFIDENCE:.0%} two-sided quantiles of Student's t
with S - 1 and W - 1 degrees of freedom: 4.3 for three seeds, near 2 for many windows. In simulations at least 94% of
such intervals hold the true difference, whichever of seeds and windows matters (tests/test_report.py). Over several
settings each seed's differences are averaged first, as settings share their seeds, and each window's over settings of
one corpus and length, which share their windows.
**Supported** means that the whole interval lies on the claim's side of zero, **contradicted** that it lies on the
other side, and **undecided** everything else, always so with one seed, of which the interval says nothing but what
its windows do; over several settings **mixed** says that one contradicts what another, or all together, support. All
of it is said of runs of this size. "No difference" is supported by an interval within ±{MARGIN} nats, about the
paper's own standard deviation over seeds. Verdicts are of single claims: of many undecidable ones, one in twenty
would be called decided by chance."""


class Interval(NamedTuple):
    """A mean difference, the ends of its 95% interval, in nats a token, and how many seeds it rests on."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self):
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.low) else f" [{self.low:+.4f}, {self.high:+.4f}]")


def interval(differences, texts=None):
    """Of the mean over all settings: `differences` is a list of arrays (S seeds, W windows), one a setting, nats, of
    the same seeds in each. Settings of equal `texts` share their windows; without, all are of other windows.

    Crossed random effects of seeds and windows (see HOW). Without a second seed it is that of windows alone, without a
    second window it has no ends (nan).
    """
    S, n = len(differences[0]), len(differences)
    mean = float(np.mean([d.mean() for d in differences]))
    sharing = defaultdict(list)
    for text, d in zip(texts or range(n), differences, strict=True):
        sharing[text].append(d.mean(0))
    over = [sum(means) / n for means in sharing.values()]  # each a part of the mean, by window
    if S > 1:
        over.append(np.mean([d.mean(1) for d in differences], 0))
    if any(len(values) == 1 for values in over):
        return Interval(mean, math.nan, math.nan, S)
    parts = [(values.var(ddof=1) / len(values), quantile(len(values) - 1)) for values in over]
    variance = float(sum(v for v, _ in parts))
    half = float(sum(v * t for v, t in parts)) / math.sqrt(variance) if variance else 0.0
    return Interval(mean, mean - half, mean + half, S)


@cache
def quantile(degrees):
    """Two-sided quantile of Student's t: |T| is below it with a probability of CONFIDENCE."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(math.pi * degrees) / 2
    density = 2 * math.exp(log)  # of |T| at 0
    t = 1.9
    for _ in range(100):  # Newton; P(|T| < t) is concave, so from below it never overshoots
        angle = math.atan(t / math.sqrt(degrees))  # T = √degrees · tan
        powers = np.cos((nodes + 1) * angle / 2) ** (degrees - 1)
        missing = CONFIDENCE - density * math.sqrt(degrees) * angle / 2 * float(weights @ powers)
        t += missing / (density * (1 + t * t / degrees) ** (-(degrees + 1) / 2))
    return t


def differences(left, right, step, seeds=None):
    """Loss of the Arm `left` minus that of `right` at `step`: array (`seeds`, or all that both have; windows), nats.
    Runs that did not log losses of windows count as one window."""
    rows = [[arm.runs[seed].evaluations[step] for arm in (left, right)] for seed in seeds or left.shared(right)]
    if all("val/window_losses" in line for row in rows for line in row):
        return np.array([np.subtract(*(line["val/window_losses"] for line in row)) for row in rows], dtype=np.float64)
    return np.array([[row[0]["val/loss"] - row[1]["val/loss"]] for row in rows])


class Claim(NamedTuple):
    """`left` has a lower loss than `right` at that tenth of training, or an equal one."""

    words: str
    source: str
    left: str
    right: str
    tenth: int = 10
    equal: bool = False
    active: str = "any"  # for how many experts: "few", less than half of them, or "all"

    def applies(self, values):
        share = values["model.top_k"] / values["model.n_expert"]
        return {"any": True, "few": share < 0.5, "all": share == 1}[self.active]

    def judge(self, found):
        """Of an Interval of left minus right."""
        if found.seeds < 2 or math.isnan(found.low):
            return f"{UNDECIDED} (one {'seed' if found.seeds < 2 else 'window'})"
        if self.equal:
            within, outside = max(-found.low, found.high) <= MARGIN, found.low > MARGIN or found.high < -MARGIN
            return SUPPORTED if within else CONTRADICTED if outside else UNDECIDED
        return SUPPORTED if found.high < 0 else CONTRADICTED if found.low > 0 else UNDECIDED


BASE, LONGER, AFTER, FIRST, RELU, SEEDS = (
    "Sec. 4.1",
    "Sec. 4.1, length 1024",
    'App. "The Importance of Considering All Router Logit"',
    'App. "The Effect of KERN Initialization"',
    'App. "The Effect of ReLU in KERN"',
    "not in the paper",
)
CLAIMS = (
    *(Claim(f"kern ends below {other}", BASE, "kern", other) for other in ("dense", "softmax", "sigmoid", "tanh")),
    *(Claim(f"{router} ends below dense", BASE, router, "dense") for router in ("softmax", "sigmoid", "tanh")),
    *(Claim(f"kern is below {other} at a tenth already", BASE, "kern", other, 1) for other in ("dense", "softmax")),
    Claim("tanh ends below softmax", LONGER, "tanh", "softmax"),
    Claim("sigmoid ends below tanh", LONGER, "sigmoid", "tanh"),
    Claim("kern-after is below kern at a tenth", AFTER, "kern-after", "kern", 1),
    Claim("kern ends below kern-after", AFTER, "kern", "kern-after"),
    Claim("kern-mc is below kern at a tenth", FIRST, "kern-mc", "kern", 1),
    Claim("kern-mc ends like kern", FIRST, "kern-mc", "kern", equal=True),
    Claim("kern-norelu ends like kern, few active", RELU, "kern-norelu", "kern", equal=True, active="few"),
    Claim("kern ends below kern-norelu, all active", RELU, "kern", "kern-norelu", active="all"),
    Claim("kern ends below softmax-renorm (gates of softmax that sum to 1)", SEEDS, "kern", "softmax-renorm"),
    Claim("kern ends below sqrtgate (gates of softmax of norm 1)", SEEDS, "kern", "sqrtgate"),
    Claim("kern ends below softmax-l2 (exp for ReLU)", SEEDS, "kern", "softmax-l2"),
    Claim("kern ends below sigmoid-renorm", SEEDS, "kern", "sigmoid-renorm"),
    Claim("kern-nobias ends below softmax-l2 (ReLU for exp, one norm)", SEEDS, "kern-nobias", "softmax-l2"),
    Claim("kern ends like kern-nogamma (the learnable scale)", SEEDS, "kern", "kern-nogamma", equal=True),
    Claim("softmax-renorm ends below softmax (scale)", SEEDS, "softmax-renorm", "softmax"),
    Claim("sqrtgate ends below softmax-renorm (scale)", SEEDS, "sqrtgate", "softmax-renorm"),
)


class Finding(NamedTuple):
    """What one claim comes to: `cells` {setting's label: (Interval, verdict)}, `overall` the same over all settings."""

    claim: Claim
    words: str
    cells: dict
    overall: tuple | None


def judge_all(settings):
    """[Finding] of every claim that the runs bear on, arm by arm."""
    findings = []
    for claim in CLAIMS:
        found = defaultdict(list)  # words: [(setting, its two arms, step)]
        for setting in (setting for setting in settings if claim.applies(setting.values)):
            step = setting.tenths().get(claim.tenth)
            for arm in (arm for arm in setting.arms if arm.router == claim.left):
                for other in setting.counterparts(arm, claim.right) if step is not None else ():
                    found[claim.words + _constants(arm, other)].append((setting, (arm, other), step))
        for words, pairs in found.items():
            cells = {setting.label: _judged(claim, [(setting, *rest)]) for setting, *rest in pairs}
            overall = _judged(claim, pairs) if len(pairs) > 1 else None
            if overall and {SUPPORTED, CONTRADICTED} <= {overall[1], *(verdict for _, verdict in cells.values())}:
                overall = overall[0], MIXED
            findings.append(Finding(claim, words, cells, overall))
    return findings


def _constants(arm, other):
    """What tells both arms from others of their routers, in brackets."""
    mine, theirs = (one.label.removeprefix(one.router).removeprefix(", ") for one in (arm, other))
    return f" ({arm.label}; {other.label})" if mine != theirs else f" ({mine})" if mine else ""


def _judged(claim, pairs):
    """(Interval, verdict) of the mean over settings, by the seeds that all have; None if there are none."""
    seeds = sorted(set.intersection(*(set(arm.shared(other)) for _, (arm, other), _ in pairs)))
    if not seeds:
        return None
    all_of = [differences(*arms, step, seeds) for _, arms, step in pairs]
    texts = [
        (setting.values["data.name"], setting.values["model.block_size"], d.shape[1])
        for (setting, *_), d in zip(pairs, all_of, strict=True)
    ]
    found = interval(all_of, texts)
    return found, claim.judge(found)
