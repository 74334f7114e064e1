"""Export a trained run to Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT                       into a new folder
    python -m scripts.export runs/quickstart-kern OUT --check               then load it and compare it with the run
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors, config.json, generation_config.json, the tokenizer's files, README.md (a model card) and
config.toml (the run's settings). A dense model with learned positions is written as a GPT-2, any other with the code it
needs. Where OUT exists, --check only compares; exit code 1 if something differs.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from configure.schema import Model
from data.tokenizer import Tokenizer, identity
from eval.trained import Trained, add_run_arguments, load_run
from router import ROUTERS
from runtime import RunError
from runtime.names import to_gpt2, to_hf
from runtime.output import require_packages
from scripts.export.card import format_card
from scripts.export.check import DTYPES, check_export, load_source
from scripts.export.tokenizer_files import write_json, write_tokenizer

REPO_ROOT = Path(__file__).parents[2]
CODE = {  # file in an export: its source here
    "configuration_nanokern.py": "scripts/export/configuration_nanokern.py",
    "modeling_nanokern.py": "scripts/export/modeling_nanokern.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}


def export_run(
    run: str | Path, out: str | Path, step: int | None = None, average: int = 1, form: str = "auto",
    dtype: str = "float32",
) -> tuple[Trained, Tokenizer]:  # fmt: skip
    """Write a run's model into a new folder, in one rename at the end.

    Args:
        run: the run folder; `step` and `average` as for `eval.trained.load_model`.
        out: a new or empty folder.
        step: the checkpoint's step; None: the last.
        average: checkpoints to average.
        form: "nanokern", "gpt2", or "auto": GPT-2 where possible.
        dtype: of the weights; routers stay in fp32.

    Raises:
        ValueError: no such model, `out` is not empty or cannot be replaced, or the model does not fit GPT-2.
    """
    out = Path(os.path.realpath(out))  # the folder itself, if it is a link
    if is_taken(out):
        raise RunError(f"{out}: exists already; name a new folder, or add --check to compare it with the run")
    if out == Path.cwd() or out.is_mount():
        raise RunError(f"{out}: is the working directory or a mount point; name a new folder, such as {out / 'hf'}")
    trained, tokenizer = load_run(run, step, average)
    form = choose_form(form, trained.config.model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        partial = Path(private, out.name)
        partial.mkdir()  # readable by others, unlike its parent
        write_export(trained, tokenizer, Path(run), partial, form, dtype)
        partial.rename(out)
    return trained, tokenizer


def is_taken(out: Path) -> bool:
    """Whether `out` exists and is not an empty folder."""
    return os.path.lexists(out) and (not out.is_dir() or any(out.iterdir()))


def choose_form(form: str, model: Model) -> str:
    """Resolve "auto". Raises ValueError if GPT-2 is asked for and the model does not fit it."""
    obstacles = [f"model.router = {model.router}"] if ROUTERS[model.router] is not None else []
    obstacles += [f"model.pos = {model.pos}"] if model.pos != "learned" else []
    if form == "gpt2" and obstacles:
        raise ValueError(
            f"--format gpt2: the run has {' and '.join(obstacles)}, which GPT-2 does not support; use --format nanokern"
        )
    if form == "auto":
        return "nanokern" if obstacles else "gpt2"
    return form


def write_export(trained: Trained, tokenizer: Tokenizer, run: Path, folder: Path, form: str, dtype: str) -> None:
    """Write all files of an export into `folder`."""
    model = trained.config.model
    state = (to_gpt2 if form == "gpt2" else to_hf)(trained.model.state_dict())
    state = {
        name: (tensor if ".router." in name else tensor.to(DTYPES[dtype])).contiguous()
        for name, tensor in state.items()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})  # transformers requires this key
    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    source = {"run": trained.config.run.name, "step": trained.step, "average": trained.average}
    config = (make_gpt2_config if form == "gpt2" else make_nanokern_config)(model) | ends
    config |= {"dtype": dtype, "nanokern": source | {"tokenizer": identity(tokenizer)}}
    write_json(folder / "config.json", config)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes 0600
    padding = list(range(tokenizer.vocab_size, model.vocab_size))
    write_json(folder / "generation_config.json", ends | ({"suppress_tokens": padding} if padding else {}))
    write_tokenizer(tokenizer, folder, model.block_size)
    shutil.copy(run / "config.toml", folder)
    if form == "nanokern":
        for name, source_file in CODE.items():
            shutil.copyfile(REPO_ROOT / source_file, folder / name)
    (folder / "README.md").write_text(format_card(trained, run, form, dtype), "utf-8")


def make_nanokern_config(model: Model) -> dict[str, Any]:
    """config.json for modeling_nanokern.py."""
    return {
        "architectures": ["NanoKernForCausalLM"],
        "model_type": "nanokern",
        "auto_map": {
            "AutoConfig": "configuration_nanokern.NanoKernConfig",
            "AutoModel": "modeling_nanokern.NanoKernModel",
            "AutoModelForCausalLM": "modeling_nanokern.NanoKernForCausalLM",
        },
        "vocab_size": model.vocab_size,
        "hidden_size": model.n_embd,
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "max_position_embeddings": model.block_size,
        "router": model.router,
        "n_expert": model.n_expert,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_hidden,
        "intermediate_size": model.top_k * model.expert_hidden,
        "gate_scale": model.gate_scale,
        "pos": model.pos,
        "bias": model.bias,
        "dropout": model.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


def make_gpt2_config(model: Model) -> dict[str, Any]:
    """config.json for transformers' GPT-2, of a dense model with learned positions."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_positions": model.block_size,
        "n_inner": model.top_k * model.expert_hidden,
        "activation_function": "gelu",  # the exact one
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument(
        "--format",
        choices=("auto", "nanokern", "gpt2"),
        default="auto",
        help="gpt2: needs no code of ours; dense models with learned positions only (default: gpt2 for these)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights (default: float32)")
    parser.add_argument("--check", action="store_true", help="load OUT with transformers and compare it with the run")
    args = parser.parse_args(argv)
    out, choices = Path(os.path.realpath(args.out)), (args.step, args.average, args.format)
    try:
        if args.check:
            require_packages("transformers", requirements="requirements-dev.txt")
        if args.check and is_taken(out):
            trained, tokenizer = load_source(args.run, out, *choices, args.dtype)
        else:
            trained, tokenizer = export_run(args.run, out, *choices, args.dtype or "float32")
            print(f"{out}: {args.run} at step {trained.step}")
        return check_export(trained, tokenizer, args.run, out) if args.check else 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
