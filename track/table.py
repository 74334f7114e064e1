"""The tables of track/README.md, from the record of the main rung."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.files import read_json, write_atomic
from common.text import Table, markdown_table
from track.contest import COUNTING, Line, Protocol, draw_setting, read_lines
from track.score import SIZES, Answer, answer, find_best, judge, power

REPO_ROOT = Path(__file__).parents[1]
PAGE = REPO_ROOT / "track/README.md"
BEGIN = "<!-- track: begin -->"
END = "<!-- track: end -->"
ENOUGH = 6  # pairs, to print their own deviation in place of the pilot's


def tabulate_questions(protocol: Protocol, answers: Sequence[Answer]) -> Table:
    """A row for each question that has a pair."""
    head = ["question", "minus", "difference", "p", "verdict", "pairs", "diverged at"]
    rows = []
    for one in answers:
        if not one.pairs and not one.diverged:
            continue
        difference = one.difference
        done = len(one.pairs) + len(one.diverged)
        rows.append(
            [
                one.name,
                " / ".join(protocol.questions[one.name].minus),
                str(difference) if difference else "",
                f"{difference.p:.2g}" if difference else "",
                f"**{judge(protocol, one)}**",
                f"{done} of {one.planned}",
                ", ".join(str(pair.setting) for pair in one.diverged),
            ]
        )
    return head, rows


def tabulate_arms(protocol: Protocol, lines: Sequence[Line], counting: float | None) -> Table:
    """A row for each arm that has a run, after the count table's."""
    head = ["arm", "runs", "mean loss", "best loss", "at rate", "load imbalance"]
    head += ["dead experts", "zero gates", "gate norm", "diverged"]
    rows = []
    if counting is not None:
        rows.append(["counting", "", "", f"{counting:.4f}", *[""] * 6])
    by_arm: dict[str, list[Line]] = {}
    for line in lines:
        by_arm.setdefault(line.arm, []).append(line)
    for arm, of_arm in by_arm.items():
        ended = [line for line in of_arm if line.loss is not None]
        best = find_arm_best(protocol, ended)
        norms = [line.gate_norm for line in ended if line.gate_norm]
        rows.append(
            [
                arm,
                str(len(of_arm)),
                format_mean([line.loss for line in ended], 4),
                f"{best[1]:.4f}" if best else "",
                f"{best[0]:.2g}" if best else "",
                format_mean([line.load_imbalance for line in ended], 1),
                format_mean([line.dead_experts for line in ended], 1),
                format_mean([line.zero_gates for line in ended], 2),
                " → ".join(f"{norm:.2f}" for norm in np.mean(norms, axis=0)) if norms else "",
                str(len(of_arm) - len(ended)),
            ]
        )
    return head, rows


def find_arm_best(protocol: Protocol, ended: Sequence[Line]) -> tuple[float, float] | None:
    """`find_best` of an arm's runs; rates are those at width 64."""
    points = []
    for line in ended:
        if line.loss is not None:
            points.append((draw_setting(protocol, line.setting)["lr"], line.loss))
    return find_best(points)


def format_mean(values: Sequence[float | None], digits: int) -> str:
    """The mean of the values that there are."""
    there = [value for value in values if value is not None]
    return f"{np.mean(there):.{digits}f}" if there else ""


def describe_power(protocol: Protocol, one: Answer) -> str:
    """How small a difference a question can find, by its own pairs if there are enough."""
    own = len(one.pairs) >= ENOUGH
    deviation = one.deviation if own else protocol.pilot_sd
    origin = f"of {one.name}'s pairs so far" if own else "expected from edition 2"
    chances = []
    for size in SIZES:
        chance = power(size, deviation, one.planned, protocol.alpha)
        chances.append(f"a difference of {size:g} in {chance:.0%}")
    return (
        f"With the standard deviation {origin}, {deviation:.4f}, {one.planned} pairs find "
        f"{' and '.join(chances)} of contests."
    )


def write_page(protocol: Protocol, records: Path) -> None:
    """Write the tables between the markers of track/README.md."""
    lines = read_lines(records / "main.jsonl")
    answers = [answer(protocol, name, lines) for name in protocol.questions]
    counting = records / COUNTING
    loss = read_json(counting, dict[str, float]).get("main") if counting.exists() else None
    parts = []
    if lines:
        parts.append(markdown_table(*tabulate_questions(protocol, answers), gap=""))
    first = answers[0]
    done = len(first.pairs) + len(first.diverged)
    if done < first.planned:
        parts.append(f"Runs are going on: {done} of {first.planned} pairs of {first.name}.")
    parts.append(describe_power(protocol, first))
    if lines or loss is not None:
        parts.append(markdown_table(*tabulate_arms(protocol, lines, loss), gap=""))
    text = "\n\n".join(parts)
    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks {BEGIN} or {END}; take it from git again")
    write_atomic(PAGE, f"{before}{BEGIN}\n{text}\n{END}{after}")
