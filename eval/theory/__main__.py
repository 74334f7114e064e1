"""The paper's analytical claims against measurement: a table per claim.

    python -m eval.theory [--samples 20000] [--seed 0] [--only variance]

Each row: a quantity, its exact expectation (eval/theory/exact.py), and what router.Router does with random weights and
inputs. Exit code 1 if a measurement is further from its expectation than chance allows. docs/theory.md says which
claims hold. Needs requirements-report.txt.
"""

import sys
from collections.abc import Sequence

from common.command import build_parser, command, require_packages, run_command
from common.text import text_table


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 1 if a measurement is off its expectation."""
    require_packages("scipy")
    from eval.theory.claims import CLAIMS

    parser = build_parser("eval.theory", __doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="tokens per mean (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", choices=CLAIMS, help="one claim")
    args = parser.parse_args(argv)
    if args.samples < 100:
        raise ValueError(f"--samples {args.samples}: expected 100 or more")
    off = []
    for name in [args.only] if args.only else CLAIMS:
        rows, cells = CLAIMS[name](args.samples, args.seed), []
        for row in rows:
            analytic = "-" if row.analytic is None else f"{row.analytic:.4g}"
            value, error = row.measured
            measured = f"{value:.4g}" + (f" ± {error:.1g}" if error else "")
            cells.append((row.quantity, analytic, measured + ("" if row.agrees() else "  (!)")))
        table = text_table(("quantity", "analytic", "measured ± standard error"), cells, left=3)
        print(f"{CLAIMS[name].__doc__}\n\n{table}\n", flush=True)
        off += [row.quantity for row in rows if not row.agrees()]
    if off:
        print("(!) measured and analytic differ by more than chance allows: " + "; ".join(off), file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    run_command(main)
