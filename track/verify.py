"""Check records: against the rules, the code of their commits, and runs that are trained again."""

import hashlib
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from operator import attrgetter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from configure.schema import KEYS
from router import ROUTERS, Router, find_spec
from runtime.signals import Stop
from track.contest import (
    OPTIONS,
    RECORDS,
    Losses,
    Protocol,
    Task,
    draw_settings,
    list_judged,
    list_tasks,
)
from track.entry import make_point, read_result, train
from track.ladder import list_climb, load_ladder
from track.record import (
    Record,
    digest_code,
    losses_of,
    read_commit,
    read_json,
    read_record,
    run_git,
    sha256_of,
    task_of,
)

LARGEST = 150_000  # bytes of a record's file
TOLERANCE = 1e-6  # nats per byte: losses by document are rounded to 1e-7
FALSE_ALARM = 0.01  # chance that reruns fail an honest entry
LIE = 0.006  # nats per byte, of which `describe_power` tells the chance to pass
MEASURES = ("gate_norm", "load_imbalance", "dead_experts", "zero_gates")  # of a judged run
AGAIN = "enter it again: python -m scripts.track enter"


# ---- the router
@torch.no_grad()
def route_samples(router: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates (N, 12), up to a factor, and experts of a router for random logits of three sizes.

    With 12 of 16 experts some chosen scores are negative, where ReLU is not idle.
    """
    spec = find_spec(router)
    assert spec is not None
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(96, 16, generator=generator)
    logits *= torch.tensor([0.1, 1.0, 4.0]).repeat(32)[:, None]
    routing = Router(1, 16, 12, spec).choose(logits)
    return routing.weights / routing.weights.square().mean().sqrt(), routing.experts


def is_same_router(left: str, right: str) -> bool:
    """Return True if two routers differ by a constant factor at most, however they are written.

    A factor is no other router: model.gate_norm is tuned.
    """
    ours, theirs = find_spec(left), find_spec(right)
    if ours is None or theirs is None:
        return ours is theirs
    if (ours.gamma, ours.bias) != (theirs.gamma, theirs.bias):
        return False
    gates, experts = route_samples(left)
    other_gates, other_experts = route_samples(right)
    return torch.equal(experts, other_experts) and torch.allclose(gates, other_gates, rtol=1e-4)


@torch.no_grad()
def is_causal(router: str) -> bool:
    """Return True if a token's logits change no bit of other tokens' gates and experts."""
    spec = find_spec(router)
    if spec is None:
        return True
    route = Router(32, 16, 4, spec)
    tokens = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    before = route(tokens)
    for changed in (0, 17, 39):
        others = torch.arange(40) != changed
        after = route(torch.where(others[:, None], tokens, -3 * tokens))
        for old, new in ((before.weights, after.weights), (before.experts, after.experts)):
            if not torch.equal(old[others], new[others]):
                return False
    return True


def find_option_faults(protocol: Protocol, options: Mapping[str, Any]) -> list[str]:
    """List options that are wrong, or that change nothing: a router would have a second name."""
    strange = sorted(set(options) - set(OPTIONS))
    if strange:
        return [f"it sets {', '.join(strange)}; an entry may set {', '.join(OPTIONS)}"]
    try:
        spec = find_spec(options.get("model.router", ""))
    except ValueError as error:
        return [f"router.py does not know its router: {error}"]
    try:
        config = protocol.load(0, [f"{key}={value}" for key, value in options.items()])
    except ValueError as error:
        return [str(error)]
    for key in set(options) - {"model.router"}:
        if attrgetter(key)(config) == KEYS[key]["default"] or spec is None:
            return [f"{key} = {options[key]} changes nothing here; leave it out"]
        if attrgetter(key)(config) != options[key]:
            return [f"{key} is {options[key]!r}: write {attrgetter(key)(config)!r}"]
    return []


def find_router_faults(
    protocol: Protocol, name: str, options: Mapping[str, Any], others: Sequence[Record]
) -> list[str]:
    """List what forbids an entry: wrong options, an acausal router, or one entered already."""
    faults = find_option_faults(protocol, options)
    if faults:
        return faults
    router = options["model.router"]
    if not is_causal(router):
        return [f"{router}: a token's gates change with other tokens, so it sees the future"]
    rest = {key: value for key, value in options.items() if key != "model.router"}
    entered = {other["name"]: other["options"] for other in others} | protocol.entries
    if name in ROUTERS and name not in protocol.entries:
        entered[name] = {"model.router": name}
    if name in entered and entered[name] != options:
        return [f"the name {name} is of {entered[name]}, not of {options}; choose another"]
    for other, taken in entered.items():
        rest_of_other = {key: value for key, value in taken.items() if key != "model.router"}
        if (
            other != name
            and rest == rest_of_other
            and is_same_router(router, taken["model.router"])
        ):
            return [f"it is the same router as {other}; a router enters once"]
    return []


# ---- a record
def find_record_faults(protocol: Protocol, path: Path, others: Sequence[Record]) -> list[str]:
    """List the faults of a record's file, each with its remedy; none if it is intact and complete.

    `others` are the records of other files. A file in the folder ladder/ has runs of a ladder.
    """
    try:
        record = read_json(path)
        if record.get("format") == 1:
            return find_closed_faults(path)
        record = read_record(path)
        size = path.stat().st_size
        if size > LARGEST:
            return [f"it has {size:,} bytes, at most {LARGEST:,} are allowed"]
        if path.parent.name != "ladder":
            required = list_tasks(protocol, record["name"], losses_of(record))
            return find_content_faults(protocol, record, path, others, required)
        entered = losses_of(read_record(path.parent.parent / path.name))
        ladder = load_ladder(protocol, 1 + max(run["rung"] for run in record["runs"]))
        required = list_climb(ladder, record["name"], entered)
        return find_content_faults(ladder.protocol, record, path, others, required)
    except (ValueError, OSError) as error:
        return [str(error)]
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        kind = type(error).__name__
        return [f"a field is missing or wrong ({kind}: {error}); take it from its commit again"]


def find_closed_faults(path: Path) -> list[str]:
    """A fault of a record of edition 1 that is not byte for byte one of its fifteen."""
    sums = RECORDS / "edition-1/SHA256SUMS"
    line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
    if line in sums.read_text().splitlines():
        return []
    return [f"edition 1 is closed, and this is none of its records: {sums}"]


def find_content_faults(
    protocol: Protocol,
    record: Record,
    path: Path,
    others: Sequence[Record],
    required: Sequence[Task],
) -> list[str]:
    """List the faults of a record that has been read and must have the `required` runs."""
    name = record["name"]
    faults = []
    if record["sha256"] != sha256_of({k: v for k, v in record.items() if k != "sha256"}):
        faults.append(
            "its digest is not that of its content: it was changed by hand; "
            "take it from its commit again"
        )
    if record["protocol_sha256"] != protocol.sha256 or record["edition"] != protocol.edition:
        faults.append(
            f"it is of edition {record['edition']}, protocol {record['protocol_sha256']:.12}; this "
            f"is edition {protocol.edition}, {protocol.sha256:.12}: other rules or defaults; "
            f"{AGAIN} {name}"
        )
        return faults
    if name != path.stem or record["draft"] is not False:
        kind = "a draft" if record["draft"] else name
        faults.append(f"it is {kind}: one entry a name, in NAME.json")
    if record["data_sha256"] != protocol.data_sha256:
        faults.append(f"it is of the text {record['data_sha256']:.12}; {AGAIN} {name}")
    if record["settings"] != draw_settings(protocol):
        faults.append(f"its settings are not the protocol's draws; {AGAIN} {name}")
    is_timed = name != protocol.reference and path.parent.name != "ladder"
    if is_timed and len(record.get("step_ms", [])) != len(protocol.rungs):
        faults.append(f"it lacks the times of a step; {AGAIN} {name}")
    faults += find_router_faults(protocol, name, record["options"], others)
    faults += find_run_faults(protocol, record, required)
    faults += find_measure_faults(record)
    return faults + find_code_faults(record)


def find_run_faults(protocol: Protocol, record: Record, required: Sequence[Task]) -> list[str]:
    """List the faults of a record's runs; seeds follow from name and protocol."""
    faults = []
    losses = losses_of(record)
    missing = [task.name for task in required if task not in losses]
    if missing:
        faults.append(
            f"{len(missing)} of {len(required)} runs are missing, such as {missing[0]}; "
            f"{AGAIN} {record['name']}"
        )
    for task in losses:
        if task not in required:
            faults.append(f"{task.name} is no run of this entry: other seed, draw or length")
    if len(losses) != len(record["runs"]):
        faults.append("a run is in it more than once")
    for run in record["runs"]:
        if run["round"] != "judge" or run["loss"] is None:
            continue
        windows = protocol.load(run["rung"]).eval.windows
        if sum(count for _, count in run["documents"]) != windows:
            faults.append(f"the documents of {task_of(run).name} do not have {windows} windows")
        mean = sum(loss * count for loss, count in run["documents"]) / windows
        if not abs(mean - run["loss"]) < TOLERANCE:  # a NaN is a fault, too
            faults.append(
                f"the loss of {task_of(run).name} is {run['loss']}, the mean of its documents "
                f"{mean:.6f}"
            )
    return faults


def find_measure_faults(record: Record) -> list[str]:
    """List measures and times that are negative or no numbers, or that only some judged runs have.

    A router without gates has no measures of them.
    """
    faults = []
    judged = [run for run in record["runs"] if run["round"] == "judge" and run["loss"] is not None]
    for measure in MEASURES:
        values = [run[measure] for run in judged if measure in run]
        is_complete = len(values) in (0, len(judged))
        if measure == "gate_norm":  # at the start and at the end
            is_complete = is_complete and all(len(pair) == 2 for pair in values)
            values = [number for pair in values for number in pair]
        if not is_complete or not all(math.isfinite(value) and value >= 0 for value in values):
            faults.append(
                f"{measure} is missing or no number in a judged run; {AGAIN} {record['name']}"
            )
    for times in record.get("step_ms", []):
        values = (times["reference"], times["entry"])
        if not all(math.isfinite(value) and value > 0 for value in values):
            faults.append(f"step_ms {times}: expected positive numbers; {AGAIN} {record['name']}")
    return faults


def find_code_faults(record: Record) -> list[str]:
    """List what is wrong with the commits that a record names."""
    faults = []
    if not record["made"] or any(
        run["made"] not in range(len(record["made"])) for run in record["runs"]
    ):
        return ["its runs name no commit"]
    for made in record["made"]:
        if not isinstance(made["machine"], str):
            faults.append(f"machine is {made['machine']}; {AGAIN} {record['name']}")
        commit = made["commit"]
        try:
            code = digest_code(read_commit(commit))
        except ValueError as error:
            faults.append(str(error))
            continue
        if code != made["code_sha256"]:
            faults.append(
                f"code_sha256 {made['code_sha256']:.12} is not of commit {commit:.12}, which has "
                f"{code:.12}: other code trained it"
            )
        if run_git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
            faults.append(f"commit {commit:.12} is in no history of this branch; merge it")
    return faults


# ---- runs again
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
    differences = []
    equal = []
    for number, made in enumerate(record["made"]):
        tasks = [task_of(run) for run in drawn if run["made"] == number]
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder, "code")
            for path, text in read_commit(made["commit"]).items():
                file = code / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text)
            now = train_again(protocol, record, tasks, Path(folder), parallel, stop, code)
        recorded = losses_of(record)
        of_commit = [subtract(now[task], recorded[task]) for task in tasks]
        differences += of_commit
        equal.append((of_commit.count(0.0), len(tasks)))
    mean = sum(differences) / count
    limit = find_limit(protocol.rerun_sd / math.sqrt(count))
    text = f"{record['name']}: {count} reruns, mean difference {mean:+.7f}, allowed {limit:+.4f}"
    text += f"; {sum(number for number, _ in equal)} equal to the bit\n"
    text += describe_power(protocol.rerun_sd / math.sqrt(count))
    stands = mean <= limit
    if any(0 < same < total for same, total in equal):  # this machine repeats the record's runs
        text += "\nsome runs are equal to the bit and others are not: these were changed"
        stands = False
    return text, stands


def judge_again(
    protocol: Protocol, record: Record, commit: str, parallel: int, stop: Stop
) -> tuple[str, bool]:
    """Judge an entry's settings by seeds that follow from a commit, with the code of this checkout.

    Returns:
        What was found, and True if the record's mean loss is not lower than these runs allow.
    """
    recorded = losses_of(record)
    draws = list(dict.fromkeys(task.draw for task in recorded if task.round == "judge"))
    tasks = list_judged(protocol, commit, draws)
    with tempfile.TemporaryDirectory() as folder:
        now = train_again(protocol, record, tasks, Path(folder), parallel, stop)
    means = [mean_of_rungs(protocol, losses) for losses in (now, recorded)]
    difference = subtract(*means)
    runs = sum(1 / (rung.seeds * len(draws)) for rung in protocol.rungs)
    error = protocol.seed_sd * math.sqrt(2 * runs) / len(protocol.rungs)
    limit = find_limit(error)
    text = f"{record['name']}: {means[0]:.4f} with seeds of {commit:.12}, recorded {means[1]:.4f}: "
    text += f"difference {difference:+.4f}, allowed {limit:+.4f}\n{describe_power(error)}"
    return text, difference <= limit


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
    """The largest mean difference, now minus recorded, that an honest entry has in 99%."""
    return NormalDist(0, error).inv_cdf(1 - FALSE_ALARM)


def describe_power(error: float) -> str:
    """The chances of the two errors of a comparison, given its standard error."""
    passes = NormalDist(LIE, error).cdf(find_limit(error))
    return (
        f"an honest entry fails in {FALSE_ALARM:.0%}; one that reports {LIE} less than its loss "
        f"passes in {passes:.0%}"
    )
