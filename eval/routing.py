"""Measure what the experts of a trained run do, layer by layer, over fixed validation windows.

    python -m eval.routing runs/A                              loads, pairs, tokens
    python -m eval.routing runs/A --trace FILE.npz             each token's experts and gates

Prints a table and writes routing.json to runs/NAME/eval/step_…/routing. An earlier file there is
replaced. Computed in float32.

Co-activation and vocabulary specialization follow OLMoE (arXiv 2409.02060, Sec. 5). For its chance
level each is measured again with expert choices shuffled across windows. The shuffle keeps how
often each token and each expert occurs, and removes how they are related.

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
    find_set,
    load_model,
    open_set,
)
from model import GPT
from router import Routing
from runtime import distributed

MIN_COUNT = 10  # occurrences; the choices of a rarer token are mostly noise (not measured)

# {column: its format of the values in routing.json}
COLUMNS = {
    "layer": "{layer}",
    "busiest": "{load_imbalance:.2f}",
    "idle": "{dead_experts}",
    "in use": "{in_use:.1f}",
    "per token": "{per_token:.1f}",
    "zero gates": "{zero_gates:.2%}",
    "vocabulary": "{vocabulary:.0%} ({vocabulary_by_chance:.0%})",
    "partner": "{strongest_partner:.0%} ({strongest_partner_by_chance:.0%})",
}
ABOUT = """\
busiest: highest over mean load    idle: experts without a token
in use: experts by the entropy of loads, per token: by that of a token's scores
zero gates: share of gates that are 0
vocabulary: share of a token's occurrences that its most frequent expert has
partner: share of an expert's tokens that its most frequent partner has
(in brackets: by chance, of choices shuffled across windows; partner: of choices by load)"""


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


def count_pairs(experts: np.ndarray, n_expert: int) -> np.ndarray:
    """Count the tokens that chose both expert i and expert j, (E, E).

    Args:
        experts: (N, K), chosen, N < 2²⁴: the counts are exact in float32.
        n_expert: E.
    """
    chose = np.zeros((len(experts), n_expert), np.float32)
    np.put_along_axis(chose, experts.astype(np.int64), 1, 1)
    return (chose.T @ chose).astype(np.int64)


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

    `vocabulary_by_chance` is counted with shuffled choices, `strongest_partner_by_chance` follows
    from the loads.
    """
    experts = trace.experts[layer]  # (N, K)
    together = count_pairs(experts, n_expert)
    loads = together.diagonal()
    shares = loads / loads.sum()
    load_entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum()
    # an expert's tokens have K - 1 other experts, chosen in proportion to their loads
    of_others = np.maximum(loads.sum() - loads, 1)[:, None]
    by_chance = np.minimum((experts.shape[1] - 1) * loads / of_others, 1)
    np.fill_diagonal(by_chance, 1)
    by_chance[loads == 0] = 0
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
    """Measure the run; print a table and write routing.json. Raises ValueError and OSError."""
    tokens, data = read_validation(trained, args)
    text = tokens[:, :-1]
    if len(text) < 2:
        raise ValueError(
            f"{data}: {len(text)} window, chance needs two; raise --windows or name a larger set"
        )
    trace = trace_windows(trained.model, tokens)
    E = trained.config.model.n_expert
    layers = []
    for i in range(len(trace.experts)):
        layers.append({"layer": i} | measure_layer(text, trace, i, E))
    report = {
        "run": trained.config.run.name,
        "step": trained.step,
        "data": data,
        "tokens": text.size,
        "layers": layers,
    }
    # docs/traces.md explains the columns
    rows = [[form.format(**layer) for form in COLUMNS.values()] for layer in layers]
    print(f"{text_table(list(COLUMNS), rows)}\n\n{ABOUT}\n")
    folder = args.run / "eval" / trained.label / "routing"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "routing.json", json.dumps(report) + "\n")
    print(f"{text.size:,} tokens; {folder}/routing.json")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("eval.routing", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--data", metavar="SET", help="a prepared set, folder or name (default: the run's own)")
    add("--windows", type=int, default=64, help="of block_size tokens (default: %(default)s)")
    trace = "write each token's experts and gates (docs/traces.md)"
    add("--trace", type=Path, metavar="FILE", help=trace)
    add_device_argument(parser)
    args = parser.parse_args(argv)
    if args.windows < 1:
        raise ValueError(f"--windows {args.windows}: expected 1 or more")
    trained = load_model(args.run, args.step, args.ema)
    if not find_routers(trained.model):
        raise ValueError(
            f"{trained.config.run.name} is dense and has no router; "
            f"name a run with another model.router"
        )
    trained.model.to(distributed.pick_device(args.device))
    if args.trace:
        tokens, data = read_validation(trained, args)
        write_trace(args.trace, trained, tokens)
        print(f"{args.trace}: {tokens[:, 1:].size:,} tokens of {data}")
    else:
        print_measures(trained, args)


if __name__ == "__main__":
    run_command(main)
