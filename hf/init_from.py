"""Initial weights of a run (train.init_from): of GPT-2, an open mixture, an export, or a run.

They are read from a local folder and checked before anything else of the run starts. A run that
resumes from its own checkpoint does not read them. Reading them executes nothing.
"""

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

import configure
from attention import kv_heads
from common.files import DamagedFile, is_file, is_folder, read_json
from configure import Config
from configure.check import find_conflicts
from configure.schema import Model, select_model_keys
from data.bins import Meta, fingerprint, read_meta
from data.tokenizer import TOKENIZER_FILE, open_tokenizer
from gate_norm import gate_scale
from hf.formats import BUFFERS, FORMATS, Format, Row, dense_width
from hf.match_gates import match_gates, take_routers
from hf.tokenizer_files import make_vocabulary
from hf.weight_files import read_tensors
from model import GPT
from router import Router
from runtime import RankError, RunError, distributed, folder
from runtime.checkpoint import LazyTensors, open_weights
from runtime.parallel import copy_shard
from runtime.runs import Run, check_settings

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Weights(NamedTuple):
    """Weights that were checked and fit a GPT of the run's model."""

    # by model.py's names; an embedding may have fewer rows than the run's model
    state: LazyTensors
    notes: list[str]  # to print: where they come from, and what the run's model does differently
    routers: dict[str, Router]  # by name, the old routers that the run's model replaces

    @torch.no_grad()
    def load_into(self, model: GPT, ranks: distributed.Ranks) -> None:
        """Move the weights into `model`, which empties `state`, and print the notes.

        Raises RunError, on all ranks, if the model then differs between ranks.
        """
        own = model.state_dict()
        checksum = 0
        while self.state:
            name, tensor = self.state.popitem()
            tensor = tensor.to(own[name].dtype)
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            checksum = zlib.crc32(content, checksum)
            copy_shard(tensor, own[name])
            del tensor  # before the next is read
        if len(set(distributed.gather(checksum, ranks.control))) > 1:
            raise RunError(
                "train.init_from holds different weights on different ranks: "
                "copy one folder to all nodes"
            )
        if ranks.rank == 0:
            print("; ".join(self.notes))

    def match_gates(
        self,
        model: GPT,
        config: Config,
        batches: Iterator[tuple[Tensor, Tensor]],
        autocast: torch.autocast,
        ranks: distributed.Ranks,
    ) -> None:
        """Scale the gates of new routers to the old ones', unless the config sets them."""
        settings = config.model
        is_set = settings.gate_norm or settings.gate_scale != 1
        if self.routers and not is_set:
            factors = match_gates(model, self.routers, batches, autocast, ranks)
            text = f"the gates of {settings.router} times {factors}, to the old router's norm"
            distributed.print_once(f"{folder.path_of(config)}: {text}")


class Source(NamedTuple):
    """A model read from a folder."""

    description: str  # such as "a run at step 4"
    model: Model
    state: LazyTensors  # by model.py's names
    notes: list[str]  # on differences in computation


def read_initial_weights(config: Config) -> Weights:
    """Read and check the weights that train.init_from names.

    Raises RunError if they are incomplete, do not fit config.model (the message has every override
    that is needed), or belong to another tokenizer than the data set's.
    """
    place = Path(config.train.init_from)
    data = config.data.folders[0]  # all have one tokenizer
    try:
        source = _read_folder(place, data)
        overrides = _list_overrides(source, config.model)
        if overrides:
            raise RunError(
                f"{source.description}, whose weights do not fit this model. "
                f"Add {' '.join(overrides)}"
            )
    except (RunError, configure.ConfigError, DamagedFile, OSError) as error:
        remedy = "; download it again" if isinstance(error, DamagedFile) else ""
        message = f"train.init_from = {place}: {error}{remedy}"
        if distributed.local_rank() > 0:
            raise RunError(message) from error
        raise RankError(message) from error  # of one rank per node: others may have the folder
    model = source.model
    state = source.state
    origin = f"{folder.path_of(config)}: starts from {place}, {source.description}"
    notes = [origin, *source.notes]
    changes = _find_changes(model, config.model)
    notes.extend(changes.values())
    routers, centred = take_routers(state, model, config.model)
    notes.extend(centred)
    notes.extend(_fit_state(state, config.model, changes))
    return Weights(state, notes, routers)


def _list_overrides(source: Source, model: Model) -> list[str]:
    """The arguments of train.py that make `model` fit the weights; none if it fits already."""
    old = source.model
    keys = select_model_keys("fixed_by_weights") + _find_mlp_keys(old, model)
    if old.pos == "rope":
        keys.append("rope_base")
    elif old.block_size < model.block_size:  # positions are weights
        keys.append("block_size")
    if kv_heads(old) != (model.n_kv_head or old.n_head):  # n_head may be overridden, too
        keys.append("n_kv_head")
    if old.vocab_size > model.vocab_size:
        keys.append("vocab_size")
    if _has_biases(source.state):
        keys.append("bias")
    overrides = []
    for key in keys:
        value = getattr(old, key)
        if value != getattr(model, key):
            text = value if isinstance(value, str) else json.dumps(value)
            overrides.append(f"--model.{key}={text}")
    return overrides


def _has_biases(state: Mapping[str, Tensor]) -> bool:
    """Return True if a bias outside routers is not 0. GPT-2 has biases, which may all be 0."""
    names = [name for name in state if name.endswith(".bias") and "router" not in name]
    return any(state[name].any() for name in names)


def _find_mlp_keys(old: Model, model: Model) -> list[str]:
    """The keys that give the MLPs and experts of `model` the shapes that `old` has."""
    if old.router == "dense":
        same_width = dense_width(old) == dense_width(model)
        return ["router"] if same_width else ["router", "top_k", "expert_hidden", "n_shared_expert"]
    keys = ["n_expert", "expert_hidden", "n_shared_expert"]
    if model.router == "dense":
        return ["router", *keys, "top_k"]
    both_hash = old.has_tables and model.has_tables  # the table of a layer has K columns
    if both_hash or model.top_k > old.n_expert:
        keys.append("top_k")
    return keys


def _find_changes(old: Model, model: Model) -> dict[str, str]:
    """Notes, by key, on settings that make `model` compute something else with the same weights."""
    keys = ["norm_eps", "vocab_size"]  # new ids keep their random initialisation
    if old.pos == "learned":  # the first positions are used
        keys.append("block_size")
    if old.router != "dense":
        keys += select_model_keys("chooses")
    values = {key: (getattr(old, key), getattr(model, key)) for key in keys}
    if old.router != "dense":
        values["gate_scale"] = (gate_scale(old), gate_scale(model))  # of model.gate_norm, too
    changes = {}
    for key, (before, now) in values.items():
        if before != now:
            changes[key] = f"model.{key} changes from {before} to {now}"
    return changes


def _fit_state(
    state: MutableMapping[str, Tensor], model: Model, changes: Collection[str]
) -> list[str]:
    """Reduce `state`, in place, to the state of a GPT of `model`, whose `changes` are keys.

    Returns notes on what is missing or not used.
    """
    notes = []
    own = _meta_state(model)
    unused = []
    # it follows from the config; else match_gates may have set it
    new_scale = not {"router", "top_k", "gate_scale"}.isdisjoint(changes)
    new_scale |= model.gate_norm > 0 and "n_hash_layer" in changes
    for name in list(state):
        if new_scale and name.endswith("router.c"):
            del state[name]
            continue
        other_router = "router" in changes and name.endswith("selection_bias")
        if (name not in own or other_router) and state.pop(name).any():
            unused.append(name)
    if "wpe.weight" in state:
        state["wpe.weight"] = state["wpe.weight"][: model.block_size]
    missing = [name for name in own if name not in state and not name.endswith(BUFFERS)]
    if missing:
        notes.append(f"missing, so initialised as usual: {_list_once(missing)}")
    if unused:
        notes.append(f"not used: {_list_once(unused)}")
    return notes


def _list_once(names: list[str]) -> str:
    """Names of weights, each once, not in each block."""
    return ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in names))


def _meta_state(model: Model) -> dict[str, Tensor]:
    """Parameters and buffers of a GPT on the meta device: shapes without memory."""
    with torch.device("meta"):
        return GPT(model).state_dict()


def _read_folder(place: Path, data: Path) -> Source:
    """The model in `place`, of any kind, for a run on the data set `data`."""
    if is_file(place / "config.json"):
        return _read_transformers(place, data)
    if is_file(place / "config.toml"):
        return _read_run(place, data)
    if not is_folder(place):
        if place.is_absolute():
            raise RunError("no such folder; name an export, a run, or a download from the hub")
        raise RunError(
            f"no such folder; from the Hugging Face hub: hf download {place} --include '*.json' "
            f"--include '*.safetensors' --local-dir {place.name}"
        )
    raise RunError(
        "contains neither a config.json of transformers nor a run's config.toml; give a folder "
        "that transformers or scripts.export wrote, or a run such as runs/quickstart-kern"
    )


def _read_run(place: Path, data: Path) -> Source:
    """The last checkpoint of a run."""
    run = Run(place)
    if not run.checkpoints:
        raise RunError("the run has no checkpoint; train it first")
    with torch.device("meta"):
        shapes = GPT(run.config.model)
    state, metadata = open_weights(run.checkpoint_folder, run.last_step, shapes)
    check_settings(run.config, metadata, place)
    meta = read_meta(data)
    if metadata.get("tokenizer") != fingerprint(meta)["tokenizer"]:
        raise _wrong_tokenizer("another", data, meta)
    return Source(f"a run at step {run.last_step}", run.config.model, state, [])


def _read_transformers(place: Path, data: Path) -> Source:
    """A folder that transformers or scripts.export wrote."""
    settings = read_json(place / "config.json", dict[str, Any])
    kind = str(settings.get("model_type"))
    if kind not in FORMATS:
        kinds = ", ".join(FORMATS)
        raise RunError(
            f"config.json: model_type is {kind!r}, expected one of {kinds}; use other weights"
        )
    form = FORMATS[kind]
    described = _read_model(form, settings)
    tensors = LazyTensors(form.unify_names(read_tensors(place, settings).data))
    # older files have it, too, where it is the embedding
    head = tensors.pop("lm_head.weight", None) if described.tie_embeddings else None
    own = _meta_state(described)
    _check_shapes(tensors, form.from_own(own, described))
    _check_vocabulary(place, settings, described.vocab_size, data)
    readers = {}
    for name in own:
        if not name.endswith(form.skipped):
            readers[name] = partial(_join, tensors, form.find_row(name, described))
    state = LazyTensors(readers)
    # transformers does not tie these
    if head is not None and not head.float().equal(state["wte.weight"].float()):
        raise RunError(
            "config.json: tie_word_embeddings is true, and lm_head.weight differs from the "
            "embedding; set it to false there, or use other weights"
        )
    notes = []
    activation = settings.get("activation_function", "gelu_new")
    if kind == "gpt2" and activation != "gelu":
        notes.append(f"{activation} is computed as exact GELU, up to 5e-4 apart")
    return Source(f"a model of class {form.architecture}", described, state, notes)


def _join(tensors: Mapping[str, Tensor], row: Row) -> Tensor:
    return row.join([tensors[name] for name in row.names])


def _read_model(form: Format, settings: dict[str, Any]) -> Model:
    """The [model] of a config.json; a dense MLP is one expert."""
    try:
        model = Model(**form.read_config(settings))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise RunError(f"config.json: {key}: {fault['msg']}; use other weights") from error
    except (TypeError, AttributeError) as error:
        raise RunError(
            f"config.json: a value has the wrong type ({error}); download it again"
        ) from error
    for conflict in find_conflicts(Config(model=model)):
        fault, _, _ = conflict.partition("; set ")
        raise RunError(f"config.json: {fault}; use other weights")
    width = model.n_embd // model.n_head
    head_dim = settings.get("head_dim")
    if head_dim not in (width, None):
        raise RunError(
            f"config.json: head_dim is {head_dim!r}, and model.py computes {width} only; "
            f"use another model"
        )
    return model


def _check_shapes(tensors: Mapping[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise RunError unless `tensors` have the names and shapes of `expected` and valid values."""
    for name in dict.fromkeys([*expected, *tensors]):
        shape = tuple(tensors[name].shape) if name in tensors else "missing"
        wanted = tuple(expected[name].shape) if name in expected else "none"
        if shape != wanted:
            raise RunError(
                f"config.json and the weights do not match: {name} is {shape}, "
                f"expected {wanted}; download both again"
            )
        tensor = tensors[name]
        if not name.endswith("hash_table") and tensor.dtype not in FLOATS:
            raise RunError(
                f"{name} ({tensor.dtype}) is not floating point; use weights that are not quantized"
            )
        if not tensor.isfinite().all():
            raise RunError(f"{name} contains NaN or Inf; use other weights")


class TokenizerModel(BaseModel):
    """The part of a tokenizer.json with the ids: by text, or in Unigram's their order."""

    vocab: dict[str, int] | list[tuple[str, float]]


class TokenizerBody(BaseModel):
    """What is read of a tokenizer.json."""

    model: TokenizerModel


def _check_vocabulary(place: Path, settings: dict[str, Any], rows: int, data: Path) -> None:
    """Raise RunError if the ids of the weights are visibly not the ids of the data set.

    Compares their number (`rows`), the id that ends a document, and the vocabulary in
    tokenizer.json if there is one.
    """
    meta = read_meta(data)
    if rows < meta.tokenizer["vocab_size"]:
        raise _wrong_tokenizer(f"one of {rows} ids", data, meta)
    end = settings.get("eos_token_id")
    is_id = type(end) is int and end < rows  # GPT2Config's default may be above `rows`
    if is_id and end != meta.tokenizer["eot"]:
        raise _wrong_tokenizer(f"one whose texts end with id {end}", data, meta)
    if not is_file(place / TOKENIZER_FILE):
        return
    vocab = read_json(place / TOKENIZER_FILE, TokenizerBody).model.vocab
    if isinstance(vocab, list):
        vocab = {text: number for number, (text, _) in enumerate(vocab)}
    for text, number in make_vocabulary(open_tokenizer(data)).items():
        if vocab.get(text, number) != number:
            raise _wrong_tokenizer(f"one whose id of {text!r} is {vocab[text]}", data, meta)


def _wrong_tokenizer(difference: str, data: Path, meta: Meta) -> RunError:
    return RunError(
        f"its tokenizer is {difference}, that of the data set {data} is {meta.tokenizer['name']}. "
        f"Prepare the text with the tokenizer of the weights "
        f"(python -m data.prepare … --tokenizer), or use other weights"
    )
