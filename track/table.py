"""The tables and the picture of track/README.md, from the records."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from common.files import read_json, write_atomic
from common.text import Table, markdown_table
from report.compare import Difference
from track.contest import COUNTING, Line, Protocol, draw_setting, read_records
from track.score import Answer, answer_all, find_best, judge

PAGE = Path(__file__).with_name("README.md")
BEGIN = "<!-- track: begin -->"
END = "<!-- track: end -->"


def tabulate_questions(protocol: Protocol, answers: Sequence[Answer]) -> Table:
    """A row for each question."""
    head = ["question", "minus", "difference", "p", "verdict", "pairs", "diverged at"]
    rows = []
    for one in answers:
        mean = one.mean
        rows.append(
            [
                one.name,
                one.minus,
                str(mean or ""),
                f"{mean.p:.2g}" if mean else "",
                f"**{judge(protocol, one)}**",
                f"{len(one.differences)} of {one.planned}",
                ", ".join(map(str, one.diverged)),
            ]
        )
    return head, rows


def tabulate_arms(protocol: Protocol, lines: Sequence[Line], counting: float) -> Table:
    """A row for each arm that has a run, after the count table's."""
    head = ["arm", "runs", "mean loss", "best loss at rate", "load imbalance"]
    head += ["dead experts", "diverged"]
    rows = [["counting", "", "", f"{counting:.4f}", "", "", ""]]
    for arm in protocol.arms:
        runs = [line for line in lines if line.arm == arm]
        if not runs:
            continue
        losses = [line.loss for line in runs if line.loss]
        rates = [draw_setting(protocol, line.setting)["optim.lr"] for line in runs if line.loss]
        best = find_best(rates, losses)
        rows.append(
            [
                arm,
                str(len(runs)),
                format_mean(losses, 4),
                f"{best[1]:.4f} at {best[0]:.2g}" if best else "",
                format_mean([line.load_imbalance for line in runs], 1),
                format_mean([line.dead_experts for line in runs], 1),
                str(len(runs) - len(losses)),
            ]
        )
    return head, rows


def format_mean(values: Sequence[float | None], digits: int) -> str:
    """The mean of measures; empty for a model without a router."""
    there = [value for value in values if value is not None]
    return f"{fmean(there):.{digits}f}" if there else ""


def draw_answers(means: dict[str, Difference], lines: Sequence[Line], counting: float) -> bytes:
    """An SVG file: each question's difference from softmax-renorm; dense and counting as lines.

    Counting is minus the mean loss of all runs of softmax-renorm.
    """
    from report.plots import draw_differences, format_svg  # other commands do without matplotlib

    levels = {}
    if "dense" in means:
        levels["dense"] = means.pop("dense").mean
    losses = [line.loss for line in lines if "softmax-renorm" in line.arm and line.loss]
    levels["counting"] = counting - fmean(losses)
    return format_svg(draw_differences("minus softmax-renorm, nats per byte", means, levels))


def write_page(protocol: Protocol, records: Path) -> None:
    """Write the tables between the markers of track/README.md."""
    counting = read_json(records / COUNTING, dict[str, float])["main"]
    of_rung = read_records(protocol, records)
    lines = of_rung["main"]
    answers = [one for one in answer_all(protocol, of_rung) if one.differences]
    # intervals of fewer than four pairs would be most of the picture
    means = {
        one.name: one.mean
        for one in answers
        if one.mean and one.flops == protocol.rungs["main"].flops and "softmax-renorm" in one.minus
        if len(one.differences) > 3
    }
    parts = []
    if len(means) > 1:
        picture = records / "differences.svg"
        write_atomic(picture, draw_answers(means, lines, counting))
        parts.append(f"![differences from softmax-renorm](records/{records.name}/{picture.name})")
    parts.append(markdown_table(*tabulate_questions(protocol, answers), gap=""))
    parts.append(markdown_table(*tabulate_arms(protocol, lines, counting), gap=""))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = "\n\n".join(parts)
    write_atomic(PAGE, f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
