"""Initial weights of a run (train.init_from): a model of Hugging Face, GPT-2 or an open MoE, an export, or a run.

They are read from a local folder and checked before anything else of the run begins. A run that resumes from a
checkpoint of its own does not look at them. Reading them executes nothing.
"""

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import configure
from attention import kv_heads
from configure import Config
from configure.schema import Model
from data.bins import Meta, fingerprint, open_tokenizer, read_meta, sha256_of
from data.tokenizer import TOKENIZERS, FileTokenizer, identity
from gate_norm import gate_scale
from model import GPT
from router import ROUTERS
from runtime import RankError, RunError, checkpoint, distributed, folder
from runtime.names import BUFFERS, from_gpt2, from_hf
from runtime.open_moe import FAMILIES, from_open, read_open_config

WEIGHTS = "model.safetensors"  # or split into several files, listed in that with .index.json
GPT2 = {  # key of GPT2Config: its default, and what else is close enough to what model.py computes
    "activation_function": ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
EXPORTED = {  # key of [model]: key of NanoKernConfig (scripts/export/configuration_nanokern.py)
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "top_k": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
} | {key: key for key in ("vocab_size", "router", "n_expert", "gate_scale", "pos", "bias")}

EXPORTED_IF_SET = {  # the same for keys that exports have only where the value is not our default
    "n_kv_head": "num_key_value_heads",
    "activation": "hidden_act",
} | {key: key for key in ("qk_norm", "gated", "n_shared_expert", "n_dense_layer", "norm", "norm_eps", "rope_base")}


class Weights(NamedTuple):
    """Weights found in a folder."""

    source: str  # in words, such as "a run at step 4"
    model: Model  # the model they belong to
    state: dict[str, Tensor]  # by model.py's names; an embedding may have fewer rows than the run's model
    notes: list[str]  # to print: where they come from, and what the run's model does differently


def read_initial_weights(config: Config) -> Weights | None:
    """Read and check the weights that train.init_from names; None if it is empty.

    Raises:
        RunError: they are incomplete, do not fit config.model (the message has every override that is needed), or
            belong to another tokenizer than the data set's.
    """
    if not config.train.init_from:
        return None
    place, data = Path(config.train.init_from), config.data.folders[0]  # all have one tokenizer
    try:
        weights = _read_folder(place, config.model, data)
        for name, tensor in weights.state.items():
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                raise RunError(f"{name} ({tensor.dtype}) is not floating point, or contains NaN or Inf; use others")
        needed = _find_overrides(weights, config.model)
        if needed:
            raise RunError(f"{weights.source}, whose weights do not fit this model. Add {' '.join(needed)}")
    except (RunError, configure.ConfigError) as error:
        # One rank per node reports a RankError: other nodes may have the folder.
        raise (RunError if distributed.local_rank() else RankError)(f"train.init_from = {place}: {error}") from error
    weights.notes.insert(0, f"{folder.path_of(config)}: starts from {place}, {weights.source}")
    _drop_unused(weights, config.model)
    return weights


@torch.no_grad()
def load_initial_weights(model: GPT, weights: Weights, ranks: distributed.Ranks) -> None:
    """Move `weights` into `model`, which empties weights.state, and print the notes.

    Raises:
        RunError: on all ranks, if the model then differs between ranks.
    """
    own = model.state_dict()
    while weights.state:
        name, tensor = weights.state.popitem()
        own[name][: len(tensor)].copy_(tensor)
    checksum = sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in own.values())
    if len(set(distributed.gather(checksum, ranks.control))) > 1:
        raise RunError("train.init_from holds different weights on different ranks: copy one folder to all nodes")
    if ranks.rank == 0:
        print("; ".join(weights.notes))


def _drop_unused(weights: Weights, model: Model) -> None:
    """Reduce weights.state to what a GPT of `model` takes, and note what is missing, unused or different."""
    state, notes, own = weights.state, weights.notes, _meta_state(model)
    for key in ("router", "top_k", "gate_scale", "norm_eps"):
        value = gate_scale if key == "gate_scale" else attrgetter(key)  # what model.gate_norm makes of it
        before, now = value(weights.model), value(model)
        if before != now and (ROUTERS[model.router] is not None or key == "norm_eps"):
            notes.append(f"model.{key} changes from {before} to {now}")
    unused = []
    for name in list(state):
        other_router = weights.model.router != model.router and name.endswith("selection_bias")
        if name.endswith("router.c"):  # a constant that follows from the config
            del state[name]
        elif name not in own or other_router:
            unused += [name] if state.pop(name).any() else []
    if "wpe.weight" in state and len(state["wpe.weight"]) > model.block_size:
        notes.append(f"only the first {model.block_size} of {len(state['wpe.weight'])} positions are used")
        state["wpe.weight"] = state["wpe.weight"][: model.block_size]
    rows = len(state["wte.weight"])
    if rows < model.vocab_size:
        notes.append(f"ids {rows} to {model.vocab_size - 1} are missing and keep their random initialisation")
    missing = [name for name in own if name not in state and not name.endswith(BUFFERS)]
    for names, meaning in ((missing, "missing, so initialised as usual"), (unused, "not used")):
        kinds = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in names)  # each once, not in each block
        notes += [f"{meaning}: {', '.join(kinds)}"] if kinds else []


def _find_overrides(weights: Weights, model: Model) -> list[str]:
    """The overrides under which `weights` fit into `model`; none if they fit already."""
    theirs = weights.model
    keys = ["n_layer", "n_head", "qk_norm", "n_embd", "activation", "gated", "norm", "pos", "tie_embeddings"]
    dense, was_dense = ROUTERS[model.router] is None, ROUTERS[theirs.router] is None
    keys += ["router"] if dense != was_dense else []
    keys += ["n_kv_head"] if kv_heads(theirs) != (model.n_kv_head or theirs.n_head) else []  # once n_head is theirs
    keys += ["rope_base"] if theirs.pos == "rope" else []
    if not was_dense:
        keys += ["n_expert", "expert_hidden", "n_shared_expert", "n_dense_layer"]
        keys += ["top_k"] if dense or theirs.n_dense_layer or model.top_k > theirs.n_expert else []
    elif _dense_width(theirs) != _dense_width(model):
        keys += ["top_k", "expert_hidden", "n_shared_expert"]
    keys += ["vocab_size"] if theirs.vocab_size > model.vocab_size else []
    keys += ["block_size"] if theirs.pos == "learned" and theirs.block_size < model.block_size else []
    needed = {key: getattr(theirs, key) for key in keys if getattr(theirs, key) != getattr(model, key)}
    biases = [name for name in weights.state if name.endswith(".bias") and not name.endswith("router.bias")]
    if not model.bias and any(weights.state[name].any() for name in biases):
        needed["bias"] = True
    return [f"--model.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in needed.items()]


def _dense_width(model: Model) -> int:
    return (model.top_k + model.n_shared_expert) * model.expert_hidden


def _meta_state(model: Model) -> dict[str, Tensor]:
    """Parameters and buffers of a GPT on the meta device: shapes without memory."""
    with torch.device("meta"):
        return GPT(model).state_dict()


def _read_folder(place: Path, model: Model, data: Path) -> Weights:
    """The weights in `place`, of whichever kind, for a run of `model` on the data set `data`."""
    if not place.is_dir():
        on_hub = not place.exists() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(place))
        raise RunError(
            "no such folder. Weights are only read from this machine"
            + (f"; from the Hugging Face hub: hf download {place} --local-dir {place.name}" if on_hub else "")
        )
    if (place / "config.json").is_file():
        return _read_transformers(place, model, data)
    if (place / "config.toml").is_file():
        return _read_run(place, data)
    raise RunError(
        f"contains neither a config.json (with {WEIGHTS}) nor a run's config.toml; give a folder that transformers "
        f"or scripts.export wrote, or a run such as runs/quickstart-kern"
    )


def _read_run(place: Path, data: Path) -> Weights:
    """The last checkpoint of a run."""
    config = configure.load(place / "config.toml")
    steps = checkpoint.steps(place / "checkpoints")
    if not steps:
        raise RunError("a run without a checkpoint; train it first")
    with torch.device("meta"):
        model = GPT(config.model)
    metadata = checkpoint.load_model(place / "checkpoints", steps[-1], model.to_empty(device="cpu"))
    meta = read_meta(data)
    if metadata.get("tokenizer") != fingerprint(meta)["tokenizer"]:
        known = (name for name in TOKENIZERS if sha256_of(identity(name)) == metadata.get("tokenizer"))
        raise _wrong_tokenizer(next(known, "another"), data, meta)
    return Weights(f"a run at step {steps[-1]}", config.model, model.state_dict(), [])


def _read_transformers(place: Path, model: Model, data: Path) -> Weights:
    """A folder that transformers or scripts.export wrote. A dense MLP's width is described by model.top_k."""
    settings = _read_json(place / "config.json")
    kind, notes, hidden = str(settings.get("model_type")), [], 0
    if kind not in ("gpt2", "nanokern", *FAMILIES):
        known = ", ".join(["gpt2", *FAMILIES, "nanokern"])
        raise RunError(f"config.json: model_type is {kind!r}, expected one of {known}; use other weights")
    try:
        if kind == "gpt2":
            notes = _check_gpt2(settings)
            keys = {key: settings[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
            keys |= {"block_size": settings["n_positions"], "router": "dense", "pos": "learned", "bias": True}
            keys |= {"norm_eps": settings.get("layer_norm_epsilon", 1e-5)}
            hidden = settings.get("n_inner") or 4 * settings["n_embd"]
        elif kind in FAMILIES:
            keys = read_open_config(settings)
        else:
            keys = {ours: settings[theirs] for ours, theirs in EXPORTED.items()}
            later = {ours: settings.get(theirs) for ours, theirs in EXPORTED_IF_SET.items()}
            keys |= {ours: value for ours, value in later.items() if value is not None}
            hidden = settings["intermediate_size"]
        if keys["router"] == "dense":
            top_k = 1 if hidden % model.top_k else model.top_k
            keys |= {"top_k": top_k, "expert_hidden": hidden // top_k, "n_shared_expert": 0}
        described = Model(**keys, tie_embeddings=settings.get("tie_word_embeddings", kind not in FAMILIES))
        tensors = _read_tensors(place)
        state = from_open(tensors, kind) if kind in FAMILIES else (from_gpt2 if kind == "gpt2" else from_hf)(tensors)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise RunError(f"config.json: {'; '.join(faults)}; use other weights") from error
    except KeyError as error:
        raise RunError(f"{error} is missing; download the folder again") from error
    if described.tie_embeddings:
        state.pop("lm_head.weight", None)  # older files store the tied weight twice
    expected = _meta_state(described)
    if kind in FAMILIES:
        expected = {name: of for name, of in expected.items() if not name.endswith(BUFFERS)}
    for name in expected | state:
        found, wanted = (tuple(of[name].shape) if name in of else None for of in (state, expected))
        if found != wanted:
            raise RunError(
                f"config.json and the weights do not match: {name} is {found or 'missing'}, expected "
                f"{wanted or 'none'}; download both again"
            )
    _check_vocabulary(place, settings, described.vocab_size, data)
    known = {"gpt2": "a GPT-2 checkpoint", "nanokern": "an exported model"}
    return Weights(known.get(kind) or f"a model of class {FAMILIES[kind].architecture}", described, state, notes)


def _check_gpt2(settings: dict[str, Any]) -> list[str]:
    """Notes on what model.py computes differently from a GPT2Config. Raises RunError if that is more than rounding."""
    found = {key: settings.get(key, allowed[0]) for key, allowed in GPT2.items()}
    for key, allowed in GPT2.items():
        if found[key] not in allowed:
            raise RunError(f"config.json: {key} is {found[key]!r}, expected {allowed[0]!r}; use other weights")
    activation = found["activation_function"]
    return [] if activation == "gelu" else [f"{activation} is computed as exact GELU, up to 5e-4 apart"]


def _read_tensors(place: Path) -> dict[str, Tensor]:
    """All tensors in `place`."""
    index, names = place / f"{WEIGHTS}.index.json", {WEIGHTS}
    if index.is_file() and not (place / WEIGHTS).is_file():
        files = _read_json(index).get("weight_map")
        if not (isinstance(files, dict) and all(isinstance(name, str) for name in files.values())):
            raise RunError(f"{index.name}: its weight_map is not an object of file names; download it again")
        names = set(files.values())
    tensors = {}
    for name in sorted(names):
        try:
            tensors |= load_file(place / name)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{name} cannot be read ({error}); download it again, or convert older formats with transformers' "
                f"save_pretrained"
            ) from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path.name} is unreadable ({error}); download it again") from error
    if not isinstance(value, dict):
        raise RunError(f"{path.name} is not a JSON object; download it again")
    return value


def _check_vocabulary(place: Path, settings: dict[str, Any], rows: int, data: Path) -> None:
    """Raises RunError if the ids of the weights are visibly not those of the data set.

    Compares their number (`rows`), the id that ends a document, and where a vocabulary file is present every token of
    printable ASCII.
    """
    meta = read_meta(data)
    ids, end = meta.tokenizer["vocab_size"], settings.get("eos_token_id")
    if rows < ids:
        raise _wrong_tokenizer(f"one of {rows} ids", data, meta)
    if type(end) is int and end < rows and end != meta.tokenizer["eot"]:  # GPT2Config's default may be above `rows`
        raise _wrong_tokenizer(f"one whose texts end with id {end}", data, meta)
    files = [place / name for name in ("tokenizer.json", "vocab.json") if (place / name).is_file()]
    if not files:
        return
    vocabulary = _read_json(files[0])
    if files[0].name == "tokenizer.json":
        described = vocabulary.get("model")
        vocabulary = described.get("vocab") if isinstance(described, dict) else None
    if not isinstance(vocabulary, dict):
        raise _wrong_tokenizer("not a byte-level one", data, meta)
    tokenizer = open_tokenizer(data)
    for text, number in vocabulary.items():
        if isinstance(tokenizer, FileTokenizer):
            known = number not in range(ids) or tokenizer.file.id_to_token(number) == text
        else:
            printable = re.fullmatch("[!-~Ġ]+", text)  # Ġ: a space, in the files of byte-level tokenizers
            known = not printable or number not in range(ids) or tokenizer.decode([number]) == text.replace("Ġ", " ")
        if not known:
            raise _wrong_tokenizer(f"one whose id {number} is {text!r}", data, meta)


def _wrong_tokenizer(theirs: str, data: Path, meta: Meta) -> RunError:
    return RunError(
        f"its tokenizer is {theirs}, that of the data set {data} is {meta.tokenizer['name']}. Prepare the text with "
        f"the tokenizer of the weights (python -m data.prepare … --tokenizer), or use other weights"
    )
