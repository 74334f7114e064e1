"""The page of a report: its text, tables and pictures."""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

import configure
from eval import paper
from eval.intervals import UNDECIDED
from scripts.report import pictures, tables
from scripts.report.claims import HOW, HOW_CLAIMS, HOW_PAIRS, Finding, judge_claims, judge_pairs
from scripts.report.figures import save_figure
from scripts.report.pages import Block, write_page
from scripts.report.runs import Run
from scripts.report.settings import ARM_KEYS, Setting, describe_windows

COST = """Runs timed one after another cannot show what a router costs: `python -m scripts.bench step` and
`python -m scripts.bench router` time routers in turns within one process."""
SWEPT = ("model.n_expert", "model.top_k", "model.n_embd", "model.block_size", "model.expert_hidden")
TITLE = re.compile(r"# (One run|\d+ runs compared)\n")  # of a page that this module wrote
NAMED = ("data.name", "data.mix", "train.batch_size")  # said before the other settings
NOTES, PAIRS = 6, 15  # shown; more notes, or a table of more pairs, are folded
SHAPE = ("train.max_steps", "model.n_layer", *SWEPT, "optim.lr")
PICTURES = {  # of each setting: caption, function of the setting and the baseline
    "loss": ("Validation and training loss, mean and range over seeds. Lower is better.", pictures.plot_loss),
    "measures": ("Evaluations, besides the loss: mean and range over seeds.", pictures.plot_measures),
    "difference": ("Loss minus {}'s, paired, with 95% intervals.", pictures.plot_difference),
    "pairs": (
        "Loss of the row minus the column's, lowest first. Bold: decided; italic: undecided.",
        pictures.plot_pairs,
    ),
    "routing": (
        "Training batches: load imbalance, the gates' entropy and norm, γ; layers' means.",
        pictures.plot_routing,
    ),
    "loads": ("Validation windows: load of each expert at the end, first seed; ×: no token.", pictures.plot_loads),
}


def write_report(
    settings: Sequence[Setting], notes: Sequence[str], baseline: str, experiment: str | None, folder: Path
) -> list[Finding]:
    """Write report.md, report.html and their pictures into `folder`; returns the verdicts, claims first.

    Raises:
        ValueError: the folder has a report.md that is not one of runs.
        OSError: it cannot be written.
    """
    remove_pictures(folder)
    runs = [run for setting in settings for run in setting.runs]
    findings, pairs = judge_claims(settings), judge_pairs(settings)
    blocks: list[Block] = [("h1", f"{len(runs)} runs compared" if len(runs) > 1 else "One run")]

    def add_picture(name: str, caption: str, figure: Figure | None) -> None:
        if figure:
            save_figure(figure, folder / f"{name}.png")
            blocks.append(("picture", f"{name}.png", caption))

    if notes:
        blocks.append(("list", [f"**Note** {line}." for line in notes[:NOTES]]))
    if more := notes[NOTES:]:
        blocks.append(("fold", f"{len(more)} more notes", [("list", [f"{line}." for line in more])]))
    at = "at the end" if all(of.end == of.max_steps for of in settings) else "at the last common step"
    diamonds = "; diamonds: the paper's difference" * any(of.printed.losses and of.has_paper_tokens for of in settings)
    ends = pictures.plot_ends(settings, baseline)
    add_picture("ends", f"Loss {at} minus that of {baseline}, with 95% intervals{diamonds}.", ends)
    blocks.append(("h2", "Claims"))
    if findings:
        blocks += [("table", *tables.build_findings_table(findings, settings)), ("p", HOW_CLAIMS)]
    else:
        blocks.append(("p", "None apply: no setting has both routers of a claim."))
    if pairs:
        table = ("table", *tables.build_findings_table(pairs, settings, claims=False))
        table = ("fold", count_verdicts(pairs), [table]) if len(pairs) > PAIRS else table
        blocks += [("h2", "Every pair of routers"), table, ("p", HOW_PAIRS), ("p", HOW)]
    swept = [key for key in SWEPT if len({setting.values[key] for setting in settings}) > 2]
    for key in swept[:1]:  # others move with it
        add_picture(key, f"Loss {at} against {key}, means over seeds.", pictures.plot_axis(settings, key))
    for setting in settings:
        based = any(setting.counterpart(arm, baseline) for arm in setting.arms)
        blocks += [("h2", setting.label or "Loss"), ("p", describe_setting(setting))]
        blocks += [("p", compare_with_paper(setting, experiment))] if experiment else []
        blocks.append(("table", *tables.build_loss_table(setting)))
        blocks += [("table", *tables.build_measures_table(setting))] if setting.measures else []
        blocks += [("table", *tables.build_difference_table(setting, baseline))] if based else []
        for name, (caption, plot) in PICTURES.items():
            if based or name != "difference":
                file = re.sub(r"[^A-Za-z0-9._]+", "-", f"{setting.label}-{name}").strip("-")
                add_picture(file, caption.format(baseline), plot(setting, baseline))
    rows = [[f"`{run.folder}`{run.trunk}", *tables.summarize_run(run)[1:]] for run in runs]
    write_page([*blocks, ("h2", "Runs"), ("table", tables.COLUMNS, rows), ("p", tables.HOW), ("p", COST)], folder)
    return findings + pairs


def remove_pictures(folder: Path) -> None:
    """Remove the pictures of the report in the folder, and no others. Raises ValueError of another report.md."""
    previous = folder / "report.md"
    text = previous.read_text() if previous.is_file() else ""
    if text and not TITLE.match(text):
        raise ValueError(f"--out {folder}: its report.md is not a report of runs; name another folder")
    for name in re.findall(r"^!\[.*\]\(([\w.-]+\.png)\)", text, re.M):
        (folder / name).unlink(missing_ok=True)


def count_verdicts(pairs: Sequence[Finding]) -> str:
    """How many pairs were decided somewhere, in words."""
    undecided = sum(all(cell.verdict.startswith(UNDECIDED) for cell in pair.cells.values()) for pair in pairs)
    return f"{len(pairs)} pairs, {undecided} of them undecided"


def describe_setting(setting: Setting) -> str:
    """Text, length and shape, and what else all runs share of the arms' constants."""
    keys = dict.fromkeys([*SHAPE, *setting.varying, *ARM_KEYS[1:]])
    values = {key: {run.value(key) for run in setting.runs} for key in keys if key not in NAMED}
    shared = ", ".join(f"{key.split('.')[1]} {value}" for key, (value, *more) in values.items() if not more)
    tokens = f"{setting.tokens:,} tokens per step, {setting.tokens * setting.max_steps / 1e6:,.1f} M in all"
    return f"`{setting.runs[0].config.data.label}`: {tokens}; {shared}; {describe_windows(setting)}."


def compare_with_paper(setting: Setting, experiment: str) -> str:
    """How far the paper's numbers may be compared with these runs."""
    printed = setting.printed
    if not printed.losses:
        return f"The paper prints no loss of `{experiment}` in this setting."
    words = f"The paper's numbers are those of `{experiment}`, at the same part of training."
    if differ := list_differences(setting, experiment):
        words += (
            " **Not the paper's setting**: compare differences between routers, not losses (the paper's values in "
            f"brackets): {', '.join(differ)}."
        )
    if not setting.has_paper_tokens:
        words += " **Other tokens** than GPT-2's: only the sign of the paper's differences can be compared."
    if printed.deviations:
        words += " ± is the standard deviation over seeds, ours of a sample, the paper's of a population."
    shown = {(arm.router, i) for arm in setting.arms for i in setting.tenths}
    doubts = [f"{at[0]} at {5 * at[1]}K: {why}" for at, why in printed.doubts.items() if at in shown]
    return words + f" Numbers marked ? are doubtful: {'; '.join(doubts)}." * bool(doubts)


def list_differences(setting: Setting, experiment: str) -> list[str]:
    """`key = value here (value there)` for each value that no run of the experiment has."""
    file = paper.EXPERIMENTS / f"{experiment}.toml"
    points = [Run(file, configure.load(file, point), {}, []) for point in configure.sweep_points(file)]
    found = []
    for key in (*setting.values, *ARM_KEYS[1:]):
        theirs = [point.value(key) for point in points]
        theirs = ["float16" if value == "auto" else value for value in theirs]  # train.dtype on CUDA
        if odd := sorted({run.value(key) for run in setting.runs}.difference(theirs)):
            found.append(f"{key} = {', '.join(map(str, odd))} ({theirs[0]})")
    return found
