"""A trained run in the form of Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT                       a new folder
    python -m scripts.export runs/quickstart-kern OUT --check               loaded again and held against the run, too
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors, config.json, generation_config.json, the tokenizer's files, README.md (a model card) and
config.toml (the run's settings). A dense model with learned positions is written as a GPT-2, any other with the code
that it takes. --check alone is done where OUT is there already: exit code 1 if something differs.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from data.tokenizer import identity
from eval.trained import add_run_arguments, load_run
from router import ROUTERS
from runtime import RunError
from runtime.names import to_gpt2, to_hf
from scripts.export import card, check
from scripts.export.tokenizer_files import write_tokenizer

REPO_ROOT = Path(__file__).parents[2]
CODE = {  # file in an export: where it is here
    "configuration_nanokern.py": "scripts/export/configuration_nanokern.py",
    "modeling_nanokern.py": "scripts/export/modeling_nanokern.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}


def export(run, out, step=None, average=1, form="auto", dtype="float32"):
    """Write the model of `eval.trained.load_model(run, step, average)` into the new folder `out`, as `form`
    ("nanokern", "gpt2", or auto). Routers stay in fp32 whatever `dtype` is. Returns (Trained, Tokenizer). Raises
    ValueError if there is no such model, if `out` is not empty or cannot be replaced, or if GPT-2 cannot be it."""
    out = Path(os.path.realpath(out))  # the folder itself, where it is a link
    if is_taken(out):
        raise RunError(f"{out}: is there already; name a new folder, or add --check to hold it against the run")
    if out == Path.cwd() or out.is_mount():
        raise RunError(
            f"{out}: a working directory or mount cannot be replaced; name a new folder, such as {out / 'hf'}"
        )
    trained, tokenizer = load_run(run, step, average)
    form = settle_format(form, trained.config.model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        partial = Path(private, out.name)
        partial.mkdir()  # which others may read, unlike the one around it
        write(trained, tokenizer, Path(run), partial, form, dtype)
        partial.rename(out)
    return trained, tokenizer


def is_taken(out):
    """Whether something is at `out` that is not an empty folder."""
    return os.path.lexists(out) and (not out.is_dir() or any(out.iterdir()))


def settle_format(form, model):
    """The form to write, where `form` may be auto. Raises ValueError if it is to be GPT-2 and cannot."""
    stands_in_the_way = [
        f"model.{key} = {value}"
        for key, value, wanted in (
            ("router", model.router, ROUTERS[model.router] is None),
            ("pos", model.pos, model.pos == "learned"),
        )
        if not wanted
    ]
    if form == "gpt2" and stands_in_the_way:
        raise ValueError(
            f"--format gpt2: the run has {' and '.join(stands_in_the_way)}, which GPT-2 has not; use --format nanokern"
        )
    if form == "auto":
        return "nanokern" if stands_in_the_way else "gpt2"
    return form


def write(trained, tokenizer, run, folder, form, dtype):
    """All files of an export, into `folder`."""
    state = (to_gpt2 if form == "gpt2" else to_hf)(trained.model.state_dict())
    state = {
        name: tensor.contiguous() if ".router." in name else tensor.to(check.DTYPES[dtype]).contiguous()
        for name, tensor in state.items()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})  # transformers asks for this key
    config = (config_of_gpt2 if form == "gpt2" else config_of_nanokern)(trained.config.model)
    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    own = {"run": trained.config.run.name, "step": trained.step, "average": trained.average}
    write_json(
        folder / "config.json", config | ends | {"dtype": dtype, "nanokern": own | {"tokenizer": identity(tokenizer)}}
    )
    padding = list(range(tokenizer.vocab_size, trained.config.model.vocab_size))
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors hides it from others
    write_json(folder / "generation_config.json", ends | ({"suppress_tokens": padding} if padding else {}))
    write_tokenizer(tokenizer, folder, trained.config.model.block_size)
    shutil.copy(run / "config.toml", folder)
    if form == "nanokern":
        for name, place in CODE.items():
            shutil.copyfile(REPO_ROOT / place, folder / name)
    (folder / "README.md").write_text(card.of(trained, tokenizer, run, form, dtype), "utf-8")


def config_of_nanokern(model):
    """config.json of the section [model], for modeling_nanokern.py."""
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


def config_of_gpt2(model):
    """config.json of the section [model], dense and with learned positions, for transformers' GPT-2."""
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


def write_json(path, body):
    path.write_text(json.dumps(body, indent=1) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument(
        "--format",
        choices=("auto", "nanokern", "gpt2"),
        default="auto",
        help="gpt2: without code of our own, for dense models with learned positions (default: gpt2 for these)",
    )
    parser.add_argument("--dtype", choices=check.DTYPES, help="of weights (default: float32)")
    parser.add_argument("--check", action="store_true", help="load OUT with transformers and hold it against the run")
    args = parser.parse_args(argv)
    out, dtype = Path(os.path.realpath(args.out)), args.dtype or "float32"
    try:
        if args.check:
            check.transformers()
        if args.check and is_taken(out):
            trained, tokenizer = check.load_source(args.run, out, args.step, args.average, args.format, args.dtype)
        else:
            trained, tokenizer = export(args.run, out, args.step, args.average, args.format, dtype)
            print(f"{out}: {args.run} at step {trained.step}")
        return check.report(trained, tokenizer, args.run, out) if args.check else 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
