"""What a trained run's experts do, layer by layer, over fixed validation windows.

    python -m eval.routing runs/quickstart-kern                                   loads, partners, tokens, gates
    python -m eval.routing runs/quickstart-kern --other runs/quickstart-softmax   and where two runs agree
    python -m eval.routing runs/quickstart-kern --other-checkpoint 500            or two checkpoints of one run

Writes routing.md, routing.html, routing.json and pictures into runs/NAME/eval/step_…/routing (-OTHER, where there is
one), over those of an earlier call. All in float32, in memory that does not grow with --windows.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from data.bins import check, fingerprint, open_tokens, read_meta
from data.loader import count_windows, fixed_windows
from eval.pages import markdown, write
from eval.routing.counts import MIN_COUNT, compare, count, describe
from eval.routing.pictures import draw, visible
from eval.trained import add_run_arguments, load_run
from router import ROUTERS
from runtime import distributed

ALIKE = ("n_layer", "n_expert", "top_k", "block_size")  # without which two models cannot be compared
EXPERTS = 5  # of a layer in the table of tokens
LEAST_LOAD = 0.1  # of the mean, of an expert in it: fewer tokens differ from the text's by chance
TOKENS = 6  # of an expert
PAIRS = 5
MARKS = str.maketrans({"*": "∗", "`": "ˋ"})  # which the page takes for its own marks


def open_set(name, trained):
    """(folder, validation tokens) of the data set `name`, by default the run's own. Raises ValueError if it is not
    whole, of another tokenizer, or of fewer than two validation windows."""
    config = trained.config
    folder = Path(config.data.dir, config.data.name) if name is None else Path(name)
    if not folder.is_dir() and Path(config.data.dir, folder).is_dir():
        folder = Path(config.data.dir, folder)
    meta = read_meta(folder)
    if fingerprint(meta)["tokenizer"] != trained.metadata["tokenizer"]:
        raise ValueError(
            f"{folder}: its tokenizer ({meta.tokenizer['name']!r}) is not that of {config.run.name}; name a set that "
            f"was prepared with the run's tokenizer"
        )
    check(folder, config.model.vocab_size)
    tokens, T = open_tokens(folder, "val"), config.model.block_size
    if count_windows(tokens, T) < 2:
        raise ValueError(f"{folder}: one validation window of {T} tokens, but chance needs another; name a larger set")
    return folder, tokens


def settle(args):
    """(Trained, the other one or None, Tokenizer, data set, its validation tokens, device). Raises ValueError."""
    if args.windows < 2:
        raise ValueError(f"--windows {args.windows}: expected 2 or more, as chance is measured with another window")
    if args.out and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out}: a file; name a folder")
    device = distributed.pick_device(args.device)
    trained, tokenizer = load_run(args.run, args.step, args.average)
    other = None
    if args.other or args.other_checkpoint is not None:
        other, _ = load_run(args.other or args.run, args.other_checkpoint, args.average)
    for one in filter(None, (trained, other)):
        if ROUTERS[one.config.model.router] is None:
            raise ValueError(f"{one.config.run.name} is dense and has no router; name a run of a mixture of experts")
    if other:
        names = f"{trained.config.run.name} and {other.config.run.name} cannot be compared"
        for key in ALIKE:
            mine, theirs = (getattr(one.config.model, key) for one in (trained, other))
            if mine != theirs:
                raise ValueError(f"{names}: model.{key} is {mine} and {theirs}; name a run with {mine}")
        if trained.metadata["tokenizer"] != other.metadata["tokenizer"]:
            raise ValueError(f"{names}: they have different tokenizers; name a run with the same")
    return trained, other, tokenizer, *open_set(args.data, trained), device


def study(args):
    """Count and measure; (what routing.json has, the folder it goes to). Raises ValueError and OSError."""
    trained, other, tokenizer, data, tokens, device = settle(args)
    config = trained.config
    name = "routing" if other is None else f"routing-{other.config.run.name}-{other.label}"
    out = args.out or args.run / "eval" / trained.label / name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out}: cannot be made ({error.strerror}); name another folder (--out)") from error
    indices = fixed_windows(tokens, config.model.block_size, args.windows)
    models = [one and one.model.to(device) for one in (trained, other)]
    tally, counted, ids, seen = count(models[0], tokens, indices, models[1])
    found = {
        "run": config.run.name,
        "checkpoint": trained.label,
        "step": trained.step,
        "average": trained.average,
        "router": config.model.router,
        "top_k": config.model.top_k,
        "data": str(data),
        "windows": len(indices),
        "tokens": tally.tokens,
        "torch": torch.__version__,
        "common_tokens": [
            {"id": int(i), "text": tokenizer.decode([i]), "seen": int(n)} for i, n in zip(ids, seen, strict=True)
        ],
        "layers": describe(tally, ids, seen, tokenizer),
    }
    if counted:
        found["other"] = f"{other.config.run.name}, {other.label}"
        counts = (layers.cpu().numpy() for layers in (counted.pairs, counted.pairs_by_chance))
        found["agreement"] = [compare(*layer, config.model.top_k) for layer in zip(*counts, strict=True)]
    return found, out


# --- the page -------------------------------------------------------------------------------------------------------


def page(found, pictures):
    """Blocks for eval.pages.write."""
    E, K, L = len(found["layers"][0]["loads"]), found["top_k"], len(found["layers"])
    of = f", the mean of {found['average']} checkpoints" if found["average"] > 1 else ""
    blocks = [
        ("h1", f"Routing of {found['run']} at step {found['step']:,}"),
        (
            "p",
            f"Router {found['router']}, {L} layers of {E} experts, {K} a token{of}; {found['windows']:,} validation "
            f"windows of {found['data']}, {found['tokens']:,} tokens. Layers and experts are numbered from 0.",
        ),
        summary(found),
        ("list", MEANINGS),
        *(("picture", *pictures[name]) for name in ("loads", "layers", "gates")),
        ("h2", "Which tokens go where"),
        (
            "p",
            f"The {EXPERTS} experts of each layer, of those with {LEAST_LOAD:g} of the mean load or more, whose tokens "
            f"tell most, by nats beyond chance: how far the tokens "
            f"that chose the expert are from those of the text, Σ P(x|e) ln(P(x|e) / P(x)). Of each expert the tokens "
            f"(seen {MIN_COUNT} times or more) that make most of it: their share of the expert's load, and how many "
            f"times their share of the text that is. "
            f"␣ is a space, ↵ the end of a line, #128 the token of that number where it is no whole character; "
            f"∗ and ˋ stand for asterisk and backtick.",
        ),
        experts(found),
        ("picture", *pictures["tokens"]),
        ("h2", "Which experts go together"),
        (
            "p",
            "Pairs that most tokens chose beyond what the two loads would give; P(j|i) is OLMoE's co-activation, the "
            "share of i's tokens that chose j as well.",
        ),
        partners(found),
        ("picture", *pictures["coactivation"]),
    ]
    if "agreement" in found:
        blocks += [("h2", f"Agreement with {found['other']}"), ("list", AGREEMENTS), agreement(found)]
        blocks += [("picture", *pictures["agreement"])]
    return blocks


MEANINGS = [
    "**busiest**: load of the busiest expert over the mean load. **idle**: experts that no token chose.",
    "**in use**: exp of the entropy of the loads, the number of equally busy experts with the same entropy. "
    "**a token**: exp of the mean entropy of a token's normalised positive scores (in nats beside it).",
    "**zero gates**: share of the gates that are exactly 0. **sum**, **norm**: median [5%, 95%] over tokens of the sum "
    "and the l2 norm of the gates of a token's experts.",
    f"**first**, **any**: vocabulary specialization (OLMoE, arXiv 2409.02060, Sec. 5): the share of a token's "
    f"occurrences that its commonest expert has, as the first or as any of the chosen, in the mean over the tokens of "
    f"the vocabulary seen {MIN_COUNT} times or more. **partner**: the share of an expert's tokens that its commonest "
    f"partner has, in the mean over experts.",
    "In brackets **by chance**: the same with each token's choices taken from another token of another window; for "
    "partners, with choices that do not depend on each other.",
]
AGREEMENTS = [
    "**same number**: the share of a token's experts that have the same numbers in both models. Between checkpoints of "
    "one run this is OLMoE's router saturation. Between runs experts have no order in common, unless they began at the "
    "same weights (same seed).",
    "**matched**: the same after the other model's experts are renumbered, one to one, to make it largest.",
    "In brackets **by chance**: the same with the other model's choices taken from another token of another window, "
    "matched anew. **beyond chance**: matched, on a scale where chance is 0 and full agreement 1.",
]


def summary(found):
    head = ["layer", "busiest", "idle", "in use", "a token", "nats", "zero gates", "sum", "norm"]
    head += ["first", "any", "partner"]
    rows = []
    for number, layer in enumerate(found["layers"]):
        rows.append(
            [
                f"{number}",
                f"{layer['load_imbalance']:.2f}",
                f"{layer['dead_experts']}",
                f"{math.exp(layer['load_entropy']):.1f}",
                f"{math.exp(layer['entropy']):.1f}",
                f"{layer['entropy']:.3f}",
                f"{layer['zero_gates']:.2%}",
                quantiles(layer["gate_sum"]),
                quantiles(layer["gate_norm"]),
                *(with_chance(layer, f"vocabulary_{name}") for name in ("first", "any")),
                with_chance(layer, "strongest_partner"),
            ]
        )
    return "table", head, rows


def quantiles(measure):
    low, middle, high = (measure["quantiles"][q] for q in ("0.05", "0.5", "0.95"))
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def with_chance(layer, name):
    return f"{layer[name]:.0%} ({layer[f'{name}_by_chance']:.0%})"


def experts(found):
    rows = []
    for number, layer in enumerate(found["layers"]):
        beyond = [one["nats"] - one["nats_by_chance"] for one in layer["experts"]]
        mean = sum(layer["loads"]) / len(beyond)
        enough = [e for e, load in enumerate(layer["loads"]) if load >= LEAST_LOAD * mean]
        for e in sorted(enough, key=lambda e: -beyond[e])[:EXPERTS]:
            told = [
                f"{visible(token['text'], token['id']).translate(MARKS)} {token['share']:.0%} {token['lift']:.1f}×"
                for token in layer["experts"][e]["tokens"][:TOKENS]
            ]
            told += [""] * (TOKENS - len(told))
            rows.append([f"{number}, {e}", f"{layer['loads'][e] / mean:.2f}", f"{beyond[e]:.2f}", *told])
    return "table", ["layer, expert", "load / mean", "nats", "tokens", *[""] * (TOKENS - 1)], rows


def partners(found):
    rows = []
    for number, layer in enumerate(found["layers"]):
        for pair in layer["pairs"][:PAIRS]:
            i, j = pair["experts"]
            loads = layer["loads"]
            ways = [f"{pair['tokens'] / loads[e]:.0%}" for e in (i, j)]
            rows.append([f"{number}", f"{i}, {j}", *ways, f"{pair['lift']:.1f}×"])
    return "table", ["layer", "experts i, j", "P(j|i)", "P(i|j)", "over independent choices"], rows


def agreement(found):
    rows = []
    for number, layer in enumerate(found["agreement"]):
        chance = layer["matched_by_chance"]
        beyond = f"{(layer['matched'] - chance) / (1 - chance):.2f}" if chance < 1 else "-"
        rows.append([f"{number}", *(with_chance(layer, name) for name in ("same_number", "matched")), beyond])
    return "table", ["layer", "same number", "matched", "beyond chance"], rows


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m eval.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("--other", type=Path, metavar="RUN", help="a run to compare with")
    parser.add_argument(
        "--other-checkpoint", type=int, metavar="STEP", help="of --other, or of the run itself (default: the last)"
    )
    parser.add_argument("--data", metavar="SET", help="a prepared set, folder or name (default: the run's own)")
    parser.add_argument("--windows", type=int, default=64, help="of block_size tokens (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(default: runs/NAME/eval/step_…/routing)")
    args = parser.parse_args(argv)
    try:
        found, out = study(args)
        (out / "routing.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        write(page(found, draw(found, out)), out, "routing")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{markdown(*summary(found))}\n")
    if "agreement" in found:
        print(f"{markdown(*agreement(found))}\n")
    print(f"{found['tokens']:,} tokens; {out}/routing.md, routing.html, routing.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
