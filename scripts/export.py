"""Export a trained run to Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT                       into a new folder
    python -m scripts.export runs/quickstart-kern OUT --check               then load it and compare it with the run
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors, config.json, generation_config.json, the tokenizer's files, README.md (a model card) and
config.toml (the run's settings). A dense model with learned positions is written as a GPT-2, a mixture that OLMoE,
Qwen3-MoE or Mixtral computes as one of these, any other with the code it needs. Where OUT exists, --check only
compares; exit code 1 if something differs.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.command import build_parser, command, require_packages, run_command
from eval.trained import add_run_arguments, load_run
from hf.card import Source
from hf.check import check_export, read_origin
from hf.export import DTYPES, write_export
from hf.formats import FORMATS
from runtime import RunError


def load_source(run: str | Path, step: int | None = None, average: int = 1, ema: bool = False) -> Source:
    """Load a run's model and tokenizer. The arguments are those of `eval.trained.load_model`."""
    trained, tokenizer = load_run(run, step, average, ema)
    return Source(
        run=Path(run),
        model=trained.model,
        config=trained.config,
        tokenizer=tokenizer,
        step=trained.step,
        average=trained.average,
        ema=trained.ema,
        label=trained.label,
        mean=trained.mean,
        metadata=trained.metadata,
    )


def export_run(
    run: str | Path, out: str | Path, step: int | None = None, average: int = 1, ema: bool = False,
    form: str = "auto", dtype: str = "float32",
) -> Source:  # fmt: skip
    """Write a run's model into a new folder, in one rename at the end.

    Args:
        run: the run folder.
        out: a new folder.
        step: the checkpoint's step; None: the last. It, `average` and `ema` are as for `eval.trained.load_model`.
        average: checkpoints to average.
        ema: the running mean.
        form: as in `hf.export.choose_form`.
        dtype: of the weights; routers stay in fp32.

    Raises:
        ValueError: no such model, `out` exists, or the model does not fit the class that `form` names.
    """
    out = Path(os.path.realpath(out))  # what it points to, if it is a link
    if os.path.lexists(out):
        raise RunError(f"{out}: exists already; name a new folder, or add --check to compare it with the run")
    source = load_source(run, step, average, ema)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        partial = Path(private, out.name)
        partial.mkdir()  # readable by others, unlike its parent
        write_export(source, partial, form, dtype)
        partial.rename(out)
    return source


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = build_parser("scripts.export", __doc__)
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, help="new folder; with --check it may exist, then nothing is written")
    parser.add_argument(
        "--format",
        choices=("auto", *FORMATS),
        default="auto",
        help="nanokern: any model, with its code; others: transformers' own classes (default: one of them that fits)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights (default: float32)")
    parser.add_argument("--check", action="store_true", help="load OUT with transformers and compare it with the run")
    args = parser.parse_args(argv)
    options = (args.step, args.average, args.ema, args.format, args.dtype)
    if args.check:
        require_packages("transformers", requirements="requirements-dev.txt")
    if args.check and args.out.exists():
        if options != (None, 1, False, "auto", None):
            raise RunError(f"{args.out}: exists already, so --check takes no other option; name a new folder")
        source = load_source(args.run, *read_origin(args.out))
    else:
        source = export_run(args.run, args.out, *options[:4], args.dtype or "float32")
        print(f"{args.out}: {args.run} at step {source.step}")
    return check_export(source, args.out) if args.check else 0


if __name__ == "__main__":
    run_command(main)
