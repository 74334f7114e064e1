"""Export a trained run to Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT            into a new folder
    python -m scripts.export runs/quickstart-kern OUT --check    load it again, compare with the run
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors, config.json, generation_config.json, the tokenizer's files, README.md
(a model card) and settings.toml (the run's settings). A dense model with learned positions is
written as a GPT-2, a mixture that OLMoE, Qwen3-MoE or Mixtral computes as one of these, any other
with the code it needs. The exit code of --check is 1 if something differs.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from common.command import build_parser, command, require_packages, run_command
from common.text import first_line
from configure.schema import Model
from data.tokenizer import Tokenizer
from eval.trained import Trained, add_run_arguments, load_run
from hf.formats import FORMATS, OPEN_MOES
from hf.tokenizer_files import choose_padding, write_json, write_tokenizer
from hf.weight_files import (
    DIGEST,
    ONE_FILE,
    ORIGIN,
    format_origin,
    hash_tensors,
    read_tensors,
)
from model import GPT
from router import find_spec
from runtime import RunError
from runtime.identity import RUN_ID
from runtime.memory import check_host_memory, count_parameters

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REPO_ROOT = Path(__file__).parents[2]
CARD = Path(__file__).with_name("card.md")  # template of README.md, as the hub reads it
NO_PADDING = (
    "note: the vocabulary has no room for a padding token, so the export has none; to fine-tune "
    "it, set a pad_token that is not the end of a text, else the model does not learn to end one"
)
CODE = {  # file in an export of form "nanokern": its source in this repository
    "configuration_nanokern.py": "hf/export/configuration_nanokern.py",
    "modeling_nanokern.py": "hf/export/modeling_nanokern.py",
    "attention.py": "attention.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}

# Largest difference of two logits in fp64. transformers' own mixtures round the inputs of every
# norm, router and rotation to fp32.
LIMIT = 1e-5
LIMIT_OF_MOES = 1e-4
ROWS = 4  # of tokens, for --check
ODD_TEXTS = [
    "",
    "  two  spaces\r\n\t",
    "it's I'LL we've 1234 ½ ² ٣",
    "naïve 日本語 🙂 e\u0301 \u200b\u0000\x7f",
    "\u0378\U000105c0",
]


def choose_form(model: Model, biased: bool) -> str:
    """Choose the key of FORMATS that a model is written as.

    Args:
        model: the run's [model].
        biased: selection biases have moved, so none of transformers' own classes fits.
    """
    if biased:
        return "nanokern"
    return next(name for name, candidate in FORMATS.items() if candidate.computes(model))


def export_run(
    trained: Trained,
    tokenizer: Tokenizer,
    out: str | Path,
    dtype: str = "float32",
) -> None:
    """Write a run's model into a new folder, in one rename at the end.

    Args:
        trained: the run's model.
        tokenizer: the run's tokenizer.
        out: the folder; if it is a link, the folder that it points to.
        dtype: a key of DTYPES, for all weights except routers, which stay in fp32.

    Raises:
        ValueError: `out` exists or cannot be written, or no exported model computes what the model
            does.
    """
    out = Path(os.path.realpath(out))
    if os.path.lexists(out):
        raise RunError(f"{out}: exists already; name a new folder")
    if trained.config.data.document_mask:
        raise RunError(
            f"{trained.folder}: trained with data.document_mask = true, which no exported model "
            f"computes: its attention would cross documents. Use the run itself (scripts.sample, "
            f"eval.downstream, eval.val_loss), or train with --data.document_mask=false"
        )
    model = trained.config.model
    weights = trained.model.state_dict()
    biases = [weights[name] for name in weights if name.endswith("selection_bias")]
    form = choose_form(model, any(bias.any() for bias in biases))
    config = describe_model(trained, tokenizer, form, dtype)
    generation = describe_generation(config, tokenizer)

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        folder = Path(private, out.name)
        folder.mkdir()  # readable by others, unlike its parent
        try:
            write_json(folder / "config.json", config)
            write_json(folder / "generation_config.json", generation)
            rounded = round_weights(weights, DTYPES[dtype], form)
            named = FORMATS[form].from_own(rounded, model)
            written = {name: tensor.contiguous() for name, tensor in named.items()}
            write_weights(written, folder, config[ORIGIN])
            write_tokenizer(tokenizer, folder, model.block_size, config["pad_token_id"])
            # not config.toml, which makes a folder a run
            shutil.copy(trained.folder / "config.toml", folder / "settings.toml")
            if form == "nanokern":
                for name, source in CODE.items():
                    shutil.copyfile(REPO_ROOT / source, folder / name)
            (folder / "README.md").write_text(format_card(trained, form, dtype), "utf-8")
            folder.rename(out)  # fails if another process made that meanwhile
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{out}: cannot be written ({error}); make room, or name another folder"
            ) from error


def describe_model(trained: Trained, tokenizer: Tokenizer, form: str, dtype: str) -> dict[str, Any]:
    """config.json of an export: the model, its special tokens, and the run it is from."""
    model = trained.config.model
    origin = {"run": trained.config.run.name, "weights": trained.label}
    if RUN_ID in trained.metadata:  # not in checkpoints of older versions
        origin[RUN_ID] = trained.metadata[RUN_ID]
    config = {
        "architectures": [FORMATS[form].architecture],
        "model_type": form,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        **FORMATS[form].make_config(model),
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": choose_padding(tokenizer, model.vocab_size),
        "dtype": dtype,
        ORIGIN: origin,
    }
    if form == "nanokern" and find_spec(model.router) is not None:
        config["router_aux_loss_coef"] = trained.config.train.balance_loss_coef
    return config


def describe_generation(config: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json of an export with that config.json."""
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config["vocab_size"] > tokenizer.vocab_size:  # ids that only pad the vocabulary
        generation["suppress_tokens"] = list(range(tokenizer.vocab_size, config["vocab_size"]))
    return generation


def write_weights(weights: dict[str, Tensor], folder: Path, origin: Mapping[str, str]) -> None:
    """Write model.safetensors.

    Args:
        weights: by the names of the export.
        folder: of the export.
        origin: which weights of which run these are.
    """
    path = folder / ONE_FILE
    # transformers needs "pt"
    metadata = {"format": "pt", DIGEST: hash_tensors(weights), ORIGIN: format_origin(origin)}
    save_file(weights, path, metadata)
    shutil.copymode(folder / "config.json", path)  # safetensors writes 0600


def round_weights(state: Mapping[str, Tensor], dtype: torch.dtype, form: str) -> dict[str, Tensor]:
    """The weights that an export has, by the names of model.py.

    Those of routers stay in fp32. transformers' own mixtures have no constant c on gates: in an
    export to these it is multiplied into w_out, and c is 1.

    Args:
        state: of the run's model.
        dtype: of the export.
        form: a key of FORMATS.
    """
    rounded = {}
    for name, tensor in state.items():
        if form in OPEN_MOES and name.endswith("experts.w_out"):
            tensor = tensor * state[name.replace("experts.w_out", "router.c")]
        if form in OPEN_MOES and name.endswith("router.c"):
            tensor = torch.ones_like(tensor)
        rounded[name] = tensor if ".router." in name else tensor.to(dtype)
    return rounded


def format_card(trained: Trained, form: str, dtype: str) -> str:
    """README.md of an export of `trained` as `form`, a key of FORMATS, with weights in `dtype`."""
    model = trained.config.model
    return CARD.read_text("utf-8").format(
        tags=f"nanokern, {model.router}, {form}",
        name=trained.config.run.name,
        weights=f"{trained.mean or 'weights'} of step {trained.step:,}, in {dtype}",
        trust=form == "nanokern",
        block_size=model.block_size,
    )


def check_export(trained: Trained, tokenizer: Tokenizer, out: Path) -> int:
    """Compare an export with its run. Returns the exit code: 1 if something differs."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = json.loads((out / "config.json").read_text())
        read_tensors(out, config)  # raises RunError if a bit of a weight differs from its digest
        compare_tokenizers(out, tokenizer)
        compare_logits(trained, tokenizer, out, config)
    except RunError as error:
        fault = str(error)
    except Exception as error:  # a damaged file makes transformers raise almost anything
        fault = f"cannot be loaded or run ({type(error).__name__}: {first_line(error)})"
    else:
        return 0
    remedy = f"export {trained.folder} again, into a new folder"
    print(f"error: {out}: {fault}; {remedy}", file=sys.stderr)
    return 1


def compare_tokenizers(out: Path, own: Tokenizer) -> None:
    """Compare the export's tokenizer with the run's. Raises RunError if they differ."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    for text in ODD_TEXTS:
        ids = own.encode(text)
        if theirs.encode(text) != ids or theirs.decode(ids) != own.decode(ids):
            difference = "gives other ids, or decodes them to another text"
            raise RunError(f"the tokenizer {difference}, for {text[:60]!r}")
    if theirs.eos_token_id != own.eot:
        raise RunError(f"the tokenizer ends a text with {theirs.eos_token_id}, not {own.eot}")
    print("tokenizer: the same ids, texts and end of a text")


@torch.no_grad()
def compare_logits(trained: Trained, tokenizer: Tokenizer, out: Path, config: Any) -> None:
    """Compare logits of random rows in fp64. Raises RunError if they differ.

    The run's weights are first rounded to the export's dtype.
    """
    from transformers import AutoModelForCausalLM, Cache

    form = config["model_type"]
    model = trained.config.model
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(tokenizer.vocab_size, (ROWS, model.block_size), generator=generator)
    # transformers' faster experts know no fp64
    experts = {"experts_implementation": "eager"} if form in OPEN_MOES else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=form == "nanokern", dtype=torch.float64, **experts
    )
    logits, cache = [], {}
    for part in idx.split((model.block_size + 1) // 2, dim=1):  # two, as in generating
        output = theirs(part, use_cache=True, **cache)
        # its name depends on the version of transformers
        cache = {name: value for name, value in output.items() if isinstance(value, Cache)}
        logits.append(output.logits)
    del theirs, output, cache
    own = GPT(model).eval().double()
    own.load_state_dict(round_weights(trained.model.state_dict(), DTYPES[config["dtype"]], form))
    difference = (torch.cat(logits, dim=1) - own.logits(own.hidden(idx)[0])).abs().max().item()
    limit = LIMIT_OF_MOES if form in OPEN_MOES else LIMIT
    line = f"logits of {ROWS} random rows: at most {difference:.2g} apart"
    if not difference <= limit:  # true for NaN
        raise RunError(f"{line}, allowed are {limit:g}")
    print(line)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = build_parser("scripts.export", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add("out", type=Path, help="new folder")
    add("--dtype", choices=DTYPES, default="float32", help="of weights (default: %(default)s)")
    add("--check", action="store_true", help="load OUT by transformers and compare it with the run")
    args = parser.parse_args(argv)
    if args.check:
        require_packages("transformers", requirements="requirements/dev.txt")
    trained, tokenizer = load_run(args.run, args.step, args.ema)
    n_parameter, _ = count_parameters(trained.config.model)
    n_byte = 16 if args.check else 8  # the run's weights and a copy; for --check a model in fp64
    check_host_memory(args.run, "its export", n_byte * n_parameter)
    export_run(trained, tokenizer, args.out, args.dtype)
    print(f"{args.out}: {args.run} at step {trained.step}")
    if choose_padding(tokenizer, trained.config.model.vocab_size) is None:
        print(NO_PADDING)
    if args.check:
        return check_export(trained, tokenizer, args.out)
    return 0


if __name__ == "__main__":
    run_command(main)
