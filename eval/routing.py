"""What the experts of a trained run do, layer by layer, over fixed validation windows.

    python -m eval.routing runs/quickstart-kern                                   loads, pairs, tokens
    python -m eval.routing runs/quickstart-kern --other runs/quickstart-softmax   and where two runs agree
    python -m eval.routing runs/quickstart-kern --other-checkpoint 500            or two checkpoints of one run
    python -m eval.routing runs/quickstart-softmax --trace FILE.npz               each token's experts and gates
    python -m eval.routing runs/quickstart-kern --replay FILE.npz                 the loss with those experts
    python -m eval.routing runs/quickstart-kern --text "for i in range(3):"       experts and gates of each token

Prints tables and writes routing.json to runs/NAME/eval/step_…/routing (routing-OTHER for two),
replacing that of an earlier call; `python -m scripts.draw FILE` draws the loads. Computed in
float32. A comparison needs requirements-report.txt.

Co-activation, vocabulary specialization and router saturation are those of OLMoE (arXiv 2409.02060,
Sec. 5). The chance level is measured too: everything is counted a second time with each token's
choices taken from another token of another window. That keeps how often each token and each expert
occurs, and removes how they are related.

Shapes: N tokens, E experts, K chosen per token, U tokens of the vocabulary that are common enough
to be counted one by one.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from balance import entropy, expert_loads, token_distribution
from common.command import build_parser, command, require_packages, run_command
from common.files import write_atomic
from common.progress import progress_bar
from common.text import text_table
from configure.schema import select_model_keys
from data.loader import choose_validation, windows
from data.tokenizer import Tokenizer
from eval.generation import begin_document
from eval.traces import read_trace, record_decisions, trace_windows, write_trace
from eval.trained import (
    Trained,
    add_device_argument,
    add_run_arguments,
    load_run,
    open_set,
    pick_device,
)
from model import GPT
from router import Routing, find_spec

MIN_COUNT = 10  # rarer tokens say little about where such tokens go
# approximate; at least two windows, since chance takes choices from another window of the batch
BATCH_TOKENS = 4096
SHOWN = 8  # tokens per expert
# Nats per token: a trace's, of a model with its experts, with its own.
LOSSES = ("source_loss", "replayed_loss", "loss")

Described = dict[str, Any]


class LayerCounts:
    """Sums over the tokens of one layer.

    Attributes:
        tokens: N.
        together: (E, E) int64, tokens that chose both experts; the diagonal holds the loads.
        by_token: (2, U + 1, E) int32, choices by [measured, by chance], token, expert. The last row
            of tokens holds all rare ones.
        agreement: (2, E, E) int64, tokens that chose expert i here and j in the other model,
            [measured, by chance].
        entropy: summed over tokens, nats.
        zero_gates: gates that are exactly 0.
    """

    def __init__(self, n_expert: int, n_rows: int, device: torch.device) -> None:
        self.tokens = 0
        self.together = torch.zeros(n_expert, n_expert, dtype=torch.int64, device=device)
        self.by_token = torch.zeros(2, n_rows, n_expert, dtype=torch.int32, device=device)
        self.agreement = torch.zeros(2, n_expert, n_expert, dtype=torch.int64, device=device)
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        self.zero_gates = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, routing: Routing, rows: Tensor, other: Routing | None = None) -> None:
        """Add the routing of B windows of T tokens, N = B·T, and the other model's routing of the same windows.

        `rows` (B, T) int64 has each token's row in `by_token`.
        """
        N, E = routing.scores.shape
        self.tokens += N
        self.together += count_pairs(routing.experts, routing.experts, E)
        self.entropy += N * entropy(token_distribution(routing))
        self.zero_gates += (routing.weights == 0).sum()
        for table, places in zip(self.by_token, (rows, shuffled_baseline(rows)), strict=True):
            cells = places.flatten()[:, None] * E + routing.experts  # (N, K)
            table += expert_loads(cells, table.numel()).view_as(table)
        if other is not None:
            theirs = other.experts.view(*rows.shape, -1)  # (B, T, K)
            for counts, chosen in zip(
                self.agreement, (theirs, shuffled_baseline(theirs)), strict=True
            ):
                counts += count_pairs(routing.experts, chosen.flatten(0, 1), E)


def count_pairs(mine: Tensor, theirs: Tensor, n_expert: int) -> Tensor:
    """(N, K) chosen experts of the same tokens, twice, N < 2²⁴ -> (E, E) int64, the tokens that chose i and j."""
    one, other = (
        torch.zeros(len(e), n_expert, device=e.device).scatter_(1, e, 1) for e in (mine, theirs)
    )
    return (one.T @ other).long()


def shuffled_baseline(x: Tensor) -> Tensor:
    """(B, T, ...) -> the same values, each moved to another window and, in all windows alike, to another position."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    return x.roll(1, 0)[:, order.to(x.device)]


def record_routing(model: GPT, idx: Tensor) -> list[Routing]:
    """Run tokens `idx` (B, T) through the model and return what the router of each layer decides."""
    with record_decisions(model) as decisions:
        model.hidden(idx)
    return decisions


@torch.no_grad()
def route_text(model: GPT, tokenizer: Tokenizer, text: str) -> tuple[list[str], Tensor, Tensor]:
    """Run a text, the beginning of a document, through a model.

    Returns:
        Its T tokens; the experts that each of L layers with experts chooses for them (L, T, K)
        int64, by descending score; and their gates (L, T, K).

    Raises:
        ValueError: the text is longer than block_size, or the model is dense.
    """
    ids = begin_document(tokenizer, text, model.config.block_size)
    decisions = record_routing(model, torch.tensor([ids], device=model.head.device))
    if not decisions:
        raise ValueError("a dense model has no router: load a run with another model.router")
    experts = torch.stack([layer.experts[1:] for layer in decisions])
    gates = torch.stack([layer.weights[1:] for layer in decisions])
    return [tokenizer.decode([i]) for i in ids[1:]], experts.cpu(), gates.cpu()


@torch.no_grad()
def count_routing(
    model: GPT, other: GPT | None = None, *, text: np.ndarray
) -> tuple[list[LayerCounts], np.ndarray, np.ndarray]:
    """Run windows `text` (W, T) int64, two or more, through a model and the one to compare it with.

    Returns:
        The counts of each layer with experts; the ids (U,) of the tokens counted one by one, the
        most common first; and how often each of them occurs (U,).

    Raises:
        ValueError: no token occurs MIN_COUNT times.
    """
    config, device = model.config, model.head.device
    batches = np.array_split(text, max(1, min(len(text) // 2, text.size // BATCH_TOKENS)))
    seen = np.bincount(text.ravel(), minlength=config.vocab_size)
    ids = np.argsort(-seen, kind="stable")[: (seen >= MIN_COUNT).sum()]
    if not len(ids):
        raise ValueError(
            f"no token occurs {MIN_COUNT} times among {seen.sum():,} tokens; raise --windows"
        )
    row_of = torch.full((len(seen),), len(ids))
    row_of[torch.from_numpy(ids)] = torch.arange(len(ids))
    n_layer = config.n_layer - config.n_dense_layer  # with experts
    layers = [LayerCounts(config.n_expert, len(ids) + 1, device) for _ in range(n_layer)]
    for batch in progress_bar(iterable=batches, desc="windows", leave=False):
        idx = torch.from_numpy(batch)
        mine = record_routing(model, idx.to(device))
        theirs = record_routing(other, idx.to(device)) if other else [None] * len(mine)
        for counts, routing, others in zip(layers, mine, theirs, strict=True):
            counts.add(routing, row_of[idx].to(device), others)
    return layers, ids, seen[ids]


def mean_strongest(shares: np.ndarray) -> float:
    """Mean over experts of the largest share (E, E) of an expert's tokens that chose another one too: co-activation.

    Experts without tokens, whose shares are all 0, do not count.
    """
    largest = np.where(np.eye(len(shares), dtype=bool), 0, shares).max(1)
    return float(largest[shares.any(1)].mean())


def divergence_from_text(rows: np.ndarray) -> np.ndarray:
    """Choices by token (U + 1, E) -> (E,) nats, KL divergence of an expert's tokens from the tokens of the text.

    Σ_x P(x|e) ln(P(x|e) / P(x)); 0 for an expert without tokens.
    """
    of_expert, of_text = rows / np.maximum(rows.sum(0), 1), rows.sum(1, keepdims=True) / rows.sum()
    ratio = of_expert / np.maximum(of_text, 1e-300)  # 0 for a token that does not occur
    return (of_expert * np.log(np.where(ratio > 0, ratio, 1))).sum(0)


def compare_choices(agreement: np.ndarray, top_k: int) -> Described:
    """Agreement of two models in one layer, from (2, E, E) tokens that chose i and j, measured and by chance.

    `same_number` is the share of a token's experts with equal numbers in both; `matched` the same
    after the best one-to-one renumbering of the other model's experts.
    """
    from scipy.optimize import linear_sum_assignment

    layer: Described = {}
    for counts, suffix in zip(agreement, ("", "_by_chance"), strict=True):
        layer[f"same_number{suffix}"] = float(counts.trace() * top_k / counts.sum())
        matched = counts[linear_sum_assignment(counts, maximize=True)]
        layer[f"matched{suffix}"] = float(matched.sum() * top_k / counts.sum())
    return layer


def describe_layer(
    counts: LayerCounts, ids: np.ndarray, seen: np.ndarray, tokenizer: Tokenizer
) -> Described:
    """The layer's entry of routing.json; `ids` and `seen` (U,) as `count_routing` returns them."""
    together, N = counts.together.cpu().numpy(), counts.tokens
    by_token, by_chance = counts.by_token.cpu().numpy()  # (U + 1, E) each
    loads = together.diagonal()
    layer: Described = {
        "loads": loads,
        "load_imbalance": loads.max() / loads.mean(),
        "dead_experts": (loads == 0).sum(),
        "load_entropy": torch.special.entr(torch.from_numpy(loads / loads.sum())).sum().item(),
        "entropy": counts.entropy.item() / N,
        "zero_gates": counts.zero_gates.item() / loads.sum(),
        "strongest_partner": mean_strongest(together / np.maximum(loads, 1)[:, None]),
        "strongest_partner_by_chance": mean_strongest(np.broadcast_to(loads / N, together.shape)),
        # a token's share in its most frequent expert
        "vocabulary": (by_token[:-1].max(1) / seen).mean(),
        "vocabulary_by_chance": (by_chance[:-1].max(1) / seen).mean(),
    }
    # (E, 2)
    nats = np.stack([divergence_from_text(by_token), divergence_from_text(by_chance)], 1).tolist()
    layer["experts"] = [
        {
            "nats": own,
            "nats_by_chance": chance,
            "tokens": find_tokens(chose, ids, seen, N, tokenizer),
        }
        for (own, chance), chose in zip(nats, by_token.T, strict=True)
    ]
    return json.loads(json.dumps(layer, default=lambda array: array.tolist()))  # no NumPy types


def find_tokens(
    chose: np.ndarray, ids: np.ndarray, seen: np.ndarray, N: int, tokenizer: Tokenizer
) -> list[Described]:
    """The tokens that add most to an expert's divergence from the text, from how often each `chose` it (U + 1,).

    `share` is of the expert's load, `lift` that over the token's share of the text.
    """
    chose, load = chose[:-1], max(1, chose.sum())
    lift = chose / load / (seen / N)
    gain = chose * np.log(np.maximum(lift, 1))
    return [
        {
            "id": ids[row],
            "text": tokenizer.decode([ids[row]]),
            "share": chose[row] / load,
            "lift": lift[row],
        }
        for row in np.argsort(-gain, kind="stable")[:SHOWN]
        if gain[row] > 0
    ]


def load_models(args: argparse.Namespace) -> tuple[list[Trained], Tokenizer]:
    """The run and, if asked for, the one to compare it with. Raises ValueError."""
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    models = [trained]
    if args.other or args.other_checkpoint is not None:
        require_packages("scipy")
        models.append(
            load_run(args.other or args.run, args.other_checkpoint, args.average, args.ema)[0]
        )
    for model in models:
        name = model.config.run.name
        if find_spec(model.config.model.router) is None:
            raise ValueError(
                f"{name} is dense and has no router; name a run with another model.router"
            )
        for key in select_model_keys("routing_shape"):
            mine, theirs = getattr(trained.config.model, key), getattr(model.config.model, key)
            if mine != theirs:
                raise ValueError(
                    f"{trained.config.run.name} and {name} cannot be compared: model.{key} is {mine} and {theirs}; "
                    f"name a run with {mine}"
                )
        if trained.metadata["tokenizer"] != model.metadata["tokenizer"]:
            raise ValueError(
                f"{trained.config.run.name} and {name} have different tokenizers; name another run"
            )
    return models, tokenizer


def open_text(trained: Trained, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, str]:
    """The windows that --data and --windows ask for, inputs and targets (W, T), and the set's name."""
    config, folders = trained.config, trained.config.data.folders
    if args.data:
        folders = [
            Path(args.data) if Path(args.data).is_dir() else Path(config.data.dir, args.data)
        ]
    parts, T = [open_set(trained, folder, "val") for folder in folders], config.model.block_size
    weights, name = (
        ([1.0], str(folders[0]))
        if len(parts) == 1
        else ([*config.data.sets.values()], config.data.label)
    )
    count = 64 if args.windows is None else args.windows
    chosen = choose_validation(parts, T, count, config.eval.spread, weights)
    return *windows(chosen.tokens, chosen.windows, T), name


def trace_routing(args: argparse.Namespace) -> None:
    """Do what --trace or --replay asks for. Raises ValueError and OSError."""
    if (
        args.other
        or args.other_checkpoint is not None
        or (args.replay and (args.data or args.windows is not None))
    ):
        raise ValueError(
            "--trace takes no --other, and --replay, whose text is the trace's, no --data or --windows"
        )
    (trained,), _ = load_models(args)
    trained.model.to(pick_device(args))
    if args.trace:
        inputs, targets, data = open_text(trained, args)
        write_trace(args.trace, trained, np.concatenate([inputs, targets[:, -1:]], 1))
        return print(f"{args.trace}: {inputs.size:,} tokens of {data}")
    trace, run = read_trace(args.replay, trained), trained.config.run.name
    own = trace_windows(trained.model, trace["tokens"])
    replayed = trace_windows(trained.model, trace["tokens"], trace["experts"])
    same = (own["experts"][..., None] == trace["experts"][..., None, :]).any(-1).mean()
    report = {"source": str(trace["source"]), "same_choice": float(same)}
    report |= {
        key: float(part["losses"].mean())
        for key, part in zip(LOSSES, (trace, replayed, own), strict=True)
    }
    folder = args.run / "eval" / trained.label
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"replay-{args.replay.stem}.json", json.dumps(report) + "\n")
    names = (
        report["source"],
        f"{run} with those experts",
        f"{run} with its own, {same:.0%} of them the same",
    )
    print(
        "\n".join(
            f"loss {report[key]:.4f}  {name}" for key, name in zip(LOSSES, names, strict=True)
        )
    )


def measure_routing(args: argparse.Namespace) -> tuple[Described, Path]:
    """The content of routing.json, and the folder it belongs in. Raises ValueError and OSError."""
    device = pick_device(args)
    models, tokenizer = load_models(args)
    trained, *others = models
    config = trained.config
    text, _, data = open_text(trained, args)
    if len(text) < 2:
        raise ValueError(
            f"{data}: {len(text)} window, chance needs two; raise --windows or name a larger set"
        )
    layers, ids, seen = count_routing(*(model.model.to(device) for model in models), text=text)
    numbered = list(enumerate(layers, config.model.n_dense_layer))
    report: Described = {
        "run": config.run.name,
        "step": trained.step,
        "mean": trained.mean,
        "data": data,
    }
    report |= {"router": config.model.router, "top_k": config.model.top_k, "windows": len(text)}
    report |= {"tokens": layers[0].tokens, "min_count": MIN_COUNT}
    report["layers"] = [
        {"layer": n} | describe_layer(layer, ids, seen, tokenizer) for n, layer in numbered
    ]
    for other in others:
        report["other"] = f"{other.config.run.name}, {other.label}"
        report["agreement"] = [
            {"layer": n} | compare_choices(layer.agreement.cpu().numpy(), config.model.top_k)
            for n, layer in numbered
        ]
    name = "-".join(["routing", *(f"{other.config.run.name}-{other.label}" for other in others)])
    return report, args.run / "eval" / trained.label / name


def summarize_layers(report: Described) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of one line per layer; docs/traces.md explains the columns."""
    rows = []
    for layer in report["layers"]:
        row = [f"{layer['layer']}", f"{layer['load_imbalance']:.2f}", f"{layer['dead_experts']}"]
        row += [f"{math.exp(layer['load_entropy']):.1f}", f"{math.exp(layer['entropy']):.1f}"]
        row.append(f"{layer['zero_gates']:.2%}")
        rows.append(
            [*row, *(_with_chance(layer, key) for key in ("vocabulary", "strongest_partner"))]
        )
    return [
        "layer",
        "busiest",
        "idle",
        "in use",
        "per token",
        "zero gates",
        "vocabulary",
        "partner",
    ], rows


def summarize_text(
    tokens: list[str], experts: Tensor, gates: Tensor
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of what `route_text` returns."""
    rows = [[repr(token)] for token in tokens]
    for layer in zip(experts.tolist(), gates.tolist(), strict=True):
        for row, chosen, weights in zip(rows, *layer, strict=True):
            row.append("  ".join(f"{e:>3} ({g:.2f})" for e, g in zip(chosen, weights, strict=True)))
    return ["token", *("expert (gate)" for _ in experts)], rows


def summarize_agreement(report: Described) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of how far two models agree, one line per layer."""
    rows = []
    for layer in report["agreement"]:
        chance = layer["matched_by_chance"]
        beyond = f"{(layer['matched'] - chance) / (1 - chance):.2f}" if chance < 1 else "-"
        rows.append(
            [
                f"{layer['layer']}",
                _with_chance(layer, "same_number"),
                _with_chance(layer, "matched"),
                beyond,
            ]
        )
    return ["layer", "same number", "matched", "beyond chance"], rows


def _with_chance(layer: Described, key: str) -> str:
    return f"{layer[key]:.0%} ({layer[f'{key}_by_chance']:.0%})"


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("eval.routing", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--other", type=Path, metavar="RUN", help="a run to compare with")
    add(
        "--other-checkpoint",
        type=int,
        metavar="STEP",
        help="of --other, or of the run itself (default: the last)",
    )
    add("--data", metavar="SET", help="a prepared set, folder or name (default: the run's own)")
    add("--windows", type=int, help="of block_size tokens (default: 64)")
    trace = parser.add_mutually_exclusive_group().add_argument
    trace(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write each token's experts and gates (docs/traces.md)",
    )
    trace("--replay", type=Path, metavar="FILE", help="score the run with the experts of a trace")
    add("--text", help="print where its tokens go, and nothing else")
    add_device_argument(parser)
    args = parser.parse_args(argv)
    if args.text is not None:
        trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
        return print(text_table(*summarize_text(*route_text(trained.model, tokenizer, args.text))))
    if args.trace or args.replay:
        return trace_routing(args)
    report, folder = measure_routing(args)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "routing.json", json.dumps(report) + "\n")
    print(f"{text_table(*summarize_layers(report))}\n")
    if "agreement" in report:
        print(f"agreement with {report['other']}\n{text_table(*summarize_agreement(report))}\n")
    print(
        f"{report['tokens']:,} tokens; a picture of the loads: python -m scripts.draw {folder}/routing.json"
    )


if __name__ == "__main__":
    run_command(main)
