"""Does training still give the losses it gave? A short run on the CPU for every router, against tests/golden.json.

    python -m scripts.golden             a table: router, largest relative difference, the first loss that differs
    python -m scripts.golden --update    today's losses become the golden ones; the commit says why they changed

Other machines round sums in another order: the difference was 3.5e-7 at most. It stays so small only while no token is
undecided between two experts: with this seed the last one chosen scores at least 5e-6 (relative) above the first left.
"""

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
TEXT = "a kernel weighs what lies near it and routers send every token to the few experts that know such tokens"


def write_corpus(folder: Path) -> None:
    """Write the data set `golden` in `folder`: the words of TEXT in random order, eight a line, as bytes.

    A linear congruential generator with Knuth's MMIX constants draws them: no library's random numbers are used.
    """
    vocabulary, state = TEXT.split(), 0
    with Writer(folder / "golden", ByteTokenizer()) as writer:
        for split in ["train"] * 1500 + ["val"] * 60:
            sentence = []
            for _ in range(8):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                sentence.append(vocabulary[(state >> 33) % len(vocabulary)])
            writer.write(split, np.frombuffer((" ".join(sentence) + "\n").encode(), np.uint8).astype(np.uint16))
        writer.finish("golden", {}, "python -m scripts.golden")


def train_router(router: str, folder: Path) -> dict[str, float]:
    """Train `router` on the corpus in `folder`; returns {"val 0": loss, "train 1": loss, ...}, by steps."""
    settings = [f"--model.router={router}", f"--run.name={router}", f"--run.dir={folder}/runs", f"--data.dir={folder}"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        train(configure.load(CONFIG, settings))
    return {
        f"{split} {line['step']}": line[f"{split}/loss"]
        for line in read_metrics(folder / "runs" / router / "metrics.jsonl")
        for split in ("train", "val")
        if f"{split}/loss" in line
    }


def compare_losses(losses: dict[str, float], golden: dict[str, float]) -> dict[str, float]:
    """Find the relative difference of each loss of two runs; infinite where one is missing or not finite."""
    names = golden | losses
    differences = {name: abs(losses.get(name, math.nan) / golden.get(name, math.nan) - 1) for name in names}
    return {name: math.inf if math.isnan(difference) else difference for name, difference in differences.items()}


@command
def main(argv: list[str] | None = None) -> int:
    """Compare, or update."""
    parser = build_parser("scripts.golden", __doc__)
    parser.add_argument("--update", action="store_true", help=f"overwrite {FILE.parent.name}/{FILE.name}")
    update = parser.parse_args(argv).update
    torch.set_num_threads(1)
    golden = json.loads(FILE.read_text())["losses"]
    losses, n_differing = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        for router in ROUTERS:
            losses[router] = train_router(router, Path(folder))
            differences = compare_losses(losses[router], golden.get(router, {}))
            first = next((name for name, difference in differences.items() if difference > TOLERANCE), None)
            n_differing += first is not None
            print(f"{router:15} {max(differences.values()):8.1e}  differs first: {first}", flush=True)
    if update:
        made = json.dumps({"torch": torch.__version__})
        rows = ",\n".join(f"{json.dumps(router)}: {json.dumps(row)}" for router, row in losses.items())
        FILE.write_text(f'{{"made": {made},\n"losses": {{\n{rows}}}}}\n')
    return 1 if n_differing and not update else 0


if __name__ == "__main__":
    run_command(main)
