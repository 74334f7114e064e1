"""Weights to begin a run with (train.init_from): those of a GPT-2 checkpoint of Hugging Face, of an exported model
(scripts.export), or of another run's last checkpoint.

They are read from this machine alone, and checked, before anything else of the run begins. Only a run without a
checkpoint of its own looks at them. What is read executes nothing.
"""

import json
import os
import pickle
import re
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

import configure
from configure.schema import Model
from data.bins import fingerprint, open_tokenizer, read_meta, sha256_of
from data.tokenizer import TOKENIZERS, identity
from model import GPT
from router import ROUTERS
from runtime import RankError, RunError, checkpoint, distributed, folder
from runtime.names import from_gpt2, from_hf

FORMATS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read, in one file or in several
GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # the tanh form; ours is the exact one
EXPORTED = {  # key of [model]: that of NanoKernConfig
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "top_k": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
} | {key: key for key in ("vocab_size", "router", "n_expert", "gate_scale", "pos", "bias")}


class Source(NamedTuple):
    """What lies in the folder that train.init_from names."""

    kind: str  # in words
    model: Model  # whose weights they are
    state: dict[str, torch.Tensor]  # by their names in model.py
    notes: list[str]  # what is computed otherwise there


class Weights(NamedTuple):
    state: dict[str, torch.Tensor]  # by their names in model.py; of a table of embeddings the first rows, maybe
    words: str  # where they are from, and what of the model is not among them


def read(config):
    """The Weights that a run of `config` begins with; None if train.init_from is empty. Raises RunError if they are not
    all there, do not fit `config.model`, naming all overrides that it takes, or belong to another tokenizer than the
    data set's."""
    if not config.train.init_from:
        return None
    place = Path(config.train.init_from)
    data = Path(config.data.dir, config.data.name)
    try:
        if not place.exists():
            on_hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(place))
            raise RunError(
                "no such folder. Weights are read from this machine alone"
                + (f"; from the Hugging Face hub: hf download {place} --local-dir {place.name}" if on_hub else "")
            )
        if not place.is_dir():
            raise RunError("not a folder; give the one that holds it")
        if (place / "config.json").is_file():
            source = of_transformers(place, config.model, data)
        elif (place / "config.toml").is_file():
            source = of_run(place, data)
        else:
            raise RunError(
                f"neither a config.json (with {FORMATS[0]}) nor a run's config.toml is in it; give a folder that "
                f"transformers or scripts.export wrote, or a run such as runs/quickstart-kern"
            )
        for name, tensor in source.state.items():
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise RunError(f"{name} ({tensor.dtype}) holds what is no finite number; take other weights")
        needed = overrides(source, config.model)
        if needed:
            raise RunError(f"{source.kind}, whose weights do not fit this model. Add {' '.join(needed)}")
        state, notes = match(source, config.model)
        words = "; ".join([f"{folder.path_of(config)}: begins with {place}, {source.kind}", *notes])
        return Weights(state, words)
    except (RunError, configure.ConfigError) as error:
        of_node = os.environ.get("LOCAL_RANK") == "0"  # another node may lack the folder; one of its ranks says so
        raise (RankError if of_node else RunError)(f"train.init_from = {place}: {error}") from error


@torch.no_grad()
def fill(model, weights, ranks):
    """Move `weights` into a GPT, so that none are left, and say so. Raises RunError, on all ranks, if it is then not
    the same on each."""
    own = model.state_dict()
    while weights.state:
        name, tensor = weights.state.popitem()
        own[name][: len(tensor)].copy_(tensor)
    checksum = sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in own.values())
    if len(set(distributed.gather(checksum, ranks.control))) > 1:
        raise RunError(
            "train.init_from holds other weights for one rank than for another: copy one folder to all nodes"
        )
    if ranks.rank == 0:
        print(weights.words)


def match(source, model):
    """(what of the weights of `source` a GPT of the settings `model` takes, what is to be said of that)."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT(model).state_dict().items()}
    state, notes = dict(source.state), list(source.notes)
    for key in ("router", "top_k", "gate_scale"):
        before, now = getattr(source.model, key), getattr(model, key)
        if before != now and ROUTERS[model.router] is not None:
            notes.append(f"model.{key} was {before} there and is {now} here")
    unused = []
    for name in list(state):
        other_router = source.model.router != model.router and name.endswith("selection_bias")
        if name.endswith("router.c"):  # a constant, which the config gives
            del state[name]
        elif name not in shapes or other_router:
            unused += [name] if state.pop(name).any() else []
    if "wpe.weight" in state and len(state["wpe.weight"]) > model.block_size:
        notes.append(f"the first {model.block_size} of {len(state['wpe.weight'])} positions")
        state["wpe.weight"] = state["wpe.weight"][: model.block_size]
    rows = len(state["wte.weight"])
    if rows < model.vocab_size:
        notes.append(f"ids {rows} to {model.vocab_size - 1} are not among them and stay as drawn")
    fixed = ("router.c", "selection_bias")
    kept = [name for name in shapes if name not in state and not name.endswith(fixed)]
    for names, meaning in ((kept, "not there, at first values here"), (unused, "not used here")):
        notes += [f"{meaning}: {', '.join(kinds(names))}"] if names else []
    return state, notes


def kinds(names):
    """Names of weights without their block's number, once each."""
    return list(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in names))


def overrides(source, model):
    """What to add to a command line so that the weights of `source` fit into `model`; nothing if they do."""
    theirs, keys = source.model, ["n_layer", "n_head", "n_embd", "pos", "tie_embeddings"]
    dense, was_dense = ROUTERS[model.router] is None, ROUTERS[theirs.router] is None
    keys += ["router"] if dense != was_dense else []
    if not was_dense:
        keys += ["n_expert", "expert_hidden"]
        keys += ["top_k"] if dense or model.top_k > theirs.n_expert else []
    elif theirs.top_k * theirs.expert_hidden != model.top_k * model.expert_hidden:
        keys += ["top_k", "expert_hidden"]
    keys += ["vocab_size"] if theirs.vocab_size > model.vocab_size else []
    keys += ["block_size"] if theirs.pos == "learned" and theirs.block_size < model.block_size else []
    needed = {key: getattr(theirs, key) for key in keys if getattr(theirs, key) != getattr(model, key)}
    biases = [name for name in source.state if name.endswith(".bias") and not name.endswith("router.bias")]
    if not model.bias and any(source.state[name].any() for name in biases):
        needed["bias"] = True
    return [f"--model.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in needed.items()]


# ---- a run


def of_run(place, data):
    config = configure.load(place / "config.toml")
    steps = checkpoint.steps(place / "checkpoints")
    if not steps:
        raise RunError("a run without a checkpoint; train it first")
    with torch.device("meta"):
        model = GPT(config.model)
    facts = checkpoint.load_model(place / "checkpoints", steps[-1], model.to_empty(device="cpu"))
    meta = read_meta(data)
    if facts.get("tokenizer") != fingerprint(meta)["tokenizer"]:
        known = (name for name in TOKENIZERS if sha256_of(identity(name)) == facts.get("tokenizer"))
        raise _other_tokenizer(next(known, "another"), data, meta)
    return Source(f"a run at step {steps[-1]}", config.model, model.state_dict(), [])


def _other_tokenizer(theirs, data, meta):
    return RunError(
        f"its tokenizer is {theirs}, that of the data set {data} is {meta.tokenizer['name']}. Prepare the text with "
        f"the tokenizer of the weights (python -m data.prepare … --tokenizer), or begin with other weights"
    )


# ---- what transformers, or scripts.export, wrote


def of_transformers(place, model, data):
    """`model` tells how a GPT-2's hidden width is called here: top_k times expert_hidden."""
    settings = read_json(place / "config.json")
    kind = settings.get("model_type")
    try:
        if kind == "gpt2":
            described, notes = of_gpt2(settings, model)
        elif kind == "nanokern":
            described, notes = of_export(settings, model), []
        else:
            raise RunError(f"config.json: model_type is {kind!r}; weights are taken of gpt2 and nanokern alone")
        state = (from_gpt2 if kind == "gpt2" else from_hf)(read_tensors(place))
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise RunError(f"config.json: {'; '.join(faults)}. No model here can have these weights") from error
    except KeyError as error:
        raise RunError(f"{error} is missing, so it is not whole; fetch it again") from error
    except ValueError as error:
        raise RunError(f"{error}; weights are taken of language models alone, and of those all") from error
    if described.tie_embeddings:
        state.pop("lm_head.weight", None)  # older files hold it a second time
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in GPT(described).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in [*shapes, *found]:
        if shapes.get(name) != found.get(name):
            raise RunError(
                f"config.json and weights do not belong together: {name} is {found.get(name, 'missing')}, expected "
                f"{shapes.get(name, 'none')}; fetch both again"
            )
    check_vocabulary(place, settings, described.vocab_size, data)
    return Source("a GPT-2 checkpoint" if kind == "gpt2" else "an exported model", described, state, notes)


def of_gpt2(settings, model):
    """(Model, what is computed otherwise) of a GPT2Config as a dict."""
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if settings.get(key, usual) is not usual:
            raise RunError(f"config.json: {key} is {settings[key]}, which no model here computes; take other weights")
    activation, epsilon = settings.get("activation_function", GELU[0]), settings.get("layer_norm_epsilon", 1e-5)
    if activation not in ("gelu", *GELU):
        raise RunError(f"config.json: activation_function is {activation!r}, ours is GELU; take other weights")
    notes = [] if activation == "gelu" else [f"{activation} there is the exact GELU here, up to 5e-4 apart"]
    notes += [] if epsilon == 1e-5 else [f"layer_norm_epsilon was {epsilon} there and is 1e-05 here"]
    described = {key: settings[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    described |= {"block_size": settings["n_positions"], "router": "dense", "pos": "learned", "bias": True}
    described |= width(settings.get("n_inner") or 4 * settings["n_embd"], model)
    return Model(**described, tie_embeddings=settings.get("tie_word_embeddings", True)), notes


def of_export(settings, model):
    """Model of a NanoKernConfig (scripts/export/configuration_nanokern.py) as a dict."""
    described = {ours: settings[theirs] for ours, theirs in EXPORTED.items()}
    described |= width(settings["intermediate_size"], model) if settings["router"] == "dense" else {}
    return Model(**described, tie_embeddings=settings.get("tie_word_embeddings", True))


def width(hidden, model):
    """A dense MLP's hidden width in two keys, by the top_k of `model` if it divides it."""
    top_k = 1 if hidden % model.top_k else model.top_k
    return {"top_k": top_k, "expert_hidden": hidden // top_k}


def read_tensors(place):
    """{name: tensor} of the first of FORMATS that is there. Of safetensors nothing is loaded before it is used."""
    for name in FORMATS:
        if (place / name).is_file():
            return read_file(place / name)
        index = place / f"{name}.index.json"
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(Path(str(file)).name == file for file in files.values()):
                raise RunError(f"{index.name} lists no files of this folder; fetch it again")
            return {name: tensor for file in set(files.values()) for name, tensor in read_file(place / file).items()}
    raise RunError(f"no weights in it, neither {' nor '.join(FORMATS)}; fetch it again")


def read_file(path):
    """{name: tensor}. Nothing but tensors is read, and nothing executed."""
    if not path.is_file():
        raise RunError(f"{path.name} is missing; fetch it again")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:  # training needs it for this alone
        raise RunError("safetensors is not installed: pip install safetensors") from error
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RunError(f"{path.name} cannot be read ({type(error).__name__}: cut off, or no such file)") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise RunError(f"{path.name} holds more than tensors; save it with save_pretrained of transformers")
    return tensors


def read_json(path):
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path.name} cannot be read ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise RunError(f"{path.name} holds no settings; fetch it again")
    return value


def check_vocabulary(place, settings, rows, data):
    """Raises RunError if it can be told that ids of the weights, `rows` of them, are not those of the data set: by
    their number, by the id that ends a document, and by the vocabulary beside them, token by token of printable
    ASCII."""
    meta = read_meta(data)
    ids, end = meta.tokenizer["vocab_size"], settings.get("eos_token_id")
    if rows < ids:
        raise _other_tokenizer(f"one of {rows} ids", data, meta)
    if type(end) is int and end < rows and end != meta.tokenizer["eot"]:  # beyond lies GPT2Config's default
        raise _other_tokenizer(f"one whose texts end with id {end}", data, meta)
    if (place / "tokenizer.json").is_file():
        described = read_json(place / "tokenizer.json").get("model")
        vocabulary = described.get("vocab") if isinstance(described, dict) else None
    elif (place / "vocab.json").is_file():
        vocabulary = read_json(place / "vocab.json")
    else:
        return
    if not isinstance(vocabulary, dict):
        raise _other_tokenizer("not a byte-level one", data, meta)
    tokenizer = open_tokenizer(data)
    for text, number in vocabulary.items():
        printable = re.fullmatch("[!-~Ġ]+", text)  # Ġ: a space, in the files of byte-level tokenizers
        if printable and number in range(ids) and tokenizer.decode([number]) != text.replace("Ġ", " "):
            raise _other_tokenizer(f"one whose id {number} is {text!r}", data, meta)
