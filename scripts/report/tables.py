"""The tables of a report, as a head and rows of text."""

import statistics
from collections.abc import Sequence

from eval import paper
from model import count_parameters
from scripts.report.claims import Finding, Judged, compare_arms
from scripts.report.runs import Run
from scripts.report.settings import Setting

Table = tuple[list[str], list[list[str]]]
COLUMNS = ("run", "router", "data", "total", "active", "step", "train loss", "val loss", "tokens/s", "gate norm")
COLUMNS += ("val imbalance",)
HOW = """\
`train loss`: mean of the training batches logged since the evaluation before, within a tenth of training. `gate norm`:
√E‖g‖² on the validation windows, mean over layers, at the first and the last evaluation."""


def summarize_run(run: Run) -> list[str]:
    """COLUMNS of a run at its last evaluation. tokens/s: median over the run; imbalance: largest over mean load."""
    first, last = (list(run.evaluations.values())[i] for i in (0, -1))
    step, loss, speeds = last["step"], run.train_loss(last["step"]), run.logged("perf/tokens_per_sec").values()
    norms = [f"{line['val/gate_norm']:.3f}" for line in (first, last) if "val/gate_norm" in line]
    cells = [run.config.run.name + run.trunk, run.config.model.router, run.config.data.label]
    cells += [f"{count / 1e6:.2f}M" for count in count_parameters(run.config.model)]
    cells.append(f"{step:,}" + ("" if run.ended else f" of {run.config.train.max_steps:,}"))
    cells += ["-" if loss is None else f"{loss:.4f}", f"{last['val/loss']:.4f}"]
    cells += [f"{statistics.median(speeds):,.0f}" if speeds else "-", " → ".join(norms) or "-"]
    return [*cells, f"{last['val/load_imbalance']:.2f}" if "val/load_imbalance" in last else "-"]


def format_mean(values: Sequence[float]) -> str:
    """Mean and standard deviation (of a sample) over seeds."""
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def build_loss_table(setting: Setting) -> Table:
    """Loss of each arm at the tenths of training; below it the paper's and the difference."""
    tenths, printed = setting.tenths or {0: setting.end}, setting.printed
    scaled = bool(printed.losses) and setting.max_steps != paper.STEPS
    head = ["validation loss at step", *(f"{step:,}" + f" ({5 * i}K)" * scaled * (i > 0) for i, step in tenths.items())]
    rows = []
    for arm in setting.arms:
        seeds = f" ({len(arm.seeds)} seeds)" * (len(arm.seeds) > 1)
        rows.append([f"**{arm.label}**{seeds}", *(format_mean(arm.losses(step)) for step in tenths.values())])
        theirs = [printed.format_loss(arm.router, i) for i in tenths]
        if any(theirs):
            means = {(arm.router, i): statistics.fmean(arm.losses(step)) for i, step in tenths.items()}
            apart = [f"{mean - printed.losses[at]:+.4f}" if at in printed.losses else "" for at, mean in means.items()]
            rows += [["paper", *theirs], ["difference", *apart]]
    return head, rows


def build_measures_table(setting: Setting) -> Table:
    """What evaluations of each arm measure besides the loss, at the last step at which every run has it."""
    head = ["at the end" if setting.end == setting.max_steps else "at the last common step"]
    head += [name for name, _ in setting.measures.values()]
    last = {key: steps[-1] for key, (_, steps) in setting.measures.items()}
    rows = []
    for arm in setting.arms:
        lines = [run.evaluations for run in arm.runs.values()]
        rows.append([arm.label, *(format_mean([of[step][key] for of in lines]) for key, step in last.items())])
    return head, rows


def build_difference_table(setting: Setting, baseline: str) -> Table:
    """Each arm against the baseline at the last common step."""
    head = [f"at step {setting.end:,}", "seeds", "loss", f"minus {baseline}, paired, 95%", f"{baseline} is"]
    head += ["the paper's difference"] * bool(setting.printed.losses)
    rows = []
    for arm in setting.arms:
        cells = [arm.label, str(len(arm.seeds)), format_mean(arm.losses(setting.end))]
        if base := setting.counterpart(arm, baseline):
            found = compare_arms(arm, base, setting.end)
            cells[1] += f", {found.seeds} paired" * (found.seeds < len(arm.seeds))
            theirs = setting.printed.subtract(arm.router, base.router, setting.end_tenth)
            cells += [str(found), found.decide("worse", "better") if found.seeds > 1 else "undecided (one seed)"]
            cells.append("" if theirs is None else f"{theirs:+.4f}")
        rows.append((cells + [""] * 3)[: len(head)])
    return head, rows


def build_findings_table(findings: Sequence[Finding], settings: Sequence[Setting], claims: bool = True) -> Table:
    """Left minus right and the verdict of each claim or pair, in each setting and over all of them."""
    several = any(finding.overall for finding in findings)
    settings = [of for of in settings if any(of.label in finding.cells for finding in findings)]
    head = [*(["claim", "where"] if claims else ["pair"]), *["all settings"] * several]
    head += [setting.label or "left minus right, 95%" for setting in settings]
    rows = []
    for claim, words, found, overall, _ in findings:
        cells = [_format_judged(overall)] * several
        for setting in settings:
            theirs = setting.printed.subtract(claim.left, claim.right, claim.tenth or setting.end_tenth)
            cell = _format_judged(found.get(setting.label))
            cells.append(cell + (f" (paper: {theirs:+.4f})" if cell and theirs is not None else ""))
        rows.append([words, *[claim.source] * claims, *cells])
    return head, rows


def _format_judged(judged: Judged | None) -> str:
    return f"{judged.interval} **{judged.verdict}**{judged.holm}" if judged else ""
