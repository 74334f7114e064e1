"""Check records: against the rules, and the code of their commits."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from common.command import describe_error
from configure import Config
from configure.schema import KEYS
from model import build_router
from router import ROUTERS, Router, find_spec
from track.contest import (
    OPTIONS,
    RECORDS,
    Protocol,
    Task,
    draw_settings,
    list_tasks,
)
from track.ladder import list_climb, load_ladder
from track.record import (
    NAME,
    Record,
    digest_code,
    losses_of,
    read_commit,
    read_json,
    read_record,
    run_git,
    task_of,
)

LARGEST = 150_000  # bytes of a record's file
TOLERANCE = 1e-6  # nats per byte: losses by document are rounded to 1e-7
ALIKE = 0.02  # of a gate; routers of router.py differ by more than 0.2
MACHINE = r"[\w .,()@+-]{1,60}"  # a name that fits into a table
MEASURES = ("gate_norm", "load_imbalance", "dead_experts", "zero_gates")  # of a judged run
AGAIN = "enter it again: python -m scripts.track enter"
CLIMB_AGAIN = "train it again: python -m scripts.track ladder"


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
    """Return True if two routers are alike but for a constant factor, however they are written.

    A factor is no other router: model.gate_norm is tuned. Nor is a term that moves gates by less
    than ALIKE.
    """
    ours, theirs = find_spec(left), find_spec(right)
    if ours is None or theirs is None:
        return ours is theirs
    if (ours.gamma, ours.bias) != (theirs.gamma, theirs.bias):
        return False
    gates, experts = route_samples(left)
    other_gates, other_experts = route_samples(right)
    return torch.equal(experts, other_experts) and torch.allclose(gates, other_gates, rtol=ALIKE)


def is_causal(protocol: Protocol, options: Mapping[str, Any]) -> bool:
    """Return True if a token changes no bit of other tokens' gates and experts.

    On both rungs, with as many tokens as a step has, in training and in evaluation.
    """
    overrides = [f"{key}={value}" for key, value in options.items()]
    for rung in range(len(protocol.rungs)):
        config = protocol.load(rung, overrides)
        if find_spec(config.model.router) is None:
            return True
        # hash layers, then others
        for layer in {0, min(config.model.n_hash_layer, config.model.n_layer - 1)}:
            router = build_router(config.model, layer)
            for training in (True, False):
                if sees_others(router.train(training), config):
                    return False
    return True


@torch.no_grad()
def sees_others(router: Router, config: Config) -> bool:
    """Return True if a changed token and id change other tokens' gates or experts.

    Parameters are moved from where they start: a term may be silent there.
    """
    generator = torch.Generator().manual_seed(1)
    for values in (*router.parameters(), router.selection_bias):
        values += 0.1 * torch.randn(values.shape, generator=generator)
    shape = (config.train.micro_batch_size, config.model.block_size)
    ids = torch.randint(1, config.model.vocab_size, shape, generator=generator)
    tokens = torch.randn(ids.numel(), config.model.n_embd, generator=generator)
    before = router(tokens, len(ids), ids)
    for changed in (0, len(tokens) // 2, len(tokens) - 1):
        others = torch.arange(len(tokens)) != changed
        other_ids = torch.where(others.view(shape), ids, ids - 1)
        after = router(torch.where(others[:, None], tokens, -3 * tokens), len(ids), other_ids)
        for old, new in ((before.weights, after.weights), (before.experts, after.experts)):
            if not torch.equal(old[others], new[others]):
                return True
    return False


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
    if not is_causal(protocol, options):
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
def find_record_faults(
    protocol: Protocol, path: Path, others: Sequence[Record], head: str = "HEAD"
) -> list[str]:
    """List the faults of a record's file, each with its remedy; none if it is intact and complete.

    Args:
        protocol: the rules.
        path: of the record; a file in the folder ladder/ has runs of a ladder.
        others: the records of other files.
        head: commit of a branch that left this checkout's, and that brings the record.
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
            faults = find_content_faults(protocol, record, path, others, required)
            return faults + find_code_faults(record, head)
        entered = losses_of(read_record(path.parent.parent / path.name))
        rungs = [len(protocol.rungs), *(run["rung"] for run in record["runs"])]
        ladder = load_ladder(protocol, 1 + max(rungs))
        required = list_climb(ladder, record["name"], entered)
        faults = find_content_faults(ladder.protocol, record, path, others, required)
        faults += find_code_faults(record, head)
        return [fault.replace(AGAIN, CLIMB_AGAIN) for fault in faults]
    except (ValueError, OSError) as error:
        return [describe_error(error)]
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        kind = type(error).__name__
        return [f"a field is wrong ({kind}: {error}); take it from its commit again"]


def find_closed_faults(path: Path) -> list[str]:
    """A fault of a record of edition 1 that is not byte for byte one of its fifteen."""
    sums = RECORDS / "edition-1/SHA256SUMS"
    if path.parent.name != "edition-1":
        return [f"a record of edition 1, which is closed, in {path.parent}: remove it"]
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
    if not re.fullmatch(NAME, name):
        faults.append(f"{name!r}: a name has small letters, digits, dots and dashes")
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
    return faults + find_measure_faults(record)


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


def find_code_faults(record: Record, head: str) -> list[str]:
    """List what is wrong with the commits that a record names.

    They are in the history of `head`. Where that left this checkout's branch, it may have changed
    router.py alone, so that rules and trainer stay everyone's.
    """
    faults = []
    numbers = range(len(record["made"]))
    if not numbers or any(run["made"] not in numbers for run in record["runs"]):
        return ["its runs name no commit"]
    routers = {run_git("show", f"{head}:router.py").stdout}
    for made in record["made"]:
        if not re.fullmatch(MACHINE, made["machine"]):
            faults.append(f"machine is {made['machine']!r}; {AGAIN} {record['name']}")
        commit = made["commit"]
        try:
            code = read_commit(commit)
        except ValueError as error:
            faults.append(str(error))
            continue
        digest = digest_code(code)
        if digest != made["code_sha256"]:
            faults.append(
                f"code_sha256 {made['code_sha256']:.12} is not of commit {commit:.12}, which has "
                f"{digest:.12}: other code trained it"
            )
        if run_git("merge-base", "--is-ancestor", commit, head).returncode:
            faults.append(f"commit {commit:.12} is in no history of this branch; merge it")
            continue
        shared = run_git("merge-base", commit, "HEAD").stdout.decode().strip()
        if not shared:
            return ["its branch has no commit in common with this one: git fetch --unshallow"]
        before = read_commit(shared)
        for path in sorted(list_changes(before, code)):
            if path != "router.py":
                faults.append(
                    f"{path} of commit {commit:.12} is not everyone's: an entry may change "
                    f"router.py; put other changes on a branch of their own, and {AGAIN}"
                )
        if code.get("router.py") not in routers | {before.get("router.py")}:
            faults.append(
                f"router.py of commit {commit:.12} is not that of {head:.12}: what trained must be "
                f"what is proposed; put it back, or {AGAIN}"
            )
    return list(dict.fromkeys(faults))


def list_changes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> set[str]:
    """The paths of files that differ, or that only one side has."""
    return {path for path in {**before, **after} if before.get(path) != after.get(path)}
