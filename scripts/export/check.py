"""Check that an export is the model it was made from: load it with transformers and compare it with the run's."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import KVCache
from common.text import first_line
from data.tokenizer import Tokenizer, token_bytes
from eval.trained import Trained, load_run
from model import GPT
from runtime import RunError
from runtime.open_moe import FAMILIES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # of an export
# On the difference of two logits. transformers rounds those of generated tokens to fp32, and in its own mixtures what
# goes into every norm, router and rotation, too, even of a model in fp64.
LIMIT, LIMIT_OF_FAMILIES = 1e-5, 1e-4
WINDOWS = 4
ODD_TEXTS = [
    "",
    "  two  spaces\r\n\t",
    "it's I'LL we've 1234 ½ ² ٣",
    "naïve 日本語 🙂 e\u0301 \u200b\u0000\x7f",
    "\u0378\U000105c0",
]


def load_source(run: Path, out: Path) -> tuple[Trained, Tokenizer]:
    """Load the weights of `run` that the export `out` was made from. Raises RunError if `out` is no export."""
    try:
        source = json.loads((out / "config.json").read_text())["nanokern"]
        which = source["step"], source["average"], source.get("ema", False)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{out}/config.json: missing, or not written by scripts.export; export the run into a new folder"
        ) from error
    return load_run(run, *which)


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
    """Compare tokenizer, logits and generation; print what agrees and return what differs.

    The run's weights are first rounded to the export's dtype. Both models compute in fp64, so that rounding on the way
    does not look like a fault.
    """
    import transformers as hf

    config = json.loads((out / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(tokenizer.vocab_size, (WINDOWS, trained.config.model.block_size), generator=generator)
    trust = {"trust_remote_code": "auto_map" in config}
    errors = compare_tokenizers(hf.AutoTokenizer.from_pretrained(out, **trust), tokenizer, idx)
    settings: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    limit = LIMIT
    if config["model_type"] in FAMILIES:
        limit = LIMIT_OF_FAMILIES
        settings["experts_implementation"] = "eager"  # others know no fp64
    model, info = hf.AutoModelForCausalLM.from_pretrained(out, **trust, **settings)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            errors.append(f"{kind.replace('_', ' ')}: {', '.join(map(str, sorted(info[kind])))}")
    model, own = model.double(), round_weights(trained.model, DTYPES[config["dtype"]]).double()
    start = torch.arange(WINDOWS) * idx.shape[1] // WINDOWS
    mask = hide_padding(idx, start, tokenizer.eot)
    distances = model(idx, attention_mask=mask).logits - compute_logits(own, idx, start)
    errors += judge_distance(f"logits of {mask.sum()} random tokens in {WINDOWS} rows", distances[mask == 1], limit)
    distances, ids = compare_generation(model, own, tokenizer.eot, idx)
    errors += judge_distance(f"logits of {ids.numel()} tokens generated with a cache", distances, limit)
    if ids.max() >= tokenizer.vocab_size:
        errors.append(f"generates id {ids.max()}, which pads the vocabulary of {tokenizer.vocab_size}")
    return errors


def hide_padding(idx: Tensor, start: Tensor, eot: int) -> Tensor:
    """Set the ids (B, T) before column start[b] of each row to `eot`, in place; returns the attention mask (B, T)."""
    mask = (torch.arange(idx.shape[1]) >= start[:, None]).long()
    idx[mask == 0] = eot
    return mask


def compute_logits(own: GPT, idx: Tensor, start: Tensor) -> Tensor:
    """Logits (B, T, V) of rows that begin at column start[b]."""
    return own.logits(own.hidden(idx, KVCache(own.config, start, idx.shape[1], own.head.dtype))[0])


def judge_distance(name: str, distances: Tensor, limit: float) -> list[str]:
    """Print the largest of some distances if it is within `limit`, or return it as an error."""
    distance = distances.abs().max().item()
    line = f"{name}: at most {distance:.2g} apart"
    if distance <= limit:  # false for NaN
        print(line)
        return []
    return [f"{line}, allowed are {limit:g}"]


def round_weights(model: GPT, dtype: torch.dtype) -> GPT:
    """Round the weights to `dtype` in place, except the routers'."""
    for name, tensor in model.state_dict().items():
        if ".router." not in name:
            tensor.copy_(tensor.to(dtype))
    return model


def compare_generation(model: Any, own: GPT, eot: int, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Generate greedily with a cache, from two prompts of unequal length, padded on the left.

    Returns:
        The differences to the logits of `own` for the same tokens, (2, n, V); the tokens, (2, n) int64.
    """
    length = max(1, idx.shape[1] // 2)
    count = min(idx.shape[1] - length, 16)
    prompts, start = idx[:2, :length].clone(), torch.tensor([0, length // 2])
    mask = hide_padding(prompts, start, eot)
    settings = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(prompts, attention_mask=mask, **settings)
    logits = torch.stack(output.logits, dim=1)  # (2, n, V), before suppress_tokens
    return logits - compute_logits(own, output.sequences, start)[:, length - 1 : -1], output.sequences[:, length:]


def compare_tokenizers(theirs: Any, own: Tokenizer, idx: Tensor) -> list[str]:
    """Compare two tokenizers on odd texts and on those that `idx` (B, T) decodes to; returns what differs."""
    ordinary = {i for i, token in enumerate(token_bytes(own)) if token}  # transformers reads the texts of special ones
    texts = ODD_TEXTS + [own.decode([i for i in row if i in ordinary]) for row in idx.tolist()]
    for text in texts:
        ids = own.encode(text)
        if theirs.encode(text) != ids or theirs.decode(ids) != own.decode(ids):
            return [f"the tokenizer gives other ids, or decodes them to another text, for {text[:60]!r}"]
    if theirs.eos_token_id != own.eot:
        return [f"the tokenizer ends a text with {theirs.eos_token_id}, not {own.eot}"]
    print(f"tokenizer: equal ids and decoded texts for {len(texts)} texts")
    return []
