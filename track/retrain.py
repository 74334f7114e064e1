"""Train runs of a record again, to find losses that were changed."""

import math
import os
import random
import tempfile
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from statistics import NormalDist

from runtime.signals import Stop
from track.contest import Losses, Protocol, Task, list_judged
from track.entry import make_point, read_result, time_steps, train
from track.record import Record, losses_of, read_commit, task_of

FALSE_ALARM = 0.01  # chance that an honest entry fails
LIE = 0.006  # nats per byte, of which `describe_power` tells the chance to pass
SLOWER = 2.0  # ratios of times differ by 5% on one processor; between two kinds (not measured)


def draw_runs(judged: Sequence[Record], count: int) -> list[Record]:
    """Draw runs by chance, in turn from each rung, so that no forger knows which."""
    by_rung: dict[int, list[Record]] = {}
    for run in random.SystemRandom().sample(judged, len(judged)):
        by_rung.setdefault(run["rung"], []).append(run)
    in_turn = chain.from_iterable(zip_longest(*by_rung.values()))
    return [run for run in in_turn if run][:count]


def rerun(
    protocol: Protocol, record: Record, count: int, parallel: int, stop: Stop
) -> tuple[str, bool]:
    """Train judged runs again, drawn by chance, with the code of their commits; compare the means.

    Returns:
        What was found, and True if the record stands.

    Raises:
        ValueError: fewer than 4 reruns, or more than there are runs.
    """
    judged = [run for run in record["runs"] if run["round"] == "judge"]
    if not 4 <= count <= len(judged):
        raise ValueError(f"--rerun {count}: expected 4 to {len(judged)}, the judged runs")
    drawn = draw_runs(judged, count)
    recorded = losses_of(record)
    differences = []
    for number, made in enumerate(record["made"]):
        tasks = [task_of(run) for run in drawn if run["made"] == number]
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder, "code")
            for path, text in read_commit(made["commit"]).items():
                file = code / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text)
            now = train_again(protocol, record, tasks, Path(folder), parallel, stop, code)
        differences += [subtract(now[task], recorded[task]) for task in tasks]
    mean = sum(differences) / count
    error = protocol.rerun_sd / math.sqrt(count)
    limit = find_limit(error)
    equal = differences.count(0.0)
    text = f"{record['name']}: {count} reruns, mean difference {mean:+.7f}, allowed ±{limit:.4f}; "
    text += f"{equal} equal to the bit\n{describe_power(error)}"
    if 0 < equal < count:
        text += "\nthe others were changed, or made on another processor: ask where"
    return text, abs(mean) <= limit


def judge_again(
    protocol: Protocol, record: Record, origin: str, parallel: int, stop: Stop
) -> tuple[str, bool]:
    """Judge an entry's settings by other seeds, and time its steps, with the code of this checkout.

    Args:
        protocol: the rules.
        record: of the entry.
        origin: the seeds follow from it.
        parallel: runs at a time.
        stop: asked between runs.

    Returns:
        What was found, and True if the record's mean loss and times are as these are.
    """
    recorded = losses_of(record)
    draws = list(dict.fromkeys(task.draw for task in recorded if task.round == "judge"))
    tasks = list_judged(protocol, origin, draws)
    with tempfile.TemporaryDirectory() as folder:
        now = train_again(protocol, record, tasks, Path(folder), parallel, stop)
    means = [mean_of_rungs(protocol, losses) for losses in (now, recorded)]
    difference = subtract(*means)
    runs = sum(1 / (rung.seeds * len(draws)) for rung in protocol.rungs)
    error = protocol.seed_sd * math.sqrt(2 * runs) / len(protocol.rungs)
    limit = find_limit(error)
    text = f"{record['name']}: {means[0]:.4f} with seeds of {origin}, recorded {means[1]:.4f}: "
    text += f"difference {difference:+.4f}, allowed ±{limit:.4f}\n{describe_power(error)}"
    stands = abs(difference) <= limit
    for rung, recorded_times in enumerate(record.get("step_ms", [])):
        times = time_steps(protocol, record["options"], rung)
        ratios = [pair["entry"] / pair["reference"] for pair in (times, recorded_times)]
        text += f"\nsteps on rung {rung + 1}: {ratios[0]:.2f} times the reference's, "
        text += f"recorded {ratios[1]:.2f}"
        stands = stands and 1 / SLOWER < ratios[0] / ratios[1] < SLOWER
    return text, stands


def train_again(
    protocol: Protocol,
    record: Record,
    tasks: Sequence[Task],
    folder: Path,
    parallel: int,
    stop: Stop,
    code: Path | None = None,
) -> Losses:
    """Train runs of a record, by the code in a folder or of this checkout; return their losses."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as when the record was made
    points = [make_point(protocol, record["options"], task, folder) for task in tasks]
    by_name = {task.name: task for task in tasks}
    runs = []
    for point, exit_code in train(protocol, points, parallel, stop, code):
        run = read_result(point.folder, by_name[point.number])
        if run is None:
            log = (point.folder / "train.log").read_text(errors="replace")[-2000:]
            raise ValueError(f"{point.number}: exit code {exit_code}: {log}")
        print(f"{point.number}: {run['loss']}", flush=True)
        runs.append(run)
    if stop.asked:
        raise ValueError("stopped before the last run; the same command starts again")
    return losses_of({"runs": runs})


def mean_of_rungs(protocol: Protocol, losses: Losses) -> float:
    """The mean over rungs of the mean loss of judged runs."""
    means = []
    for rung in range(len(protocol.rungs)):
        of_rung = [loss for task, loss in losses.items() if task[:2] == ("judge", rung)]
        means.append(sum(of_rung) / len(of_rung))
    return sum(means) / len(means)


def subtract(now: float, recorded: float) -> float:
    """The difference of two losses; 0 if both diverged."""
    return 0.0 if now == recorded else now - recorded


def find_limit(error: float) -> float:
    """The largest mean difference, now minus recorded, up or down, that 99% of honest entries have.

    A loss that is too high is a fault, too: the reference's would make others look better.
    """
    return NormalDist(0, error).inv_cdf(1 - FALSE_ALARM / 2)


def describe_power(error: float) -> str:
    """The chances of the two errors of a comparison, given its standard error."""
    limit = find_limit(error)
    with_lie = NormalDist(LIE, error)
    passes = with_lie.cdf(limit) - with_lie.cdf(-limit)
    return (
        f"an honest entry fails in {FALSE_ALARM:.0%}; one that reports {LIE} less than its loss "
        f"passes in {passes:.0%}"
    )
