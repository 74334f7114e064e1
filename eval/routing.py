"""Measure what the experts of a trained run do, layer by layer, over fixed validation windows.

    python -m eval.routing runs/A                              loads, pairs, tokens
    python -m eval.routing runs/A --other runs/B               and where two runs agree
    python -m eval.routing runs/A --other runs/A --checkpoint 500    or one run's checkpoints
    python -m eval.routing runs/A --trace FILE.npz             each token's experts and gates

Prints tables and writes routing.json to runs/NAME/eval/step_…/routing (routing-OTHER for two runs).
An earlier file there is replaced. Computed in float32.

Co-activation, vocabulary specialization and router saturation follow OLMoE (arXiv 2409.02060,
Sec. 5). For its chance level each is measured again with expert choices shuffled across windows.
The shuffle keeps how often each token and each expert occurs, and removes how they are related.

Shapes: W windows of T tokens, N = W·T tokens, L layers with experts, E experts, K chosen per token.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m eval.routing")

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.command import build_parser, command, run_command
from common.files import write_atomic
from common.measures import MEASURES
from common.text import text_table
from data.loader import choose_validation
from data.tokenizer import Tokenizer
from eval.generation import encode_prompt
from eval.traces import Trace, find_routers, record_decisions, trace_windows, write_trace
from eval.trained import (
    Trained,
    add_device_argument,
    add_run_arguments,
    check_comparable,
    find_set,
    load_model,
    open_set,
)
from model import GPT
from router import Routing
from runtime import distributed

MIN_COUNT = 10  # occurrences; the choices of a rarer token are mostly noise (not measured)
COMPARED = ["n_layer", "block_size", "n_expert", "top_k"]  # equal in both models

# {column: its format of the values in routing.json}
COLUMNS_OF_LAYERS = {
    "layer": "{layer}",
    "busiest": "{load_imbalance:.2f}",
    "idle": "{dead_experts}",
    "in use": "{in_use:.1f}",
    "per token": "{per_token:.1f}",
    "zero gates": "{zero_gates:.2%}",
    "vocabulary": "{vocabulary:.0%} ({vocabulary_by_chance:.0%})",
    "partner": "{strongest_partner:.0%} ({strongest_partner_by_chance:.0%})",
}
COLUMNS_OF_AGREEMENT = {
    "layer": "{layer}",
    "same number": "{same_number:.0%} ({same_number_by_chance:.0%})",
    "matched": "{matched:.0%} ({matched_by_chance:.0%})",
}
ABOUT_LAYERS = """\
busiest: highest over mean load    idle: experts without a token
in use: experts by the entropy of loads, per token: by that of a token's scores
zero gates: share of gates that are 0
vocabulary: share of a token's occurrences that its most frequent expert has
partner: share of an expert's tokens that its most frequent partner has
(in brackets: the same of choices shuffled across windows)"""
ABOUT_AGREEMENT = """\
same number: share of a token's experts with equal numbers in both runs
matched: the same after the best renumbering of experts (in brackets: by chance)"""


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


def shuffled_baseline(x: np.ndarray) -> np.ndarray:
    """Move each value of x (W, T, ...) to the next window and to a permuted position."""
    order = np.random.default_rng(1).permutation(x.shape[1])
    return np.roll(x, 1, 0)[:, order]


def count_pairs(mine: np.ndarray, theirs: np.ndarray, n_expert: int) -> np.ndarray:
    """Count the tokens that chose expert i in `mine` and j in `theirs`, (E, E).

    Args:
        mine: (N, K), chosen experts, N < 2²⁴: the counts are exact in float32.
        theirs: (N, K), of the same tokens.
        n_expert: E.
    """
    chose = np.zeros((2, len(mine), n_expert), np.float32)
    np.put_along_axis(chose[0], mine.astype(np.int64), 1, 1)
    np.put_along_axis(chose[1], theirs.astype(np.int64), 1, 1)
    return (chose[0].T @ chose[1]).astype(np.int64)


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


def measure_vocabulary(text: np.ndarray, experts: np.ndarray, n_expert: int) -> float:
    """Measure how far a token's id decides: the share that its most frequent expert has.

    Args:
        text: (W, T) token ids.
        experts: (N, K), chosen for them.
        n_expert: E.

    Returns:
        The share of an id's occurrences, averaged over ids that occur MIN_COUNT times.

    Raises:
        ValueError: no id does.
    """
    _, numbers, occurrences = np.unique(text, return_inverse=True, return_counts=True)
    common = occurrences >= MIN_COUNT
    if not common.any():
        raise ValueError(
            f"no token occurs {MIN_COUNT} times among {text.size:,} tokens; raise --windows"
        )
    cells = numbers.reshape(-1, 1) * n_expert + experts  # (N, K)
    choices = np.bincount(cells.ravel(), minlength=len(occurrences) * n_expert)
    most = choices.reshape(-1, n_expert).max(1)
    return float((most / occurrences)[common].mean())


def measure_layer(text: np.ndarray, trace: Trace, layer: int, n_expert: int) -> dict[str, Any]:
    """Measure what one layer chose for `text` (W, T); a layer's entry of routing.json.

    Measures that end in `_by_chance` are counted with shuffled choices.
    """
    experts = trace.experts[layer]  # (N, K)
    together = count_pairs(experts, experts, n_expert)
    loads = together.diagonal()
    shares = loads / loads.sum()
    load_entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum()
    by_chance = np.broadcast_to(loads / len(experts), together.shape)
    of_loads = {}
    for name, measure in MEASURES.items():
        if measure.of_loads:
            of_loads[name] = measure.of_loads(torch.from_numpy(loads.copy())[None]).item()
    return of_loads | {
        "loads": loads.tolist(),
        "in_use": math.exp(load_entropy),
        "per_token": math.exp(trace.entropy[layer]),
        "zero_gates": float((trace.gates[layer] == 0).mean()),
        "strongest_partner": mean_strongest(together / np.maximum(loads, 1)[:, None]),
        "strongest_partner_by_chance": mean_strongest(by_chance),
        "vocabulary": measure_vocabulary(text, experts, n_expert),
        "vocabulary_by_chance": measure_vocabulary(shuffled_baseline(text), experts, n_expert),
    }


def compare_choices(mine: np.ndarray, theirs: np.ndarray, n_expert: int) -> dict[str, float]:
    """Measure how far two models agree in one layer.

    Args:
        mine: (W, T, K), chosen experts.
        theirs: (W, T, K), of the other model.
        n_expert: E.

    Returns:
        `same_number`, the share of a token's experts with equal numbers in both; `matched`, the
        same after the best one-to-one renumbering of the other model's experts; and both with
        `_by_chance`.
    """
    from scipy.optimize import linear_sum_assignment

    K = mine.shape[2]
    shares = {}
    for other, suffix in ((theirs, ""), (shuffled_baseline(theirs), "_by_chance")):
        counts = count_pairs(mine.reshape(-1, K), other.reshape(-1, K), n_expert)
        matched = counts[linear_sum_assignment(counts, maximize=True)]
        shares[f"same_number{suffix}"] = float(counts.trace() / mine.size)
        shares[f"matched{suffix}"] = float(matched.sum() / mine.size)
    return shares


def load_with_router(folder: Path, step: int | None, args: argparse.Namespace) -> Trained:
    """Load a run's model, or with --ema its EMA. Raises ValueError if it is dense."""
    trained = load_model(folder, step, args.ema)
    if not find_routers(trained.model):
        raise ValueError(
            f"{trained.config.run.name} is dense and has no router; "
            f"name a run with another model.router"
        )
    return trained


def read_validation(trained: Trained, args: argparse.Namespace) -> tuple[np.ndarray, str]:
    """Read the windows of --data and --windows with their targets (W, T + 1), and the set's name.

    They are those that training would validate on, of one set or of the mixture.
    """
    data = trained.config.data
    if args.data:
        folders = [find_set(trained, args.data) or Path(args.data)]
        weights = [1.0]
        name = str(folders[0])
    else:
        folders = data.folders
        weights = list(data.sets.values())
        name = data.label
    block_size = trained.config.model.block_size
    sets = [open_set(trained, folder, "val") for folder in folders]
    chosen = choose_validation(sets, block_size, args.windows, weights)
    inputs, targets = chosen.source.read(chosen.windows)
    return np.concatenate([inputs, targets[:, -1:]], 1), name


def print_measures(trained: Trained, args: argparse.Namespace) -> None:
    """Measure the run, and its agreement with another; print tables and write routing.json.

    Raises ValueError and OSError.
    """
    other = None
    if args.other:
        other = load_with_router(args.other, None, args)
        check_comparable(trained, other, COMPARED, ["tokenizer"])
    tokens, data = read_validation(trained, args)
    text = tokens[:, :-1]
    if len(text) < 2:
        raise ValueError(
            f"{data}: {len(text)} window, chance needs two; raise --windows or name a larger set"
        )
    trace = trace_windows(trained.model, tokens)
    E = trained.config.model.n_expert
    numbers = range(len(trace.experts))
    report: dict[str, Any] = {
        "run": trained.config.run.name,
        "step": trained.step,
        "data": data,
        "tokens": text.size,
        "layers": [{"layer": i} | measure_layer(text, trace, i, E) for i in numbers],
    }
    folder = args.run / "eval" / trained.label / "routing"
    print(f"{tabulate(report['layers'], COLUMNS_OF_LAYERS)}\n\n{ABOUT_LAYERS}\n")
    if other:
        name = other.config.run.name
        folder = folder.with_name(f"routing-{name}-{other.label}")
        theirs = trace_windows(other.model.to(trained.model.head.device), tokens)
        layers = []
        for i in numbers:
            mine, others = [t.experts[i].reshape(*text.shape, -1) for t in (trace, theirs)]
            layers.append({"layer": i} | compare_choices(mine, others, E))
        report |= {"other": f"{name}, {other.label}", "agreement": layers}
        table = tabulate(layers, COLUMNS_OF_AGREEMENT)
        print(f"agreement with {report['other']}\n{table}\n\n{ABOUT_AGREEMENT}\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "routing.json", json.dumps(report) + "\n")
    print(f"{text.size:,} tokens; {folder}/routing.json")


def tabulate(layers: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """A table with a line per layer; docs/traces.md explains the columns."""
    rows = [[form.format(**layer) for form in columns.values()] for layer in layers]
    return text_table(list(columns), rows)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("eval.routing", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--data", metavar="SET", help="a prepared set, folder or name (default: the run's own)")
    add("--windows", type=int, default=64, help="of block_size tokens (default: %(default)s)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--other", type=Path, metavar="RUN", help="a run to compare with, at its last step")
    trace = "write each token's experts and gates (docs/traces.md)"
    add("--trace", type=Path, metavar="FILE", help=trace)
    add_device_argument(parser)
    args = parser.parse_args(argv)
    if args.windows < 1:
        raise ValueError(f"--windows {args.windows}: expected 1 or more")
    trained = load_with_router(args.run, args.step, args)
    trained.model.to(distributed.pick_device(args.device))
    if args.trace:
        tokens, data = read_validation(trained, args)
        write_trace(args.trace, trained, tokens)
        print(f"{args.trace}: {tokens[:, 1:].size:,} tokens of {data}")
    else:
        print_measures(trained, args)


if __name__ == "__main__":
    run_command(main)
