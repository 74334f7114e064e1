"""Export a trained run to Hugging Face's transformers.

    python -m scripts.export runs/quickstart-kern OUT            into a new folder
    python -m scripts.export runs/quickstart-kern OUT --check    load it again, compare with the run
    model = AutoModelForCausalLM.from_pretrained("OUT", trust_remote_code=True)

OUT holds model.safetensors (above 5 GB several files and an index), config.json,
generation_config.json, the tokenizer's files, README.md (a model card) and config.toml (the run's
settings). A dense model with learned positions is written as a GPT-2, a mixture that OLMoE,
Qwen3-MoE or Mixtral computes as one of these, any other with the code it needs. The exit code of
--check is 1 if something differs.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attention import KVCache
from common.command import build_parser, command, require_packages, run_command
from common.text import first_line, markdown_table
from configure.schema import Model
from data.tokenizer import Tokenizer, token_bytes
from eval.trained import Trained, add_run_arguments, load_run
from hf.by_block import build_by_block
from hf.formats import FORMATS, OPEN_MOES, name_block
from hf.tokenizer_files import write_json, write_tokenizer
from hf.weight_files import DIGEST, INDEX, ONE_FILE, hash_tensors, read_tensors
from model import GPT
from router import find_spec
from runtime import RunError
from runtime.checkpoint import LazyTensors
from runtime.memory import count_parameters

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REPO_ROOT = Path(__file__).parents[2]
CARD = Path(__file__).with_name("card.md")  # template of README.md, as the hub reads it
USES = """
Fine-tuning works as with transformers' own mixtures of experts. With
`model.config.output_router_logits = True` the model returns router_logits and aux_loss, the balance
loss of training, which is added to the loss with the weight config.router_aux_loss_coef. Set it to
False again before vLLM serves the model. PEFT's LoRA adapts experts by
`target_parameters=["experts.{up}", "experts.down_proj"]`.
"""
CODE = {  # file in an export of form "nanokern": its source in this repository
    "configuration_nanokern.py": "hf/export/configuration_nanokern.py",
    "modeling_nanokern.py": "hf/export/modeling_nanokern.py",
    "attention.py": "attention.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}

# Largest difference of two logits in fp64. transformers rounds the logits of generated tokens to
# fp32, and in its own mixtures also the inputs of every norm, router and rotation.
LIMIT = 1e-5
LIMIT_OF_MOES = 1e-4
# Largest error in the export's dtype, as a multiple of the error of the run's own model in that
# dtype. Both are medians over tokens, of the largest error of a token's logits against fp64: a
# median, because rounding gives a few tokens other experts. Measured (2026-11-26, 9 small models in
# 3 dtypes): up to 1.05, and 1.54 in transformers' mixtures, whose routers compute in the dtype.
LIMIT_OF_ROUNDING = 2
LIMIT_OF_ROUNDING_OF_MOES = 4
FILE_BYTES = 5_000_000_000  # of weights in a file; so many are in memory at a time
WINDOWS = 4  # prompts of --check
DEVICES = {  # of modules in --check: blocks stay on the disk
    "model.embed_tokens": "cpu",
    "model.embed_positions": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "transformer.wte": "cpu",
    "transformer.wpe": "cpu",
    "transformer.h": "disk",
    "transformer.ln_f": "cpu",
    "lm_head": "cpu",
}
NEW_TOKENS = 16  # generated for each prompt
ODD_TEXTS = [
    "",
    "  two  spaces\r\n\t",
    "it's I'LL we've 1234 ½ ² ٣",
    "naïve 日本語 🙂 e\u0301 \u200b\u0000\x7f",
    "\u0378\U000105c0",
]


def choose_form(form: str, model: Model, biased: bool = False) -> str:
    """Choose the key of FORMATS that a model is written as.

    Args:
        form: a key of FORMATS, or "auto": the first of transformers' own classes that computes
            `model`, else "nanokern".
        model: the run's [model].
        biased: selection biases have moved, so none of transformers' own classes fits.

    Raises:
        ValueError: the class of `form` does not compute `model`.
    """
    misfits = {}
    for name, candidate in FORMATS.items():
        misfits[name] = candidate.find_misfits(model)
        if biased and name != "nanokern":
            misfits[name].append("a selection bias (train.bias_update)")
    if form == "auto":
        return next(name for name in FORMATS if not misfits[name])
    if misfits[form]:
        raise ValueError(
            f"--format {form}: the run has {', '.join(misfits[form])}, "
            f"unlike {FORMATS[form].architecture}; use --format nanokern"
        )
    return form


def export_run(
    trained: Trained,
    tokenizer: Tokenizer,
    out: str | Path,
    form: str = "auto",
    dtype: str = "float32",
) -> None:
    """Write a run's model into a new folder, in one rename at the end.

    Args:
        trained: the run's model.
        tokenizer: the run's tokenizer.
        out: the folder; if it is a link, the folder that it points to.
        form: see `choose_form`.
        dtype: a key of DTYPES, for all weights except routers, which stay in fp32.

    Raises:
        ValueError: `out` exists, no exported model computes what the model does, or the class that
            `form` names does not.
        OSError: a file cannot be written.
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
    weights = trained.state
    biases = [weights[name] for name in weights if name.endswith("selection_bias")]
    biased = any(bias.any() for bias in biases)
    form = choose_form(form, model, biased)

    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    config = {
        "architectures": [FORMATS[form].architecture],
        "model_type": form,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        **FORMATS[form].make_config(model),
        **ends,
        "dtype": dtype,
        "nanokern": {"run": trained.config.run.name, "weights": trained.label},
    }
    if form == "nanokern" and find_spec(model.router) is not None:
        config["router_aux_loss_coef"] = trained.config.train.balance_loss_coef
    generation: dict[str, Any] = dict(ends)
    if model.vocab_size > tokenizer.vocab_size:  # ids that only pad the vocabulary
        generation["suppress_tokens"] = list(range(tokenizer.vocab_size, model.vocab_size))

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as private:
        folder = Path(private, out.name)
        folder.mkdir()  # readable by others, unlike its parent
        try:
            files = write_weights(weights, folder, form, DTYPES[dtype])
        except SafetensorError as error:  # also a full disk
            raise RunError(f"{out}: its weights cannot be written ({error}); make room") from error
        write_json(folder / "config.json", config)
        for file in files:  # safetensors writes 0600
            shutil.copymode(folder / "config.json", file)
        write_json(folder / "generation_config.json", generation)
        write_tokenizer(tokenizer, folder, model.block_size)
        shutil.copy(trained.folder / "config.toml", folder)
        if form == "nanokern":
            for name, source in CODE.items():
                shutil.copyfile(REPO_ROOT / source, folder / name)
        (folder / "README.md").write_text(format_card(trained, form, dtype), "utf-8")
        publish(folder, out)


def publish(folder: Path, out: Path) -> None:
    """Move the finished folder to `out`. Raises RunError if another process made that meanwhile."""
    try:
        folder.rename(out)
    except OSError as error:
        if not out.exists():
            raise
        raise RunError(f"{out}: written by another process meanwhile; name a new folder") from error


def write_weights(
    weights: Mapping[str, Tensor], folder: Path, form: str, dtype: torch.dtype
) -> list[Path]:
    """Write model.safetensors, or several files and their index if FILE_BYTES are not enough.

    Args:
        weights: state of the run's model.
        folder: of the export.
        form: a key of FORMATS.
        dtype: of the export.

    Returns:
        The files of weights.
    """
    paths = []
    total_size = 0
    weight_map = {}
    for part in convert_in_parts(weights, form, dtype):
        path = folder / f"model-{len(paths) + 1:05}.safetensors"
        # transformers needs "pt"
        save_file(part, path, {"format": "pt", DIGEST: hash_tensors(part)})
        paths.append(path)
        total_size += sum(tensor.nbytes for tensor in part.values())
        weight_map.update(dict.fromkeys(part, path.name))
        del part
    if len(paths) == 1:
        return [paths[0].rename(folder / ONE_FILE)]
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    return paths


def convert_in_parts(
    weights: Mapping[str, Tensor], form: str, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield weights by the names of the export in parts of up to FILE_BYTES, or of a block.

    Arguments as for `write_weights`.
    """
    rounded = round_weights(weights, dtype, form)
    blocks: dict[str, list[str]] = {}
    for name in rounded:
        blocks.setdefault(name_block(name), []).append(name)
    part: dict[str, Tensor] = {}
    part_size = 0
    for names in blocks.values():
        block = {name: rounded[name] for name in names}
        block_size = sum(tensor.nbytes for tensor in block.values())
        if part and part_size + block_size > FILE_BYTES:
            yield part
            part = {}
            part_size = 0
        for name, tensor in FORMATS[form].from_own(block).items():
            part[name] = tensor.contiguous()
        part_size += block_size
    yield part


def round_weights(weights: Mapping[str, Tensor], dtype: torch.dtype, form: str) -> LazyTensors:
    """The weights that an export has, by the names of model.py; each is rounded when it is read.

    Those of routers stay in fp32. transformers' own mixtures have no constant c on gates: in an
    export to these it is multiplied into w_out, and c is 1.

    Args:
        weights: state of the run's model.
        dtype: of the export.
        form: a key of FORMATS.
    """

    def round_one(name: str) -> Tensor:
        tensor = weights[name]
        if form in OPEN_MOES and name.endswith("experts.w_out"):
            tensor = tensor * weights[name.replace("experts.w_out", "router.c")]
        if form in OPEN_MOES and name.endswith("router.c"):
            tensor = torch.ones_like(tensor)
        return tensor if ".router." in name else tensor.to(dtype)

    return LazyTensors({name: partial(round_one, name) for name in weights})


def format_card(trained: Trained, form: str, dtype: str) -> str:
    """README.md of an export of `trained` as `form`, a key of FORMATS, with weights in `dtype`."""
    model = trained.config.model
    total, active = count_parameters(model)
    tags = ["nanokern", model.router]
    trust = no_trust = flags = uses = ""
    if form == "nanokern":
        trust = ", trust_remote_code=True"
        no_trust = ", trust_remote_code=False"
        flags = " --trust-remote-code --model-impl transformers"
        if find_spec(model.router) is not None:
            uses = USES.format(up="gate_up_proj" if model.gated else "up_proj")
    else:
        tags.append(form)
    settings = model.model_dump()
    settings["router"] = f"{model.router}: {find_spec(model.router)}"
    weights = f"The weights are those of step {trained.step:,}, in {dtype}."
    if trained.mean:
        weights = f"The weights are the {trained.mean} up to step {trained.step:,}, in {dtype}."
    evaluation = f"None yet: `python -m eval.downstream {trained.folder}`."
    table = trained.folder / "eval" / trained.label / "table.md"
    if table.is_file():
        scores = table.read_text().strip()
        evaluation = f"Zero-shot, lm-evaluation-harness, ± standard error.\n\n{scores}"
    rows = [[key, str(value)] for key, value in settings.items()]
    return CARD.read_text("utf-8").format(
        tags=", ".join(tags),
        name=trained.config.run.name,
        total=total,
        active=active,
        weights=weights,
        trust=trust,
        no_trust=no_trust,
        uses=uses,
        block_size=model.block_size,
        flags=flags,
        model=markdown_table(["setting", "value"], rows),
        training=markdown_table(["training", "value"], describe_training(trained)),
        evaluation=evaluation,
        date=date.today(),
    )


def describe_training(trained: Trained) -> list[list[str]]:
    """Rows on the data, the steps, the tokens seen and the last losses up to the step exported."""
    rows = [["data set", trained.config.data.label], ["steps", f"{trained.step:,}"]]
    for key in ("data", "tokenizer"):
        if key in trained.metadata:
            rows.append([f"sha256 of the {key}", trained.metadata[key]])
    last = {}  # (value, step) by name
    for line in trained.metrics:
        if line["step"] <= trained.step:
            for key, value in line.items():
                last[key] = value, line["step"]
    if last:
        rows.append(["tokens seen", f"{last['tokens'][0]:,}"])
    note = ", of that checkpoint, not of the mean" if trained.mean else ""
    for key in ("train/loss", "val/loss"):
        if key in last:
            loss, step = last[key]
            rows.append([f"{key}, nats per token", f"{loss:.4f} (step {step:,}{note})"])
    return rows


def check_export(trained: Trained, tokenizer: Tokenizer, out: Path) -> int:
    """Compare an export with its run. Returns the exit code: 1 if something differs.

    Raises RunError if the disk is too full to load the export.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        errors = find_differences(trained, tokenizer, out)
    except RunError as error:
        errors = [str(error)]
    except Exception as error:  # a damaged file makes transformers raise almost anything
        if "No space left" in str(error):  # safetensors' error has no errno
            raise RunError(
                f"{out}: written, but not checked: {out.parent} has no room for weights that "
                f"transformers stores otherwise; make room, then export {trained.folder} again, "
                "into a new folder"
            ) from error
        errors = [f"cannot be loaded or run ({type(error).__name__}: {first_line(error)})"]
    remedy = f"export {trained.folder} again, into a new folder"
    for error in errors:
        print(f"error: {out}: {error}; {remedy}", file=sys.stderr)
    return 1 if errors else 0


@torch.no_grad()
def find_differences(trained: Trained, tokenizer: Tokenizer, out: Path) -> list[str]:
    """Compare tokenizer, logits and generation; print what agrees and return what differs.

    The run's weights are first rounded to the export's dtype. Both models compute in fp64, so that
    rounding during the computation does not look like a fault; then the export is loaded as users
    load it, and computes in its own dtype.
    """
    import transformers

    config = json.loads((out / "config.json").read_text())
    read_tensors(out, config)  # raises RunError if a bit of a weight differs from its digest
    form = config["model_type"]
    own_code = "auto_map" in config
    block_size = trained.config.model.block_size
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(tokenizer.vocab_size, (WINDOWS, block_size), generator=generator)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=own_code)
    errors = compare_tokenizers(their_tokenizer, tokenizer, idx)
    if not errors:
        print("tokenizer: the same ids, texts and end of a text")
    rounded = round_weights(trained.state, DTYPES[config["dtype"]], form)
    settings: dict[str, Any] = {"dtype": torch.float64}
    if form in OPEN_MOES:
        settings["experts_implementation"] = "eager"  # others know no fp64
    limit = LIMIT_OF_MOES if form in OPEN_MOES else LIMIT
    with load_from_disk(out, own_code, **settings) as (model, problems):
        for problem, names in problems.items():
            if names:
                errors.append(f"{problem}: {', '.join(str(name) for name in names)}")
        if any(problems.values()):
            return errors  # a module that lacks a weight cannot compute
        output = run_export(model, tokenizer.eot, idx)
    own = build_by_block(trained.config.model, rounded, torch.float64)
    exact = run_own(own, output)
    for computation, logits in output.logits.items():
        distance = (logits - exact[computation]).abs().max().item()
        line = f"logits of {WINDOWS} rows of random and generated tokens, {computation}: "
        line += f"at most {distance:.2g} apart"
        if distance <= limit:  # false for NaN
            print(line)
        else:
            errors.append(f"{line}, allowed are {limit:g}")

    with load_from_disk(out, own_code) as (model, _):
        output = run_export(model, tokenizer.eot, idx)
    exact = run_own(own, output)
    limit = LIMIT_OF_ROUNDING_OF_MOES if form in OPEN_MOES else LIMIT_OF_ROUNDING
    own_logits = run_own(build_by_block(trained.config.model, rounded), output)
    for computation, logits in output.logits.items():
        error = median_error(logits, exact[computation])
        own_error = median_error(own_logits[computation], exact[computation])
        line = f"in {config['dtype']}, as loaded by default, {computation}: "
        line += f"median error of a token {error:.2g}, of the run's model {own_error:.2g}"
        if error <= limit * own_error:  # false for NaN
            print(line)
        else:
            errors.append(f"{line}, allowed are {limit} times that")
    return errors


@contextmanager
def load_from_disk(out: Path, own_code: bool, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yield an export as from_pretrained loads it, and the loading info.

    A module of a block has weights only while it computes: accelerate reads them from the disk.

    Args:
        out: the export.
        own_code: it has the code that computes it.
        settings: other arguments of from_pretrained.
    """
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    # accelerate names the modules that this model lacks, and says that it uses the disk
    warnings.filterwarnings("ignore", "The following device_map keys", module="accelerate")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.check-", dir=out.parent) as folder:
        yield load(
            out,
            output_loading_info=True,
            trust_remote_code=own_code,
            device_map=DEVICES,
            offload_folder=folder,  # for weights that transformers stores otherwise
            **settings,
        )


class ExportOutput(NamedTuple):
    """Tokens that an exported model generated, and its logits."""

    tokens: Tensor  # (B, T) int64, prompts padded on the left, and what follows
    start: Tensor  # (B,) padding of each row
    mask: Tensor  # (B, T) bool, False for padding
    n_new: int  # generated tokens of a row
    logits: dict[str, Tensor]  # by the way in which they were computed, (tokens, V)


def run_export(model: Any, eot: int, idx: Tensor) -> ExportOutput:
    """Generate with a cache, and compute the logits of all tokens in one pass.

    Args:
        model: transformers' model.
        eot: the id that pads prompts.
        idx: (B, T) int64, at most a block. The first halves are prompts; they are padded on the
            left to unequal lengths and continued greedily.
    """
    length = max(1, idx.shape[1] // 2)
    n_new = min(idx.shape[1] - length, NEW_TOKENS)
    start = torch.arange(len(idx)) * length // len(idx)
    mask = torch.arange(length + n_new) >= start[:, None]
    prompt_mask = mask[:, :length]
    prompts = idx[:, :length].where(prompt_mask, eot)
    output = model.generate(
        prompts,
        attention_mask=prompt_mask.long(),
        do_sample=False,
        min_new_tokens=n_new,
        max_new_tokens=n_new,
        output_logits=True,
        return_dict_in_generate=True,
    )
    generated = torch.stack(output.logits, dim=1)  # (B, n_new, V), before suppress_tokens
    inputs = {"attention_mask": mask.long()}
    if model.config.model_type == "gpt2":  # it counts padding as positions, unless it is given them
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    one_pass = model(output.sequences, **inputs).logits
    logits = {
        "generated with a cache": generated.flatten(0, 1),
        "in one pass": one_pass[mask],
    }
    return ExportOutput(output.sequences, start, mask, n_new, logits)


def run_own(own: GPT, output: ExportOutput) -> dict[str, Tensor]:
    """What `output.logits` should be, by the run's model in its dtype."""
    size = output.tokens.shape[1]
    hidden, *_ = own.hidden(output.tokens, KVCache(own.config, output.start, size, own.head.dtype))
    logits = own.logits(hidden)  # (B, T, V)
    return {
        "generated with a cache": logits[:, -output.n_new - 1 : -1].flatten(0, 1),
        "in one pass": logits[output.mask],
    }


def median_error(logits: Tensor, exact: Tensor) -> float:
    """Median over tokens of the largest error of a token's logits (tokens, V); NaN if one is."""
    return (logits - exact).abs().amax(-1).median().item()


def compare_tokenizers(theirs: Any, own: Tokenizer, idx: Tensor) -> list[str]:
    """Compare tokenizers on odd texts and on the texts of `idx` (B, T); return what differs."""
    # no special tokens: transformers would read their texts as the tokens
    ordinary = {i for i, token in enumerate(token_bytes(own)) if token}
    texts = list(ODD_TEXTS)
    for row in idx.tolist():
        texts.append(own.decode([i for i in row if i in ordinary]))
    for text in texts:
        ids = own.encode(text)
        if theirs.encode(text) != ids or theirs.decode(ids) != own.decode(ids):
            difference = "gives other ids, or decodes them to another text"
            return [f"the tokenizer {difference}, for {text[:60]!r}"]
    if theirs.eos_token_id != own.eot:
        return [f"the tokenizer ends a text with {theirs.eos_token_id}, not {own.eot}"]
    return []


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = build_parser("scripts.export", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add("out", type=Path, help="new folder")
    forms = "nanokern: any model, with its code; others: transformers' own classes "
    forms += "(default: one of them that fits)"
    add("--format", choices=("auto", *FORMATS), default="auto", help=forms)
    add("--dtype", choices=DTYPES, default="float32", help="of weights (default: %(default)s)")
    add("--check", action="store_true", help="load OUT by transformers and compare it with the run")
    args = parser.parse_args(argv)
    if args.check:
        require_packages("transformers", "accelerate", requirements="requirements-dev.txt")
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema, lazy=True)
    export_run(trained, tokenizer, args.out, args.format, args.dtype)
    print(f"{args.out}: {args.run} at step {trained.step}")
    if args.check:
        return check_export(trained, tokenizer, args.out)
    return 0


if __name__ == "__main__":
    run_command(main)
