"""The paper's analytical claims against measurement: a table and a picture per claim.

    python -m eval.theory [--out FOLDER] [--samples 20000] [--seed 0] [--only variance]

Each row: the claim, what the paper says, its exact expectation (eval/theory/exact.py), what router.Router does with
random weights and inputs, and a verdict on the paper. With --out, pictures and theory.json go to FOLDER. Exit status 1
if a measurement is further from its expectation than chance allows. docs/theory.md explains. Needs
requirements-report.txt.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.command import require_packages, run_command
from common.files import write_atomic
from common.text import text_table

if TYPE_CHECKING:
    from eval.theory.claims import Row


def format_rows(rows: list["Row"]) -> str:
    """Rows as aligned text; (!) marks a measurement that is too far from its expectation."""
    cells = []
    for row in rows:
        analytic = "-" if row.analytic is None else f"{row.analytic:.4g}"
        spread = f" ± {row.error:.1g}" if row.error else ""
        if not row.error and row.tolerance and row.analytic is not None:
            spread = f" (tolerance {row.tolerance:.1g})"
        measured = f"{row.measured:.4g}{spread}"
        cells.append((row.claim, row.paper, analytic, measured + "  (!)" * (not row.agrees()), row.verdict))
    return text_table(("claim", "paper", "analytic", "measured ± standard error", "verdict"), cells, left=5)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    try:
        require_packages("scipy", "matplotlib")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from eval.theory import pictures
    from eval.theory.claims import CLAIMS

    parser = argparse.ArgumentParser(prog="python -m eval.theory", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for theory-*.png and theory.json")
    parser.add_argument("--samples", type=int, default=20_000, help="tokens per mean (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", choices=CLAIMS, help="one claim")
    args = parser.parse_args(argv)
    if args.samples < 100:
        parser.error(f"--samples {args.samples}: expected 100 or more")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    results, off = {}, []
    for name in [args.only] if args.only else CLAIMS:
        rows, panels = CLAIMS[name](args.samples, args.seed)
        print(f"{CLAIMS[name].__doc__}\n\n{format_rows(rows)}\n", flush=True)
        off += [row.claim for row in rows if not row.agrees()]
        results[name] = {
            "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
            "panels": [asdict(panel) for panel in panels],
        }
        if args.out and panels:
            pictures.plot_panels(panels, args.out / f"theory-{name}.png")
    if args.out:
        report = {"samples": args.samples, "seed": args.seed, "torch": torch.__version__, "claims": results}
        write_atomic(args.out / "theory.json", json.dumps(report, indent=1) + "\n")
    if off:
        print("(!) measured and analytic differ by more than chance allows: " + "; ".join(off), file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    run_command(main)
