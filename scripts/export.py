"""Weights of a trained run as safetensors, for other programs.

    python -m scripts.export runs/quickstart-kern OUT

Writes OUT/model.safetensors (every parameter and buffer in fp32, by its name in model.py) and OUT/config.toml.
"""

import argparse
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file

from scripts.trained import load_model


def export(run, out, step=None):
    """Write the weights of the checkpoint of `step`, the last by default, into the new folder `out`. Returns the step.
    Raises ValueError if there is no such checkpoint, if it is damaged, or if `out` is not empty."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is there already; name a new folder")
    model, config, step = load_model(run, step)[:3]
    out.mkdir(parents=True, exist_ok=True)
    metadata = {"run": config.run.name, "step": str(step), "router": config.model.router}
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, out / "model.tmp", metadata)
    shutil.copy(Path(run, "config.toml"), out / "config.toml")
    (out / "model.tmp").rename(out / "model.safetensors")
    return step


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.export", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart-kern")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the last)")
    args = parser.parse_args(argv)
    try:
        step = export(args.run, args.out, args.step)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: weights of {args.run} at step {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
