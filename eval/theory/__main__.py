"""The paper's analytical claims against measurement: a table per claim.

    python -m eval.theory [--out FOLDER] [--samples 20000] [--seed 0] [--only variance]

Each row: a quantity, its exact expectation (eval/theory/exact.py), and what router.Router does with random weights and
inputs. With --out, FOLDER gets theory.json, which `python -m scripts.draw FOLDER/theory.json` draws. Exit code 1 if a
measurement is further from its expectation than chance allows. docs/theory.md says which claims hold. Needs
requirements-report.txt.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from common.command import build_parser, command, require_packages, run_command
from common.files import write_atomic
from common.text import text_table


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 1 if a measurement is off its expectation."""
    require_packages("scipy")
    from eval.theory.claims import CLAIMS

    parser = build_parser("eval.theory", __doc__)
    parser.add_argument("--out", type=Path, help="folder for theory.json")
    parser.add_argument("--samples", type=int, default=20_000, help="tokens per mean (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", choices=CLAIMS, help="one claim")
    args = parser.parse_args(argv)
    if args.samples < 100:
        raise ValueError(f"--samples {args.samples}: expected 100 or more")
    results, off = {}, []
    for name in [args.only] if args.only else CLAIMS:
        rows, panels = CLAIMS[name](args.samples, args.seed)
        cells = []
        for row in rows:
            analytic = "-" if row.analytic is None else f"{row.analytic:.4g}"
            measured = f"{row.measured:.4g}" + (f" ± {row.error:.1g}" if row.error else "")
            cells.append((row.quantity, analytic, measured + ("" if row.agrees() else "  (!)")))
        table = text_table(("quantity", "analytic", "measured ± standard error"), cells, left=3)
        print(f"{CLAIMS[name].__doc__}\n\n{table}\n", flush=True)
        off += [row.quantity for row in rows if not row.agrees()]
        results[name] = {
            "rows": [row._asdict() for row in rows],
            "panels": [panel._asdict() for panel in panels],
        }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {"samples": args.samples, "seed": args.seed, "torch": torch.__version__, "claims": results}
        write_atomic(args.out / "theory.json", json.dumps(report, indent=1) + "\n")
        print(f"pictures: python -m scripts.draw {args.out}/theory.json")
    if off:
        print("(!) measured and analytic differ by more than chance allows: " + "; ".join(off), file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    run_command(main)
