"""Compare runs, and judge the paper's claims by them.

    python -m scripts.report runs/small-* --out runs/report-small
    python -m scripts.report runs/books3_512-* --experiment books3_512       the paper's numbers beside the runs'
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma       loss minus that router's

Writes report.md with its pictures, and report.html, which holds all of it in one file. Runs are paired by seed and by
validation window; runs of other corpora, sizes or schedules are compared apart, and judged together at the end.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import configure
from configure.schema import KEYS
from eval.pages import write
from model import count_parameters
from runtime import RunError
from scripts.report import pictures
from scripts.report.claims import HOW, differences, interval, judge_all
from scripts.report.runs import OF_ARM, PAPER_STEPS, Paper, load_all, settings_of, slug

COLUMNS = ("run", "router", "total", "active", "step", "val loss", "tokens/s", "load imbalance")
COST = """That a router costs nothing is no claim to judge by runs that are timed one after another:
`python -m scripts.bench step` and `python -m scripts.bench router` time routers in turns within one process."""
SWEPT = ("model.n_expert", "model.top_k", "model.n_embd", "model.block_size", "model.expert_hidden")


def row(run):
    """The terminal table's cells, COLUMNS in order. tokens/s is the median over the run; load imbalance is that of the
    last validation: the busiest expert's load over the mean, averaged over layers."""
    total, active = count_parameters(run.config.model)
    step, last = list(run.evaluations.items())[-1]
    speeds = [line["perf/tokens_per_sec"] for line in run.logs if "perf/tokens_per_sec" in line]
    return (
        run.config.run.name,
        run.config.model.router,
        f"{total / 1e6:.2f}M",
        f"{active / 1e6:.2f}M",
        f"{step:,}" + ("" if step == run.config.train.max_steps else f" of {run.config.train.max_steps:,}"),
        f"{last['val/loss']:.4f}",
        f"{statistics.median(speeds):,.0f}" if speeds else "-",
        f"{last['val/load_imbalance']:.2f}" if "val/load_imbalance" in last else "-",
    )


def table(rows):
    """Aligned text: the first two columns to the left, numbers to the right."""
    rows = [COLUMNS, *rows]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def with_deviation(values):
    """`1.2345 ± 0.0067`: mean and standard deviation (of a sample) over seeds."""
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def loss_table(setting, paper):
    """Head and rows: each arm's loss at the tenths of training, under it the paper's and the difference."""
    tenths = setting.tenths() or {None: setting.end}
    doubts = paper.doubts(setting) if paper else {}
    head = ["validation loss at step"]
    for i, step in tenths.items():
        elsewhere = paper and i and setting.max_steps != PAPER_STEPS
        head.append(f"{step:,}" + (f" ({PAPER_STEPS * i // 10_000}K)" if elsewhere else ""))
    rows = []
    for arm in setting.arms:
        seeds = f" ({len(arm.seeds)} seeds)" if len(arm.seeds) > 1 else ""
        rows.append([f"**{arm.label}**{seeds}"] + [with_deviation(arm.losses(step)) for step in tenths.values()])
        printed = paper.losses(setting, arm.router) if paper else {}
        spread = paper.losses(setting, arm.router, "std") if paper else {}
        theirs, apart = [], []
        for i, step in tenths.items():
            doubt = "?" if (arm.router, i) in doubts else ""
            deviation = f" ± {spread[i]:.4f}" if i in spread else ""
            theirs.append(f"{printed[i]:.4f}{deviation}{doubt}" if i in printed else "")
            apart.append(f"{statistics.fmean(arm.losses(step)) - printed[i]:+.4f}" if i in printed else "")
        if any(theirs):
            rows += [["paper", *theirs], ["difference", *apart]]
    return head, rows


def lead_table(setting, baseline, paper):
    """Head and rows: each arm against the baseline, at the last step that all runs have."""
    head = [f"at step {setting.end:,}", "seeds", "loss", f"minus {baseline}, paired, 95%", f"{baseline} is"]
    head += ["the paper's difference"] if paper else []
    rows = []
    for arm in setting.arms:
        cells = [arm.label, str(len(arm.seeds)), with_deviation(arm.losses(setting.end))]
        base = setting.counterpart(arm, baseline)
        if base is None:
            rows.append(cells + ["", ""] + [""] * bool(paper))
            continue
        found = interval([differences(arm, base, setting.end)])
        if found.seeds < len(arm.seeds):
            cells[1] += f", {found.seeds} paired"
        word = "better" if found.low > 0 else "worse" if found.high < 0 else "undecided"
        theirs = paper.difference(setting, arm.router, base.router, setting.tenth(setting.end)) if paper else None
        rows.append([*cells, str(found), word if found.seeds > 1 else "undecided (one seed)"])
        rows[-1] += [f"{theirs:+.4f}" if theirs is not None else ""] if paper else []
    return head, rows


def speed_table(setting, baseline):
    """Head and rows: size and speed of each arm; of its first seed's last line of the log, what its router does."""
    head = ["training", "parameters", "active", "tokens/s", f"time of a step / {baseline}'s"]
    head += ["zero gates", "dead experts"]
    rows = []
    for arm in setting.arms:
        total, active = count_parameters(arm.runs[arm.seeds[0]].config.model)
        speeds, base = pictures.speeds_of(arm), setting.counterpart(arm, baseline)
        ratio = "1.000" if speeds and baseline in (arm.router, arm.label) else ""
        if base and speeds and (others := pictures.speeds_of(base)):
            ratio = f"{statistics.median(others) / statistics.median(speeds):.3f}"
        last = arm.runs[arm.seeds[0]]
        zero = [line["router/zero_gates"] for line in last.logs if "router/zero_gates" in line]
        dead = [line["router/dead_experts"] for line in last.logs if "router/dead_experts" in line]
        rows.append(
            [arm.label, f"{total / 1e6:.2f} M", f"{active / 1e6:.2f} M"]
            + [f"{statistics.median(speeds):,.0f}" if speeds else "", ratio]
            + [f"{zero[-1]:.3f}" if zero else "", f"{dead[-1]:g}" if dead else ""]
        )
    return head, rows


def claims_table(findings, settings, paper):
    """Head and rows: each claim's difference and verdict, beside the paper's; of several settings in each, and over all
    of them."""
    if len(settings) == 1:
        head = ["claim", "where", "left minus right, 95%", "verdict", *["by the paper's own numbers"] * bool(paper)]
    else:
        head = ["claim", "where", "all of them", *[setting.label for setting in settings]]
    rows = []
    for finding in findings:
        left, right, tenth = finding.claim.left, finding.claim.right, finding.claim.tenth
        cells = []
        for setting in settings:
            found = finding.cells.get(setting.label)
            words = [str(found[0]), f"**{found[1]}**"] if found else []
            theirs = paper.difference(setting, left, right, tenth) if paper and found else None
            printed = f"{theirs:+.4f}" if theirs is not None else ""
            if len(settings) == 1:
                cells += [*words, *[printed] * bool(paper)]
            else:
                cells.append(" ".join(words) + f" (paper: {printed})" * bool(printed))
        if len(settings) > 1:
            cells.insert(0, f"{finding.overall[0]} **{finding.overall[1]}**" if finding.overall else "")
        rows.append([finding.words, finding.claim.source, *cells])
    return head, rows


def page(settings, oddities, findings, baseline, paper, folder):
    """The blocks of the report, its pictures drawn into `folder`."""
    runs = [run for setting in settings for run in setting.runs]
    based = {setting.label for setting in settings for arm in setting.arms if setting.counterpart(arm, baseline)}
    blocks = [("h1", f"{len(runs)} runs compared" if len(runs) > 1 else "One run")]
    if oddities:
        blocks.append(("list", [f"**Note** {line}." for line in oddities]))
    if based:
        printed = pictures.ends(settings, baseline, paper, folder / "ends.png")
        words = f"Loss {pictures.when(settings)} minus that of {baseline}, with 95% intervals"
        blocks.append(("picture", "ends.png", words + ("; diamonds: the paper's difference." if printed else ".")))
    blocks.append(("h2", "Claims"))
    if findings:
        blocks += [("table", *claims_table(findings, settings, paper)), ("p", HOW), ("p", COST)]
    else:
        blocks.append(("p", "None that these runs bear on: two routers of a claim are needed, in one setting."))
    swept = [key for key in SWEPT if len({setting.values[key] for setting in settings}) > 2]
    for key in swept[:1]:  # others move with it
        if pictures.axis(settings, key, folder / f"{key}.png"):
            blocks.append(("picture", f"{key}.png", f"Loss {pictures.when(settings)} against {key}, means over seeds."))
    for setting in settings:
        base = baseline if setting.label in based else None
        blocks += [("h2", setting.label or "Loss"), ("p", describe(setting)), *beside(setting, paper)]
        blocks.append(("table", *loss_table(setting, paper)))
        blocks += [("table", *lead_table(setting, base, paper))] if base else []
        blocks += drawn(setting, base, folder)
        blocks.append(("table", *speed_table(setting, base or setting.arms[0].router)))
    return [*blocks, ("h2", "Runs"), ("p", ", ".join(f"`{run.folder}`" for run in runs))]


def describe(setting):
    of = {key.split(".")[1]: value for key, value in setting.values.items()}
    tokens = setting.tokens * setting.max_steps
    constants = {key: {run.value(key) for run in setting.runs} for key in OF_ARM[1:]}
    rates = [("lr", of["lr"])] + [
        (key.split(".")[1], value)
        for key, (value, *others) in constants.items()
        if not others and value != KEYS[key]["default"]
    ]
    return (
        f"{of['n_layer']} layers, width {of['n_embd']}, {of['n_expert']} experts of hidden width "
        f"{of['expert_hidden']}, {of['top_k']} active, length {of['block_size']}. `{setting.values['data.name']}`, "
        f"{setting.max_steps:,} steps of {setting.tokens:,} tokens, {tokens / 1e6:,.1f} M in all, "
        f"{', '.join(f'{name} {value:g}' for name, value in rates)}. Validation on the same {of['windows']:,} windows "
        f"each time."
    )


def beside(setting, paper):
    """Paragraphs on the paper's numbers: how far they may be compared with these."""
    if not paper:
        return []
    if not paper.table(setting):
        return [("p", f"The paper prints no loss of `{paper.experiment}` in this setting.")]
    words = f"The paper's numbers are those of `{paper.experiment}`, at the same part of training."
    if differ := paper.differences(setting):
        words += " **Not the paper's setting**, so compare differences between routers, not losses (the paper's in "
        words += f"brackets): {', '.join(differ)}."
        if not paper.same_tokens(setting):
            words += " **Other tokens** than GPT-2's: of the paper's differences only the sign compares."
    if any(paper.losses(setting, arm.router, "std") for arm in setting.arms):
        words += " Behind ± is the standard deviation over seeds, ours of a sample, the paper's of a population."
    shown = {(arm.router, i) for arm in setting.arms for i in setting.tenths()}
    doubts = [f"{at[0]} at {5 * at[1]}K: {why}" for at, why in paper.doubts(setting).items() if at in shown]
    if doubts:
        words += f" Those marked ? are doubtful: {'; '.join(doubts)}."
    return [("p", words)]


def drawn(setting, baseline, folder):
    """The pictures of one setting, each a block; those without figures are left out."""
    wanted = [
        (pictures.losses, "loss", "Validation loss, mean over seeds; shaded: from the lowest to the highest seed.")
    ]
    if baseline:
        words = (
            f"Loss minus {baseline}'s. Left: paired, with 95% intervals, moved sideways so that bars do not hide each "
            f"other. Right: at equal time of training; between evaluations of {baseline} a straight line."
        )
        wanted.append((partial(pictures.leads, baseline=baseline), "difference", words))
    wanted += [
        (
            pictures.routing,
            "routing",
            "Load imbalance, entropy of the gates and γ in training; means over layers and seeds.",
        ),
        (
            pictures.loads,
            "loads",
            "Load of each expert over its layer's mean in the last evaluation that all runs have; × marks experts "
            "without a token. Right: each layer's loads in order of size, first layers dark.",
        ),
        (
            pictures.speed,
            "speed",
            "Speed of training. Runs are timed one after another, on machines that may have had other work: for the "
            "cost of a router take `python -m scripts.bench step`, which times them in turns.",
        ),
    ]
    blocks = []
    for draw, name, words in wanted:
        file = f"{slug(setting.label)}-{name}.png" if setting.label else f"{name}.png"
        if draw(setting, path=folder / file) is not False:
            blocks.append(("picture", file, words))
    return blocks


def is_report(folder):
    """Whether runs/* caught the report of an earlier call."""
    return (folder / "report.html").is_file() and not (folder / "config.toml").is_file()


def ambiguous(settings, baseline):
    """A line if the baseline is there with several constants, of which nothing tells the one to subtract."""
    for setting in settings:
        for arm in setting.arms:
            if len(found := setting.counterparts(arm, baseline)) > 1:
                labels = " or ".join(f"'{other.label}'" for other in found[1:])
                return [
                    f"{baseline} is there more than once: pictures subtract '{found[0].label}'; --baseline {labels}"
                ]
    return []


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/quickstart-*")
    parser.add_argument("--baseline", help="router, or label of an arm, to subtract (default: kern if there is one)")
    parser.add_argument(
        "--experiment", help="name of a file in config/paper: its printed losses stand beside the runs'"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/report"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        paper = Paper(args.experiment) if args.experiment else None
        runs, left_out = load_all([folder for folder in args.runs if not is_report(folder)])
        settings, oddities = settings_of(runs)
        oddities = left_out + oddities + ambiguous(settings, args.baseline or "kern")
        arms = [arm for setting in settings for arm in setting.arms]
        if args.baseline and args.baseline not in (names := {name for arm in arms for name in (arm.router, arm.label)}):
            raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out}: there is a file of that name, and a report is a folder")
        if (args.out / "config.toml").is_file():
            raise ValueError(f"--out {args.out}: a run's folder; name another")
        args.out.mkdir(parents=True, exist_ok=True)
        findings = judge_all(settings)
        write(page(settings, oddities, findings, args.baseline or "kern", paper, args.out), args.out)
    except (ValueError, RunError, configure.ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(row(run) for run in runs))
    for finding in findings:
        if finding.overall:
            print(f"{finding.words}: {finding.overall[1]}, {finding.overall[0]}")
        for where, (found, verdict) in finding.cells.items():
            print(f"{'  ' * bool(finding.overall)}{finding.words}{' in ' * bool(where)}{where}: {verdict}, {found}")
    for line in oddities:
        print(f"note: {line}")
    print(f"report: {args.out}/report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
