"""Compare the losses of a short run of every router on the CPU with tests/golden.json.

    python -m tools.golden            router, largest relative difference, first loss that differs
    python -m tools.golden --update   rows that differ become today's losses; the commit says why

Other machines round sums in another order: the difference was 3.5e-7 at most. It stays so small
only while no token is undecided between two experts: with this seed the last one chosen scores at
least 5e-6 (relative) above the first left.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m tools.golden")

import io
import json
import math
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch

import configure
from common.command import build_parser, command, run_command
from data.tokenizer import ByteTokenizer
from data.writer import Writer
from router import ROUTERS
from runtime.metrics import read_metrics
from train import train

FILE = Path(__file__).parent.parent / "tests" / "golden.json"
TOLERANCE = 2e-6  # relative
CONFIG = FILE.with_suffix(".toml")
TEXT = (
    "a kernel weighs what lies near it and routers send every token to the few experts "
    "that know such tokens"
)


def write_corpus(folder: Path) -> None:
    """Write the data set `golden` in `folder`: words of TEXT at random, eight a line, as bytes.

    A linear congruential generator with Knuth's MMIX constants draws them: no library's random
    numbers are used.
    """
    vocabulary = TEXT.split()
    state = 0
    with Writer(folder / "golden", ByteTokenizer()) as writer:
        for split in ["train"] * 1500 + ["val"] * 60:
            sentence = []
            for _ in range(8):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                sentence.append(vocabulary[(state >> 33) % len(vocabulary)])
            line = (" ".join(sentence) + "\n").encode()
            writer.write(split, np.frombuffer(line, np.uint8).astype(np.uint16))
        writer.finish("golden", {}, "python -m tools.golden")


def train_router(router: str, folder: Path, *overrides: str) -> dict[str, float]:
    """Train `router` on the corpus in `folder`; returns {"val 0": loss, "train 1": loss, ...}."""
    name = "-".join([router, *(override.split("=")[1] for override in overrides)])
    settings = [
        f"--model.router={router}",
        f"--run.name={name}",
        f"--run.dir={folder}/runs",
        f"--data.dir={folder}",
    ]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        train(configure.load(CONFIG, [*settings, *overrides]))
    losses = {}
    for line in read_metrics(folder / "runs" / name / "metrics.jsonl"):
        for split in ("train", "val"):
            if f"{split}/loss" in line:
                losses[f"{split} {line['step']}"] = line[f"{split}/loss"]
    return losses


def compare_losses(losses: dict[str, float], golden: dict[str, float]) -> dict[str, float]:
    """Relative difference of each loss of two runs; infinite if one is missing or not finite."""
    differences = {}
    for name in golden | losses:
        difference = abs(losses.get(name, math.nan) / golden.get(name, math.nan) - 1)
        differences[name] = math.inf if math.isnan(difference) else difference
    return differences


@command
def main(argv: list[str] | None = None) -> int:
    """Compare, or update."""
    parser = build_parser("tools.golden", __doc__)
    parser.add_argument(
        "--update", action="store_true", help=f"overwrite {FILE.parent.name}/{FILE.name}"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    made, golden = json.loads(FILE.read_text()).values()
    losses: dict[str, dict[str, float]] = {}
    fails = False
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        for router in ROUTERS:
            losses[router] = train_router(router, Path(folder))
            differences = compare_losses(losses[router], golden.get(router, {}))
            different = [name for name, value in differences.items() if value > TOLERANCE]
            verdict = f"within {TOLERANCE:g}"
            if not different:
                losses[router] = golden[router]  # not another machine's rounding
            else:
                verdict = f"differs first: {different[0]}"
                fails = True
            print(f"{router:15} {max(differences.values()):8.1e}  {verdict}", flush=True)
    if args.update:
        if any(losses.get(router) != row for router, row in golden.items()):
            made = {"torch": torch.__version__}
        rows = [f"{json.dumps(router)}: {json.dumps(row)}" for router, row in losses.items()]
        body = ",\n".join(rows)
        FILE.write_text(f'{{"made": {json.dumps(made)},\n"losses": {{\n{body}}}}}\n')
        return 0
    return int(fails)


if __name__ == "__main__":
    run_command(main)
