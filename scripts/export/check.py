"""Check that an export is the model it was made from: load it with transformers and compare it with the run's."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import configure
from data.bins import open_tokens
from data.tokenizer import END_OF_TEXT, Tokenizer
from eval.trained import Trained, load_run
from model import GPT
from runtime import RunError
from runtime.output import first_line

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # of an export
LIMIT = 1e-4  # on the difference of two logits
WINDOWS = 4
ODD_TEXTS = [
    "",
    "  two  spaces\r\n\t",
    "it's I'LL we've 1234 ½ ² ٣",
    "naïve 日本語 🙂 e\u0301 \u200b\u0000\x7f",
    "\u0378\U000105c0",
]


def load_source(
    run: Path, out: Path, step: int | None, average: int, form: str, dtype: str | None
) -> tuple[Trained, Tokenizer]:
    """Load what the export `out` was made from.

    Raises:
        RunError: `out` is no export, is of a run of another name, or differs from what --checkpoint, --average,
            --format or --dtype ask for.
    """
    config = read_export_config(out)
    source = config["nanokern"]
    settings = run / "config.toml"
    if settings.is_file() and (name := configure.load(settings).run.name) != source["run"]:
        raise RunError(
            f"{out}: exported from run {source['run']!r}, but {run} is {name!r}; name the run it was made from"
        )
    made = {"checkpoint": source["step"], "average": source["average"], "format": config["model_type"]}
    made["dtype"] = config["dtype"]
    asked = zip((step, average, form, dtype), (None, 1, "auto", None), made.values(), strict=True)
    if any(value not in (default, found) for value, default, found in asked):
        options = " ".join(f"--{name} {value}" for name, value in made.items())
        raise RunError(f"{out}: exported with {options}; give these or none, or export the others into a new folder")
    return load_run(run, source["step"], source["average"])


def read_export_config(out: Path) -> dict[str, Any]:
    """Read config.json of an export. Raises RunError if scripts.export has not written it."""
    try:
        config = json.loads((out / "config.json").read_text())
        types = [type(config["nanokern"][key]) for key in ("run", "step", "average")]
        if types == [str, int, int] and config["dtype"] in DTYPES and config["model_type"] in ("nanokern", "gpt2"):
            return config
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise RunError(f"{out}/config.json: missing, or not written by scripts.export; export the run into a new folder")


def check_export(trained: Trained, tokenizer: Tokenizer, run: str | Path, out: Path) -> int:
    """Print what was compared and by how much it differs. Returns the exit code: 1 if something differs."""
    import transformers as hf

    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    try:
        errors = find_differences(trained, tokenizer, out)
    except Exception as error:  # a damaged file makes transformers raise almost anything
        errors = [f"cannot be loaded or run ({type(error).__name__}: {first_line(error)})"]
    for error in errors:
        print(f"error: {out}: {error}", file=sys.stderr)
    if errors:
        print(f"remedy: export again, into a new folder: python -m scripts.export {run} NEW --check", file=sys.stderr)
    return 1 if errors else 0


@torch.no_grad()
def find_differences(trained: Trained, tokenizer: Tokenizer, out: Path) -> list[str]:
    """Compare tokenizer, logits and generation, in fp32; print what agrees and return what differs.

    The run's weights are first rounded to the export's dtype.
    """
    import transformers as hf

    config = json.loads((out / "config.json").read_text())
    idx, place = read_windows(trained, tokenizer)
    trust = "auto_map" in config
    errors = compare_tokenizers(hf.AutoTokenizer.from_pretrained(out, trust_remote_code=trust), tokenizer, idx, place)
    model, info = hf.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=trust, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            errors.append(f"{kind.replace('_', ' ')}: {', '.join(map(str, sorted(info[kind])))}")
    own = round_weights(trained.model, DTYPES[config["dtype"]])
    distance = (model(idx).logits - own.logits(own.hidden(idx)[0])).abs().max().item()
    errors += judge_distance(f"logits of {len(idx)} windows of {idx.shape[1]} tokens of {place}", distance)
    distance, ids = compare_cache(model, tokenizer.eot, idx)
    errors += judge_distance(f"logits of {ids.numel()} tokens generated with and without a cache", distance)
    if ids.max() >= tokenizer.vocab_size:
        errors.append(f"generates id {ids.max()}, which pads the vocabulary of {tokenizer.vocab_size}")
    return errors


def judge_distance(name: str, distance: float) -> list[str]:
    """Print a distance within LIMIT, or return it as an error."""
    line = f"{name}: at most {distance:.2g} apart"
    if distance <= LIMIT:  # false for NaN
        print(line)
        return []
    return [f"{line}, allowed are {LIMIT:g}"]


def read_windows(trained: Trained, tokenizer: Tokenizer) -> tuple[Tensor, str | Path]:
    """(WINDOWS, T) int64 validation tokens and their folder; random ids without the data set."""
    T, folder = trained.config.model.block_size, trained.data_folder
    if (folder / "meta.json").is_file():
        tokens = open_tokens(folder, "val")
        starts = [(len(tokens) - T) * i // WINDOWS for i in range(WINDOWS)]
        return torch.tensor([tokens.read(start, T).tolist() for start in starts]), folder
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tokenizer.vocab_size, (WINDOWS, T), generator=generator), "random ids"


def round_weights(model: GPT, dtype: torch.dtype) -> GPT:
    """Round the weights to `dtype` in place, except the routers'."""
    for name, tensor in model.state_dict().items():
        if ".router." not in name:
            tensor.copy_(tensor.to(dtype))
    return model


def compare_cache(model: Any, eot: int, idx: Tensor) -> tuple[float, Tensor]:
    """Generate greedily with and without a cache, from two prompts of unequal length, padded on the left.

    Returns:
        The largest difference of two logits, up to the first token that differs; the tokens, (2, n) int64.
    """
    length = max(1, idx.shape[1] // 2)
    count = min(idx.shape[1] - length, 16)
    prompts, mask = idx[:2, :length].clone(), torch.ones(2, length, dtype=torch.int64)
    prompts[1, : length // 2], mask[1, : length // 2] = eot, 0
    settings = {"attention_mask": mask, "do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    outputs = [model.generate(prompts, use_cache=use_cache, **settings) for use_cache in (True, False)]
    ids = [output.sequences[:, length:] for output in outputs]
    logits = [torch.stack(output.logits, dim=1) for output in outputs]  # (B, n, V), before suppress_tokens
    equal = (ids[0] == ids[1]).long().cumprod(1)
    comparable = torch.cat([torch.ones_like(equal[:, :1]), equal[:, :-1]], dim=1).bool()
    return (logits[0] - logits[1])[comparable].abs().max().item(), ids[0]


def compare_tokenizers(theirs: Any, own: Tokenizer, idx: Tensor, place: str | Path) -> list[str]:
    """Compare two tokenizers on the texts of the windows `idx` (B, T) and on odd ones; returns what differs."""
    texts = ODD_TEXTS + [part for row in idx.tolist() for part in own.decode(row).split(END_OF_TEXT)]
    for text in texts:
        ids = own.encode(text)
        if theirs.encode(text) != ids or theirs.decode(ids) != own.decode(ids):
            return [f"the tokenizer gives other ids, or decodes them to another text, for {text[:60]!r}"]
    if theirs.eos_token_id != own.eot:
        return [f"the tokenizer ends a text with {theirs.eos_token_id}, not {own.eot}"]
    print(f"tokenizer: equal ids and decoded texts for {len(texts)} texts of {place} and odd ones")
    return []
