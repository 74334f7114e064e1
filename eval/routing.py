"""Measure what the experts of a trained run do, layer by layer, over fixed validation windows.

    python -m eval.routing runs/A                              loads, pairs, tokens
    python -m eval.routing runs/A --other runs/B               and where two runs agree
    python -m eval.routing runs/A --other runs/A --checkpoint 500    or one run's checkpoints
    python -m eval.routing runs/A --trace FILE.npz             each token's experts and gates
    python -m eval.routing runs/B --replay FILE.npz            B's loss with those experts

Prints tables and writes routing.json to runs/NAME/eval/step_…/routing (routing-OTHER for two runs).
An earlier file there is replaced; `python -m scripts.draw FILE` draws the loads. Computed in
float32. A comparison needs requirements-report.txt.

Co-activation, vocabulary specialization and router saturation follow OLMoE (arXiv 2409.02060,
Sec. 5). For its chance level each is measured again with expert choices shuffled across windows.
The shuffle keeps how often each token and each expert occurs, and removes how they are related.

Shapes: B windows of T tokens, N = B·T tokens, E experts, K chosen per token, U common tokens of the
vocabulary, counted one by one.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from balance import entropy, expert_loads, token_distribution
from common.command import build_parser, command, require_packages, run_command
from common.files import write_atomic
from common.progress import progress_bar
from common.text import Table, text_table
from configure.schema import select_model_keys
from data.loader import choose_validation, windows
from data.tokenizer import Tokenizer
from eval.generation import encode_prompt
from eval.traces import read_trace, record_decisions, trace_windows, write_trace
from eval.trained import (
    Trained,
    add_device_argument,
    add_run_arguments,
    load_model,
    open_set,
    set_up_device,
)
from model import GPT
from router import Routing, find_spec

MIN_COUNT = 10  # occurrences; the choices of a rarer token are mostly noise (not measured)
# Approximate. A batch has at least two windows: the baseline shuffles choices across them.
BATCH_TOKENS = 4096
WINDOWS = 64  # read unless --windows says otherwise

COLUMNS_OF_LAYERS = """\
busiest: highest over mean load    idle: experts without a token
in use: experts by the entropy of loads, per token: by that of a token's scores
zero gates: share of gates that are 0
vocabulary: share of a token's occurrences that its most frequent expert has
partner: share of an expert's tokens that its most frequent partner has
(in brackets: the same of choices shuffled across windows)"""
COLUMNS_OF_AGREEMENT = """\
same number: share of a token's experts with equal numbers in both runs
matched: the same after the best renumbering of experts (in brackets: by chance)
beyond chance: (matched - chance) / (1 - chance)"""


class LayerCounts:
    """Sums over the tokens of one layer.

    Attributes:
        tokens: N.
        together: (E, E) int64, tokens that chose both experts; the diagonal holds the loads.
        by_token: (2, U + 1, E) int32, choices by [measured, shuffled], token, expert. The last row
            of tokens holds all rare ones.
        agreement: (2, E, E) int64, tokens that chose expert i here and j in the other model,
            [measured, shuffled].
        entropy: () fp64, summed over tokens, nats.
        zero_gates: () int64, gates that are exactly 0.
    """

    def __init__(self, n_expert: int, n_rows: int, device: torch.device) -> None:
        self.tokens = 0
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        self.together = zeros(n_expert, n_expert)
        self.by_token = zeros(2, n_rows, n_expert, dtype=torch.int32)
        self.agreement = zeros(2, n_expert, n_expert)
        self.entropy = zeros((), dtype=torch.float64)
        self.zero_gates = zeros(())

    def add(self, routing: Routing, rows: Tensor, other: Routing | None = None) -> None:
        """Add the routing of B windows, and the other model's routing of the same windows.

        Args:
            routing: for N = B·T tokens.
            rows: (B, T) int64, each token's row in `by_token`.
            other: for the same tokens.
        """
        N, E = routing.scores.shape
        experts = routing.experts  # (N, K)
        self.tokens += N
        self.together += count_pairs(experts, experts, E)
        self.entropy += N * entropy(token_distribution(routing))
        self.zero_gates += (routing.weights == 0).sum()
        self._add_tokens(0, rows, experts)
        self._add_tokens(1, shuffled_baseline(rows), experts)
        if other is not None:
            shuffled = shuffled_baseline(other.experts.view(*rows.shape, -1))  # (B, T, K)
            self.agreement[0] += count_pairs(experts, other.experts, E)
            self.agreement[1] += count_pairs(experts, shuffled.flatten(0, 1), E)

    def _add_tokens(self, table: int, rows: Tensor, experts: Tensor) -> None:
        """Count experts (N, K) under the rows (B, T) of their tokens."""
        n_rows, E = self.by_token[table].shape
        cells = rows.flatten()[:, None] * E + experts  # (N, K)
        self.by_token[table] += expert_loads(cells, n_rows * E).view(n_rows, E)


@dataclass
class LayerReport:
    """A layer's entry of routing.json.

    Fields that end in `_by_chance` are counted with shuffled choices.
    """

    layer: int
    loads: list[int]  # (E,) tokens that chose each expert
    load_imbalance: float  # highest load over mean load
    dead_experts: int
    load_entropy: float  # nats
    entropy: float  # nats, of normalised scores, mean over tokens
    zero_gates: float  # share of gates that are exactly 0
    strongest_partner: float  # see `mean_strongest`
    strongest_partner_by_chance: float
    vocabulary: float  # share of a token's occurrences that its most frequent expert has, mean
    vocabulary_by_chance: float


def count_pairs(mine: Tensor, theirs: Tensor, n_expert: int) -> Tensor:
    """Count the tokens that chose expert i in `mine` and j in `theirs`.

    Args:
        mine: (N, K) int64, chosen experts, N < 2²⁴: the counts are exact in float32.
        theirs: (N, K) int64, of the same tokens.
        n_expert: E.

    Returns:
        (E, E) int64.
    """
    chose_mine = torch.zeros(len(mine), n_expert, device=mine.device).scatter_(1, mine, 1)
    chose_theirs = torch.zeros(len(theirs), n_expert, device=mine.device).scatter_(1, theirs, 1)
    return (chose_mine.T @ chose_theirs).long()


def shuffled_baseline(x: Tensor) -> Tensor:
    """Move each value of x (B, T, ...) to the next window and to a permuted position."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    return x.roll(1, 0)[:, order.to(x.device)]


def record_routing(model: GPT, idx: Tensor) -> list[Routing]:
    """Run tokens `idx` (B, T) through the model; return the decisions of each layer's router."""
    with record_decisions(model) as decisions:
        model.hidden(idx)
    return decisions


@torch.no_grad()
def route_text(model: GPT, tokenizer: Tokenizer, text: str) -> tuple[list[str], Tensor, Tensor]:
    """Run a text, read as the start of a document, through a model.

    Returns:
        Its T tokens; the experts that each of L layers with experts chooses for them (L, T, K)
        int64, by descending score; and their gates (L, T, K).

    Raises:
        ValueError: the text is longer than block_size, or the model is dense.
    """
    ids = encode_prompt(tokenizer, text, model.config.block_size)
    decisions = record_routing(model, torch.tensor([ids], device=model.head.device))
    if not decisions:
        raise ValueError("a dense model has no router: load a run with another model.router")
    # without the first token, end-of-text
    experts = torch.stack([layer.experts[1:] for layer in decisions])
    gates = torch.stack([layer.weights[1:] for layer in decisions])
    return [tokenizer.decode([i]) for i in ids[1:]], experts.cpu(), gates.cpu()


@torch.no_grad()
def count_routing(
    model: GPT, other: GPT | None = None, *, text: np.ndarray
) -> tuple[list[LayerCounts], np.ndarray]:
    """Run windows `text` (W, T) int64, two or more, through a model and the one to compare it with.

    Returns:
        The counts of each layer with experts, and how often each common token occurs (U,), the most
        common first.

    Raises:
        ValueError: no token occurs MIN_COUNT times.
    """
    config = model.config
    device = model.head.device
    occurrences = np.bincount(text.ravel(), minlength=config.vocab_size)
    n_common = int((occurrences >= MIN_COUNT).sum())
    if not n_common:
        raise ValueError(
            f"no token occurs {MIN_COUNT} times among {text.size:,} tokens; raise --windows"
        )
    ids = np.argsort(-occurrences, kind="stable")[:n_common]
    row_of_token = torch.full((len(occurrences),), n_common)  # the last row is for rare tokens
    row_of_token[torch.from_numpy(ids)] = torch.arange(n_common)

    n_layer = config.n_layer
    layers = [LayerCounts(config.n_expert, n_common + 1, device) for _ in range(n_layer)]
    n_batches = max(1, min(len(text) // 2, text.size // BATCH_TOKENS))
    batches = np.array_split(text, n_batches)
    for batch in progress_bar(iterable=batches, desc="windows", leave=False):
        idx = torch.from_numpy(batch)
        rows = row_of_token[idx].to(device)
        mine = record_routing(model, idx.to(device))
        theirs: Sequence[Routing | None] = [None] * len(mine)
        if other is not None:
            theirs = record_routing(other, idx.to(device))
        for counts, routing, other_routing in zip(layers, mine, theirs, strict=True):
            counts.add(routing, rows, other_routing)
    return layers, occurrences[ids]


def mean_strongest(shares: np.ndarray) -> float:
    """Measure co-activation: the share of an expert's tokens that its most frequent partner has.

    Args:
        shares: (E, E), share of expert i's tokens that chose j too. The row of an expert without
            tokens is 0.

    Returns:
        The mean over experts with tokens.
    """
    of_partners = np.where(np.eye(len(shares), dtype=bool), 0, shares)
    return float(of_partners.max(1)[shares.any(1)].mean())


def compare_choices(agreement: np.ndarray, top_k: int) -> dict[str, float]:
    """Measure how far two models agree in one layer.

    Args:
        agreement: (2, E, E), tokens that chose i and j, [measured, shuffled].
        top_k: K.

    Returns:
        `same_number`, the share of a token's experts with equal numbers in both; `matched`, the
        same after the best one-to-one renumbering of the other model's experts; and both with
        `_by_chance`.
    """
    from scipy.optimize import linear_sum_assignment

    shares = {}
    for counts, suffix in zip(agreement, ("", "_by_chance"), strict=True):
        pairs = counts.sum()  # K² per token
        matched = counts[linear_sum_assignment(counts, maximize=True)]
        shares[f"same_number{suffix}"] = float(counts.trace() * top_k / pairs)
        shares[f"matched{suffix}"] = float(matched.sum() * top_k / pairs)
    return shares


def describe_layer(layer: int, counts: LayerCounts, occurrences: np.ndarray) -> LayerReport:
    """Turn a layer's counts into measures; see `count_routing` for `occurrences`."""
    N = counts.tokens
    together = counts.together.cpu().numpy()
    loads = together.diagonal()
    by_token, by_chance = counts.by_token.cpu().numpy()  # (U + 1, E) each
    return LayerReport(
        layer=layer,
        loads=loads.tolist(),
        load_imbalance=float(loads.max() / loads.mean()),
        dead_experts=int((loads == 0).sum()),
        load_entropy=torch.special.entr(torch.from_numpy(loads / loads.sum())).sum().item(),
        entropy=counts.entropy.item() / N,
        zero_gates=float(counts.zero_gates.item() / loads.sum()),
        strongest_partner=mean_strongest(together / np.maximum(loads, 1)[:, None]),
        strongest_partner_by_chance=mean_strongest(np.broadcast_to(loads / N, together.shape)),
        vocabulary=float((by_token[:-1].max(1) / occurrences).mean()),
        vocabulary_by_chance=float((by_chance[:-1].max(1) / occurrences).mean()),
    )


def load_with_router(folder: Path, step: int | None, args: argparse.Namespace) -> Trained:
    """Load a run's model, with --average or --ema. Raises ValueError if it is dense."""
    trained = load_model(folder, step, args.average, args.ema)
    config = trained.config
    if find_spec(config.model.router) is None:
        raise ValueError(
            f"{config.run.name} is dense and has no router; name a run with another model.router"
        )
    return trained


def check_comparable(trained: Trained, other: Trained) -> None:
    """Raise ValueError for models of different sizes or tokenizers."""
    names = f"{trained.config.run.name} and {other.config.run.name}"
    for key in select_model_keys("routing_shape"):
        mine = getattr(trained.config.model, key)
        theirs = getattr(other.config.model, key)
        if mine != theirs:
            raise ValueError(
                f"{names} cannot be compared: model.{key} is {mine} and {theirs}; "
                f"name a run with {mine}"
            )
    if trained.metadata["tokenizer"] != other.metadata["tokenizer"]:
        raise ValueError(f"{names} have different tokenizers; name another run")


def read_validation(
    trained: Trained, args: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray, str]:
    """Read the windows of --data and --windows: inputs and targets (W, T), and the set's name.

    They are those that training would validate on, of one set or of the mixture.
    """
    config = trained.config
    folders = config.data.folders
    weights = list(config.data.sets.values())
    if args.data:
        folder = Path(args.data)
        if not folder.is_dir():
            folder = Path(config.data.dir, args.data)
        folders = [folder]
        weights = [1.0]
    name = str(folders[0])
    if len(folders) > 1:
        name = config.data.label
    count = WINDOWS if args.windows is None else args.windows
    block_size = config.model.block_size
    sets = [open_set(trained, folder, "val") for folder in folders]
    chosen = choose_validation(sets, block_size, count, config.eval.spread, weights)
    inputs, targets = windows(chosen.tokens, chosen.windows, block_size)
    return inputs, targets, name


def check_trace_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that --trace or --replay would ignore."""
    names_text = args.data or args.windows is not None
    if args.other or (args.replay and names_text):
        raise ValueError(
            "--trace takes no --other, and --replay, whose text is the trace's, "
            "no --data or --windows"
        )


def save_trace(args: argparse.Namespace) -> None:
    """Write the file of --trace. Raises ValueError and OSError."""
    check_trace_arguments(args)
    trained = load_with_router(args.run, args.step, args)
    trained.model.to(set_up_device(args))
    inputs, targets, data = read_validation(trained, args)
    write_trace(args.trace, trained, np.concatenate([inputs, targets[:, -1:]], 1))
    print(f"{args.trace}: {inputs.size:,} tokens of {data}")


def replay_trace(args: argparse.Namespace) -> None:
    """Score the run with the experts of --replay and with its own; print and write the losses.

    Raises ValueError and OSError.
    """
    check_trace_arguments(args)
    trained = load_with_router(args.run, args.step, args)
    trained.model.to(set_up_device(args))
    trace = read_trace(args.replay, trained)
    own = trace_windows(trained.model, trace["tokens"])
    replayed = trace_windows(trained.model, trace["tokens"], trace["experts"])
    same = own["experts"][..., None] == trace["experts"][..., None, :]  # (L, N, K, K)
    same_choice = float(same.any(-1).mean())
    report = {
        "source": str(trace["source"]),
        "same_choice": same_choice,
        "source_loss": float(trace["losses"].mean()),  # nats per token, as the two below
        "replayed_loss": float(replayed["losses"].mean()),
        "loss": float(own["losses"].mean()),
    }
    folder = args.run / "eval" / trained.label
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"replay-{args.replay.stem}.json", json.dumps(report) + "\n")
    run = trained.config.run.name
    print(f"loss {report['source_loss']:.4f}  {report['source']}")
    print(f"loss {report['replayed_loss']:.4f}  {run} with those experts")
    print(f"loss {report['loss']:.4f}  {run} with its own, {same_choice:.0%} of them the same")


def print_measures(args: argparse.Namespace) -> None:
    """Measure the run, and its agreement with another; print tables and write routing.json.

    Raises ValueError and OSError.
    """
    device = set_up_device(args)
    trained = load_with_router(args.run, args.step, args)
    other = None
    if args.other:
        require_packages("scipy")
        other = load_with_router(args.other, None, args)
        check_comparable(trained, other)
    text, _, data = read_validation(trained, args)
    if len(text) < 2:
        raise ValueError(
            f"{data}: {len(text)} window, chance needs two; raise --windows or name a larger set"
        )
    other_model = other.model.to(device) if other else None
    counts, occurrences = count_routing(trained.model.to(device), other_model, text=text)

    model = trained.config.model
    layers = []
    for number, layer in enumerate(counts):
        layers.append(describe_layer(number, layer, occurrences))
    report: dict[str, Any] = {
        "run": trained.config.run.name,
        "step": trained.step,
        "mean": trained.mean,
        "data": data,
        "router": model.router,
        "top_k": model.top_k,
        "windows": len(text),
        "tokens": counts[0].tokens,
        "min_count": MIN_COUNT,
        "layers": [asdict(layer) for layer in layers],
    }
    folder = args.run / "eval" / trained.label / "routing"
    if other:
        other_name = other.config.run.name
        folder = folder.with_name(f"routing-{other_name}-{other.label}")
        report["other"] = f"{other_name}, {other.label}"
        report["agreement"] = []
        for number, layer in enumerate(counts):
            shares = compare_choices(layer.agreement.cpu().numpy(), model.top_k)
            report["agreement"].append({"layer": number, **shares})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "routing.json", json.dumps(report) + "\n")

    print(f"{text_table(*tabulate_layers(layers))}\n\n{COLUMNS_OF_LAYERS}\n")
    if other:
        table = text_table(*tabulate_agreement(report["agreement"]))
        print(f"agreement with {report['other']}\n{table}\n\n{COLUMNS_OF_AGREEMENT}\n")
    print(
        f"{report['tokens']:,} tokens; "
        f"a picture of the loads: python -m scripts.draw {folder}/routing.json"
    )


def tabulate_layers(layers: Sequence[LayerReport]) -> Table:
    """Make head and rows of a table with a line per layer; docs/traces.md explains the columns."""
    rows = []
    for layer in layers:
        row = {
            "layer": f"{layer.layer}",
            "busiest": f"{layer.load_imbalance:.2f}",
            "idle": f"{layer.dead_experts}",
            "in use": f"{math.exp(layer.load_entropy):.1f}",
            "per token": f"{math.exp(layer.entropy):.1f}",
            "zero gates": f"{layer.zero_gates:.2%}",
            "vocabulary": format_share(layer.vocabulary, layer.vocabulary_by_chance),
            "partner": format_share(layer.strongest_partner, layer.strongest_partner_by_chance),
        }
        rows.append(row)
    return list(rows[0]), [list(row.values()) for row in rows]


def tabulate_agreement(agreement: Sequence[dict[str, Any]]) -> Table:
    """Make head and rows of the table of how far two models agree, one line per layer."""
    rows = []
    for layer in agreement:
        matched = layer["matched"]
        chance = layer["matched_by_chance"]
        beyond = f"{(matched - chance) / (1 - chance):.2f}" if chance < 1 else "-"
        same_number = format_share(layer["same_number"], layer["same_number_by_chance"])
        rows.append([f"{layer['layer']}", same_number, format_share(matched, chance), beyond])
    return ["layer", "same number", "matched", "beyond chance"], rows


def format_share(measured: float, by_chance: float) -> str:
    """Format a share with its chance level in brackets."""
    return f"{measured:.0%} ({by_chance:.0%})"


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("eval.routing", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--other", type=Path, metavar="RUN", help="a run to compare with, at its last step")
    add("--data", metavar="SET", help="a prepared set, folder or name (default: the run's own)")
    add("--windows", type=int, help=f"of block_size tokens (default: {WINDOWS})")
    trace = parser.add_mutually_exclusive_group().add_argument
    trace(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write each token's experts and gates (docs/traces.md)",
    )
    trace("--replay", type=Path, metavar="FILE", help="score the run with the experts of a trace")
    add_device_argument(parser)
    args = parser.parse_args(argv)
    if args.windows is not None and args.windows < 1:
        raise ValueError(f"--windows {args.windows}: expected 1 or more")
    if args.trace:
        save_trace(args)
    elif args.replay:
        replay_trace(args)
    else:
        print_measures(args)


if __name__ == "__main__":
    run_command(main)
