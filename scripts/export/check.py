"""Whether an export is the model it was made of: loaded with transformers, run, and held against the run's own."""

import importlib
import json
import sys
from pathlib import Path

import torch

import configure
from data.bins import open_tokens
from data.tokenizer import END_OF_TEXT
from eval.trained import load_run
from runtime import RunError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # of an export
LIMIT = 1e-4  # between two logits
WINDOWS = 4
ODD = [
    "",
    "  two  spaces\r\n\t",
    "it's I'LL we've 1234 ½ ² ٣",
    "naïve 日本語 🙂 e\u0301 \u200b\u0000\x7f",
    "\u0378\U000105c0",
]


def transformers():
    """The module. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError("--check needs transformers: pip install transformers (or -r requirements-dev.txt)") from error


def load_source(run, out, step, average, form, dtype):
    """(Trained, Tokenizer) of what the export `out` says it was made of. Raises RunError if a file is missing, if the
    export is of a run of another name, or if it is not what --checkpoint, --average, --format and --dtype ask for."""
    if missing := [name for name in ("config.json", "model.safetensors") if not (out / name).is_file()]:
        raise RunError(f"{out}: no {' and no '.join(missing)}, so no whole export; export into a new folder")
    config, own = origin(out)
    settings = run / "config.toml"  # without one load_run tells that it is no run
    if settings.is_file() and (name := configure.load(settings).run.name) != own["run"]:
        raise RunError(f"{out}: exported from run {own['run']!r}, but {run} is {name!r}; name the run that it is of")
    made = f"--checkpoint {own['step']} --average {own['average']} --format {config['model_type']}"
    asked = ((None, step, own["step"]), (1, average, own["average"]))
    asked += (("auto", form, config["model_type"]), (None, dtype, config["dtype"]))
    if any(value not in (default, found) for default, value, found in asked):
        raise RunError(
            f"{out}: exported with {made} --dtype {config['dtype']}; give these or none, or export the others into a "
            f"new folder"
        )
    return load_run(run, own["step"], own["average"])


def origin(out):
    """(config.json of an export, its part on the run that it is of). Raises RunError if it is of something else."""
    try:
        config = json.loads((out / "config.json").read_text())
        own = config["nanokern"]
        ours = [type(own[key]) for key in ("run", "step", "average")] == [str, int, int]
        ours = ours and config["dtype"] in DTYPES and config["model_type"] in ("nanokern", "gpt2")
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise RunError(f"{out}/config.json: not of scripts.export; export the run into a new folder")
    return config, own


def report(trained, tokenizer, run, out):
    """Print what was compared and how far it is apart. Returns the exit code: 1 if something differs."""
    hf = transformers()
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    try:
        faults = compare(hf, trained, tokenizer, out)
    except Exception as error:  # whatever a damaged file makes transformers raise
        faults = [f"cannot be loaded or run ({type(error).__name__}: {str(error).strip().splitlines()[0]})"]
    for fault in faults:
        print(f"error: {out}: {fault}", file=sys.stderr)
    if faults:
        print(f"remedy: export again, into a new folder: python -m scripts.export {run} NEW --check", file=sys.stderr)
    return 1 if faults else 0


@torch.no_grad()
def compare(hf, trained, tokenizer, out):
    """What differs, in words; what does not is printed. The run's weights are rounded to the type of the export's, and
    both compute in fp32."""
    config = json.loads((out / "config.json").read_text())
    trust = "auto_map" in config
    theirs = hf.AutoTokenizer.from_pretrained(out, trust_remote_code=trust)
    faults = compare_tokenizers(theirs, tokenizer, *windows(trained, tokenizer))
    model, info = hf.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=trust, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            faults.append(f"{kind.replace('_', ' ')}: {', '.join(map(str, sorted(info[kind])))}")
    own = rounded(trained.model, DTYPES[config["dtype"]])
    idx, place = windows(trained, tokenizer)
    apart = (model(idx).logits - own.logits(own.hidden(idx)[0])).abs().max().item()
    judge(faults, f"logits of {len(idx)} windows of {idx.shape[1]} tokens of {place}", apart)
    apart, ids = generate_twice(model, tokenizer, idx)
    judge(faults, f"logits of {ids.numel()} tokens generated with and without a cache", apart)
    if ids.max() >= tokenizer.vocab_size:
        faults.append(f"generates id {ids.max()}, which pads the vocabulary of {tokenizer.vocab_size}")
    return faults


def judge(faults, what, apart):
    """Print how far something is apart, or add it to `faults`."""
    line = f"{what}: at most {apart:.2g} apart"
    if apart <= LIMIT:  # no if it is nan
        print(line)
    else:
        faults.append(f"{line}, allowed are {LIMIT:g}")


def windows(trained, tokenizer):
    """(ids (4, T), where they are from): of the validation split, random ones if the data set is not there."""
    T, data = trained.config.model.block_size, trained.config.data
    folder = Path(data.dir, data.name)
    if (folder / "meta.json").is_file():
        tokens = open_tokens(folder, "val")
        starts = [(len(tokens) - T) * i // WINDOWS for i in range(WINDOWS)]
        return torch.tensor([tokens.read(start, T).tolist() for start in starts]), folder
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tokenizer.vocab_size, (WINDOWS, T), generator=generator), "random ids"


def rounded(model, dtype):
    """`model` with its weights rounded to `dtype`, but for its routers' in place."""
    for name, tensor in model.state_dict().items():
        if ".router." not in name:
            tensor.copy_(tensor.to(dtype))
    return model


def generate_twice(model, tokenizer, idx):
    """(largest difference between logits with and without a cache, up to where the likeliest token is another; the
    tokens (B, n)), greedily from prompts of unequal length, filled up on the left."""
    T = idx.shape[1]
    length, count = max(1, T // 2), T - max(1, T // 2)
    prompts, mask = idx[:2, :length].clone(), torch.ones(2, length, dtype=torch.int64)
    prompts[1, : length // 2], mask[1, : length // 2] = tokenizer.eot, 0
    ways = []
    for use_cache in (True, False):
        ways.append(
            model.generate(
                prompts,
                attention_mask=mask,
                use_cache=use_cache,
                do_sample=False,
                min_new_tokens=min(count, 16),
                max_new_tokens=min(count, 16),
                output_logits=True,
                return_dict_in_generate=True,
            )
        )
    ids = [way.sequences[:, length:] for way in ways]
    logits = [torch.stack(way.logits, dim=1) for way in ways]  # (B, n, V), of the model itself
    alike = (ids[0] == ids[1]).long().cumprod(1)
    seen = torch.cat([torch.ones_like(alike[:, :1]), alike[:, :-1]], dim=1).bool()
    return (logits[0] - logits[1])[seen].abs().max().item(), ids[0]


def compare_tokenizers(theirs, own, idx, place):
    """What differs, in words, between two tokenizers on texts of the windows `idx` and on odd ones."""
    texts = ODD + [part for row in idx.tolist() for part in own.decode(row).split(END_OF_TEXT)]
    for text in texts:
        ids = own.encode(text)
        if theirs.encode(text) != ids or theirs.decode(ids) != own.decode(ids):
            return [f"the tokenizer gives other ids, or another text back, for {text[:60]!r}"]
    if theirs.eos_token_id != own.eot:
        return [f"the tokenizer ends a text with {theirs.eos_token_id}, not {own.eot}"]
    print(f"ids of {len(texts)} texts of {place} and odd ones: the same, and so are the texts they give back")
    return []
