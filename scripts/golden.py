"""Does training still give the losses it gave? A short run on the CPU for every router, against tests/golden.json.

    python -m scripts.golden             a table: router, largest relative difference, ok or where it first differs
    python -m scripts.golden --update    today's losses become the golden ones; the commit says why they changed

On the machine that wrote the file the difference of unchanged code is 0. Other machines round sums in another order:
with PyTorch's, oneDNN's and MKL's kernels for other processors (ATEN_CPU_CAPABILITY=default or avx2,
ONEDNN_MAX_CPU_ISA=AVX2 or SSE41, MKL_CBWR=COMPATIBLE, also together) on Intel and AMD it was 3.5e-7 at most: TOLERANCE
is six times that. It stays so small only while no token is undecided between two experts. Of the seeds 0 to 29 the one
in tests/golden.toml has one of the two widest margins: over all routers, steps and tokens, the last expert chosen
scores at least 5e-6 (relative) above the first one left. If a change of rounding alone flips one, update.
"""

import io
import json
import math
import platform
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from datetime import date
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
    """Write the data set `golden` in `folder`: the words of TEXT in random order, as bytes.

    A linear congruential generator with Knuth's MMIX constants draws them: no library's random numbers are used.
    """
    vocabulary, state = TEXT.split(), 0
    with Writer(folder / "golden", ByteTokenizer()) as writer:
        for split, sentences in {"train": 1500, "val": 60}.items():
            for _ in range(sentences):
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


def compare_losses(losses: dict[str, float], golden: dict[str, float]) -> tuple[float, str | None]:
    """Compare two runs' losses by name; one that is missing or not finite differs without bound.

    Returns:
        The largest relative difference, and the name of the first loss that differs by more than TOLERANCE, or None.
    """
    differences = {}
    for name in golden | losses:
        difference = abs(losses.get(name, math.nan) / golden.get(name, math.nan) - 1)
        differences[name] = difference if math.isfinite(difference) else math.inf
    return max(differences.values()), next((name for name, d in differences.items() if d > TOLERANCE), None)


@command
def main(argv: list[str] | None = None) -> int:
    """Compare, or update."""
    parser = build_parser("scripts.golden", __doc__)
    parser.add_argument("--update", action="store_true", help=f"overwrite {FILE.parent.name}/{FILE.name}")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    golden = json.loads(FILE.read_text())["losses"] if FILE.is_file() else {}
    losses, differing = {}, []
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        for router in ROUTERS:
            losses[router] = train_router(router, Path(folder))
            largest, first = compare_losses(losses[router], golden.get(router, {}))
            if first:
                differing.append(router)
            print(f"{router:15} {largest:8.1e}  {f'differs, first at {first}' if first else 'ok'}", flush=True)
    if args.update:
        machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        made = json.dumps({"torch": torch.__version__, "date": str(date.today()), "machine": machine})
        rows = ",\n".join(f"{json.dumps(router)}: {json.dumps(row)}" for router, row in losses.items())
        FILE.write_text(f'{{"made": {made},\n"losses": {{\n{rows}}}}}\n')
        print(f"{FILE}: written")
    elif differing:
        print(f"{', '.join(differing)}: not the golden losses. If intended: python -m scripts.golden --update")
    return 1 if differing and not args.update else 0


if __name__ == "__main__":
    run_command(main)
