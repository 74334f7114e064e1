"""Export a trained run to Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT                       into a new folder
    python -m scripts.export runs/quickstart-kern OUT --check               then load it and compare it with the run
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors, config.json, generation_config.json, the tokenizer's files, README.md (a model card) and
config.toml (the run's settings). A dense model with learned positions is written as a GPT-2, a mixture that OLMoE,
Qwen3-MoE or Mixtral computes as one of these, any other with the code it needs. Where OUT exists, --check only
compares; exit code 1 if something differs.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from attention import kv_heads
from common.command import require_packages, run_command
from configure.schema import Model
from data.tokenizer import Tokenizer, identity
from eval.trained import Trained, add_run_arguments, load_run
from gate_norm import gate_scale
from runtime import RunError
from runtime.initial import EXPORTED, EXPORTED_IF_SET
from runtime.names import to_gpt2, to_hf
from runtime.open_moe import FAMILIES, find_misfits, make_open_config, to_open
from scripts.export.card import format_card
from scripts.export.check import DTYPES, check_export, load_source
from scripts.export.tokenizer_files import write_json, write_tokenizer

GPT2 = {  # what a model has that can be written as a GPT-2, and as many heads of keys as of queries
    "router": "dense",
    "pos": "learned",
    "norm": "layernorm",
    "qk_norm": "off",
    "activation": "gelu",
    "gated": False,
}
ROUTER = re.compile(r"\.(router|gate)\.")  # weights of routers, which stay in fp32
REPO_ROOT = Path(__file__).parents[2]
CODE = {  # file in an export: its source here
    "configuration_nanokern.py": "scripts/export/configuration_nanokern.py",
    "modeling_nanokern.py": "scripts/export/modeling_nanokern.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}


def export_run(
    run: str | Path, out: str | Path, step: int | None = None, average: int = 1, ema: bool = False,
    form: str = "auto", dtype: str = "float32",
) -> tuple[Trained, Tokenizer]:  # fmt: skip
    """Write a run's model into a new folder, in one rename at the end.

    Args:
        run: the run folder.
        out: a new folder.
        step: the checkpoint's step; None: the last. It, `average` and `ema` are as for `eval.trained.load_model`.
        average: checkpoints to average.
        ema: the running mean.
        form: "nanokern", "gpt2", a key of FAMILIES, or "auto": the first of transformers' own classes that fits.
        dtype: of the weights; routers stay in fp32.

    Raises:
        ValueError: no such model, `out` exists, or the model does not fit the class that `form` names.
    """
    out = Path(os.path.realpath(out))  # what it points to, if it is a link
    if os.path.lexists(out):
        raise RunError(f"{out}: exists already; name a new folder, or add --check to compare it with the run")
    trained, tokenizer = load_run(run, step, average, ema)
    if trained.config.data.document_mask:
        raise RunError(
            f"{run}: trained with data.document_mask = true, which no exported model computes: its attention would "
            f"cross documents. Use the run itself (scripts.sample, eval.downstream, eval.val_loss), or train with "
            f"--data.document_mask=false"
        )
    biases = [buffer for name, buffer in trained.model.named_buffers() if name.endswith("selection_bias")]
    form = choose_form(form, trained.config.model, any(bias.any() for bias in biases))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        partial = Path(private, out.name)
        partial.mkdir()  # readable by others, unlike its parent
        write_export(trained, tokenizer, Path(run), partial, form, dtype)
        partial.rename(out)
    return trained, tokenizer


def choose_form(form: str, model: Model, biased: bool = False) -> str:
    """Resolve "auto". Raises ValueError if a class of transformers is asked for and the model does not fit it.

    Args:
        form: as in `export_run`.
        model: the config's [model].
        biased: whether selection biases have moved, which no such class has.
    """
    other = [f"model.{key} = {getattr(model, key)}" for key, value in GPT2.items() if getattr(model, key) != value]
    if kv_heads(model) != model.n_head:
        other.append(f"model.n_kv_head = {model.n_kv_head}")
    misfits = {"gpt2": other} | {kind: find_misfits(model, kind) for kind in FAMILIES}
    for found in misfits.values():
        found += ["a selection bias (train.bias_update_rate)"] * biased
    if found := misfits.get(form):
        name = FAMILIES[form].architecture.removesuffix("ForCausalLM") if form in FAMILIES else "GPT-2"
        raise ValueError(f"--format {form}: the run has {', '.join(found)}, unlike {name}; use --format nanokern")
    if form == "auto":
        return next((kind for kind, found in misfits.items() if not found), "nanokern")
    return form


def write_export(trained: Trained, tokenizer: Tokenizer, run: Path, folder: Path, form: str, dtype: str) -> None:
    """Write all files of an export into `folder`."""
    model = trained.config.model
    weights = trained.model.state_dict()
    state = to_open(weights, model, form) if form in FAMILIES else (to_gpt2 if form == "gpt2" else to_hf)(weights)
    state = {
        name: (tensor if ROUTER.search(name) else tensor.to(DTYPES[dtype])).contiguous()
        for name, tensor in state.items()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})  # transformers requires this key
    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    source = {"run": trained.config.run.name, "step": trained.step, "average": trained.average, "ema": trained.ema}
    source |= {"tokenizer": identity(tokenizer)}
    write_json(folder / "config.json", make_config(model, form) | ends | {"dtype": dtype, "nanokern": source})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes 0600
    padding = list(range(tokenizer.vocab_size, model.vocab_size))
    write_json(folder / "generation_config.json", ends | ({"suppress_tokens": padding} if padding else {}))
    write_tokenizer(tokenizer, folder, model.block_size)
    shutil.copy(run / "config.toml", folder)
    if form == "nanokern":
        for name, source_file in CODE.items():
            shutil.copyfile(REPO_ROOT / source_file, folder / name)
    (folder / "README.md").write_text(format_card(trained, run, form, dtype), "utf-8")


def make_config(model: Model, form: str) -> dict[str, Any]:
    """config.json for modeling_nanokern.py, or for a class of transformers."""
    if form in FAMILIES:
        return make_open_config(model, form)
    shared = {"model_type": form, "initializer_range": model.init_std, "tie_word_embeddings": model.tie_embeddings}
    hidden = (model.top_k + model.n_shared_expert) * model.expert_hidden  # of a dense MLP
    defaults = Model()
    if form == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            **shared,
            **{key: getattr(model, key) for key in ("vocab_size", "n_embd", "n_layer", "n_head")},
            "n_positions": model.block_size,
            "n_inner": hidden,
            "activation_function": "gelu",  # the exact one
            **({"layer_norm_epsilon": model.norm_eps} if model.norm_eps != defaults.norm_eps else {}),
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        }
    return {
        "architectures": ["NanoKernForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_nanokern.NanoKernConfig",
            "AutoModel": "modeling_nanokern.NanoKernModel",
            "AutoModelForCausalLM": "modeling_nanokern.NanoKernForCausalLM",
        },
        **shared,
        **{theirs: getattr(model, ours) for ours, theirs in EXPORTED.items()},
        **{
            theirs: getattr(model, ours)
            for ours, theirs in EXPORTED_IF_SET.items()
            if getattr(model, ours) != getattr(defaults, ours)
        },
        "gate_scale": gate_scale(model),  # what model.gate_norm makes of it
        "intermediate_size": hidden,
        "dropout": model.dropout,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, help="new folder; with --check it may exist, then nothing is written")
    parser.add_argument(
        "--format",
        choices=("auto", "nanokern", "gpt2", *FAMILIES),
        default="auto",
        help="nanokern: any model, with its code; others: transformers' own classes (default: one of them that fits)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights (default: float32)")
    parser.add_argument("--check", action="store_true", help="load OUT with transformers and compare it with the run")
    args = parser.parse_args(argv)
    options = (args.step, args.average, args.ema, args.format, args.dtype)
    try:
        if args.check:
            require_packages("transformers", requirements="requirements-dev.txt")
        if args.check and args.out.exists():
            if options != (None, 1, False, "auto", None):
                raise RunError(f"{args.out}: exists already, so --check takes no other option; name a new folder")
            trained, tokenizer = load_source(args.run, args.out)
        else:
            trained, tokenizer = export_run(args.run, args.out, *options[:4], args.dtype or "float32")
            print(f"{args.out}: {args.run} at step {trained.step}")
        return check_export(trained, tokenizer, args.run, args.out) if args.check else 0
    except BrokenPipeError:  # an OSError that is for run_command
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_command(main)
