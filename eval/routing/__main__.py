"""What the experts of a trained run do, layer by layer, over fixed validation windows.

    python -m eval.routing runs/quickstart-kern                                   loads, pairs, tokens, gates
    python -m eval.routing runs/quickstart-kern --other runs/quickstart-softmax   and where two runs agree
    python -m eval.routing runs/quickstart-kern --other-checkpoint 500            or two checkpoints of one run

Writes routing.md, routing.html, routing.json and pictures to runs/NAME/eval/step_…/routing (routing-OTHER for two),
replacing those of an earlier call. Computed in float32, in memory that does not grow with --windows. Needs
requirements-report.txt.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from common.command import require_packages, run_command
from common.files import write_atomic
from data.tokenizer import Tokenizer
from eval.trained import Trained, add_run_arguments, load_run, open_validation
from router import ROUTERS
from runtime import distributed
from scripts.report.pages import format_markdown, write_page

COMPARABLE = ("n_layer", "n_dense_layer", "n_expert", "top_k", "block_size")  # equal in two models to be compared


def load_models(args: argparse.Namespace) -> tuple[list[Trained], Tokenizer]:
    """The run and, if asked for, the one to compare it with. Raises ValueError."""
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    models = [trained]
    if args.other or args.other_checkpoint is not None:
        models.append(load_run(args.other or args.run, args.other_checkpoint, args.average, args.ema)[0])
    for one in models:
        if ROUTERS[one.config.model.router] is None:
            raise ValueError(f"{one.config.run.name} is dense and has no router; name a run with another model.router")
    for other in models[1:]:
        names = f"{trained.config.run.name} and {other.config.run.name} cannot be compared"
        for key in COMPARABLE:
            mine, theirs = (getattr(one.config.model, key) for one in models)
            if mine != theirs:
                raise ValueError(f"{names}: model.{key} is {mine} and {theirs}; name a run with {mine}")
        if trained.metadata["tokenizer"] != other.metadata["tokenizer"]:
            raise ValueError(f"{names}: they have different tokenizers; name a run with the same")
    return models, tokenizer


def measure_routing(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """The content of routing.json, and the folder it belongs in. Raises ValueError and OSError."""
    from eval.routing.counts import compare_choices, count_routing, describe_layer

    device = distributed.pick_device(args.device)
    models, tokenizer = load_models(args)
    trained, *others = models
    config = trained.config
    named = [Path(args.data), Path(config.data.dir, args.data)] if args.data else []
    folders = [next(filter(Path.is_dir, named), named[0])] if named else trained.data_folders
    tokens, indices, *_ = open_validation(trained, folders, args.windows)
    data = folders[0] if len(folders) == 1 else config.data.label
    if len(indices) < 2:
        raise ValueError(f"{data}: {len(indices)} window, chance needs two; raise --windows or name a larger set")
    name = "-".join(["routing", *(f"{other.config.run.name}-{other.label}" for other in others)])
    out = args.run / "eval" / trained.label / name
    out.mkdir(parents=True, exist_ok=True)
    layers, ids, seen = count_routing(*(one.model.to(device) for one in models), tokens=tokens, indices=indices)
    found = {
        "run": config.run.name,
        "checkpoint": trained.label,
        "step": trained.step,
        "average": trained.average,
        "mean": trained.mean,
        "router": config.model.router,
        "top_k": config.model.top_k,
        "data": str(data),
        "windows": len(indices),
        "tokens": layers[0].tokens,
        "torch": torch.__version__,
        "layers": [
            {"layer": number} | describe_layer(layer, ids, seen, tokenizer)
            for number, layer in enumerate(layers, config.model.n_dense_layer)
        ],
    }
    for other in others:
        found["other"] = f"{other.config.run.name}, {other.label}"
        found["agreement"] = [
            {"layer": number} | compare_choices(layer.agreement.cpu().numpy(), config.model.top_k)
            for number, layer in enumerate(layers, config.model.n_dense_layer)
        ]
    return found, out


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
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
    args = parser.parse_args(argv)
    try:
        require_packages("matplotlib", "scipy")
        found, out = measure_routing(args)
        from eval.routing import page, pictures

        write_atomic(out / "routing.json", json.dumps(found) + "\n")
        pictures.plot_routing(found, out)
        write_page(page.build_page(found), out, "routing")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{format_markdown(*page.build_summary(found))}\n")
    if "agreement" in found:
        print(f"{format_markdown(*page.build_agreement(found))}\n")
    print(f"{found['tokens']:,} tokens; {out}/routing.md, routing.html, routing.json")
    return 0


if __name__ == "__main__":
    run_command(main)
