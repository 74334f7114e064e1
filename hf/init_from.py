"""Initial weights of a run (train.init_from): a model of Hugging Face, GPT-2 or an open MoE, an export, or a run.

They are read from a local folder and checked before anything else of the run begins. A run that
resumes from a checkpoint of its own does not look at them. Reading them executes nothing.
"""

import json
import re
from collections.abc import Iterator
from functools import reduce
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
from configure.check import find_conflicts
from configure.schema import Model, select_model_keys
from data.bins import Meta, fingerprint, open_tokenizer, read_meta
from data.tokenizer import TOKENIZER_FILE
from gate_norm import gate_scale
from hf.formats import BUFFERS, FORMATS, Format, dense_width
from hf.match_gates import match_gates, take_routers
from hf.tokenizer_files import make_vocabulary
from hf.upcycle import find_overrides, is_upcycled, upcycle
from model import GPT
from router import Router, find_spec
from runtime import RankError, RunError, checkpoint, distributed, folder

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Weights(NamedTuple):
    """Weights read from a folder, checked and ready for a GPT of the run's model."""

    source: str  # in words, such as "a run at step 4"
    model: Model  # the model they belong to
    # by model.py's names; an embedding may have fewer rows than the run's model
    state: dict[str, Tensor]
    notes: list[str]  # to print: where they come from, and what the run's model does differently
    routers: dict[str, Router]  # that the run's model replaces by others, by their names there

    @torch.no_grad()
    def load_into(self, model: GPT, ranks: distributed.Ranks) -> None:
        """Move the weights into `model`, which empties `state`, and print the notes.

        Raises RunError, on all ranks, if the model then differs between ranks.
        """
        own = model.state_dict()
        while self.state:
            name, tensor = self.state.popitem()
            own[name][: len(tensor)].copy_(tensor)
        checksum = sum(
            int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in own.values()
        )
        if len(set(distributed.gather(checksum, ranks.control))) > 1:
            raise RunError(
                "train.init_from holds different weights on different ranks: copy one folder to all nodes"
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
        """Compare the new routers of `model` with the old ones, if any, set their scale, and print a line."""
        if self.routers:
            text = match_gates(model, self.routers, config, batches, autocast, ranks)
            run = folder.path_of(config)
            distributed.print_once(f"{run}: on training windows, {text}")


def read_initial_weights(config: Config) -> Weights:
    """Read and check the weights that train.init_from names.

    Raises RunError if they are incomplete, do not fit config.model (the message has every override
    that is needed), or belong to another tokenizer than the data set's.
    """
    place, data = Path(config.train.init_from), config.data.folders[0]  # all have one tokenizer
    try:
        weights = _read_folder(place, config.model, data)
        if needed := _find_overrides(weights, config.model):
            raise RunError(
                f"{weights.source}, whose weights do not fit this model. Add {' '.join(needed)}"
            )
    except (RunError, configure.ConfigError) as error:
        # One rank per node reports a RankError: other nodes may have the folder.
        raise (RunError if distributed.local_rank() else RankError)(
            f"train.init_from = {place}: {error}"
        ) from error
    weights.notes.insert(0, f"{folder.path_of(config)}: starts from {place}, {weights.source}")
    if is_upcycled(weights.model, config.model):
        weights.notes.append(upcycle(config, weights.model, weights.state))
    weights.notes.extend(_describe_changes(weights.model, config.model))
    routers, notes = take_routers(weights.state, weights.model, config.model)
    weights.routers.update(routers)
    weights.notes.extend(notes)
    _fit_state(weights, config.model)
    return weights


def _find_overrides(weights: Weights, model: Model) -> list[str]:
    """The overrides under which `weights` fit into `model`; none if they fit already."""
    theirs = weights.model
    keys = [*select_model_keys("fixed_by_weights"), *_find_mlp_keys(theirs, model)]
    if theirs.pos == "rope":
        keys.append("rope_base")
    elif theirs.block_size < model.block_size:  # positions are weights
        keys.append("block_size")
    if kv_heads(theirs) != (model.n_kv_head or theirs.n_head):  # once n_head is theirs
        keys.append("n_kv_head")
    if theirs.vocab_size > model.vocab_size:
        keys.append("vocab_size")
    needed = {
        key: getattr(theirs, key) for key in keys if getattr(theirs, key) != getattr(model, key)
    }
    biases = [
        name
        for name in weights.state
        if name.endswith(".bias") and not name.endswith("router.bias")
    ]
    # GPT-2's may all be zero
    if not model.bias and any(weights.state[name].any() for name in biases):
        needed["bias"] = True
    if is_upcycled(theirs, model):
        needed |= find_overrides(theirs, model)
    return [
        f"--model.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in needed.items()
    ]


def _find_mlp_keys(theirs: Model, model: Model) -> list[str]:
    """The keys in which `model` must be like `theirs`, so that MLPs and experts have the same shapes."""
    dense, was_dense = find_spec(model.router) is None, find_spec(theirs.router) is None
    if was_dense:
        fits = not dense or dense_width(theirs) == dense_width(model)
        return [] if fits else ["top_k", "expert_hidden", "n_shared_expert"]
    keys = ["router"] if dense else []
    keys += ["n_expert", "expert_hidden", "n_shared_expert", "n_dense_layer"]
    hashed = theirs.n_hash_layer and model.n_hash_layer  # the table of a layer has K columns
    if dense or theirs.n_dense_layer or hashed or model.top_k > theirs.n_expert:
        keys.append("top_k")
    return keys


def _describe_changes(theirs: Model, model: Model) -> list[str]:
    """What `model` computes differently with the same weights."""
    keys = (
        ["router", "top_k", "n_hash_layer", "gate_scale"]
        if find_spec(theirs.router) is not None
        else []
    )
    before, now = (
        {**vars(settings), "gate_scale": gate_scale(settings)} for settings in (theirs, model)
    )
    return [
        f"model.{key} changes from {before[key]} to {now[key]}"
        for key in (*keys, "norm_eps")
        if before[key] != now[key]
    ]


def _fit_state(weights: Weights, model: Model) -> None:
    """Reduce weights.state to what a GPT of `model` takes, and note what is missing or not used."""
    state, notes, own, unused, theirs = (
        weights.state,
        weights.notes,
        _meta_state(model),
        [],
        weights.model,
    )
    before, now = ((m.router, m.top_k, gate_scale(m)) for m in (theirs, model))
    for name in list(state):
        other_router = theirs.router != model.router and name.endswith("selection_bias")
        # it follows from the config; otherwise train.match_gates may
        if name.endswith("router.c") and before != now:
            del state[name]  # have set it
        elif (name not in own or other_router) and state.pop(name).any():
            unused.append(name)
    if "wpe.weight" in state and len(state["wpe.weight"]) > model.block_size:
        notes.append(
            f"only the first {model.block_size} of {len(state['wpe.weight'])} positions are used"
        )
        state["wpe.weight"] = state["wpe.weight"][: model.block_size]
    rows = len(state["wte.weight"])
    if rows < model.vocab_size:
        notes.append(
            f"ids {rows} to {model.vocab_size - 1} are missing and keep their random initialisation"
        )
    missing = [name for name in own if name not in state and not name.endswith(BUFFERS)]
    if missing:
        notes.append(f"missing, so initialised as usual: {_list_once(missing)}")
    if unused:
        notes.append(f"not used: {_list_once(unused)}")


def _list_once(names: list[str]) -> str:
    """Names of weights, each once, not in each block."""
    return ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in names))


def _meta_state(model: Model) -> dict[str, Tensor]:
    """Parameters and buffers of a GPT on the meta device: shapes without memory."""
    with torch.device("meta"):
        return GPT(model).state_dict()


def _read_folder(place: Path, model: Model, data: Path) -> Weights:
    """The weights in `place`, of whichever kind, for a run of `model` on the data set `data`."""
    if not place.is_dir():
        raise RunError(
            f"no such folder; from the Hugging Face hub: hf download {place} --local-dir {place.name}"
        )
    if (place / "config.json").is_file():
        weights = _read_transformers(place, model, data)
    elif (place / "config.toml").is_file():
        weights = _read_run(place, data)
    else:
        raise RunError(
            "contains neither a config.json of transformers nor a run's config.toml; give a folder that transformers "
            "or scripts.export wrote, or a run such as runs/quickstart-kern"
        )
    for name, tensor in weights.state.items():
        if not tensor.isfinite().all():
            raise RunError(f"{name} contains NaN or Inf; use other weights")
    return weights


def _read_run(place: Path, data: Path) -> Weights:
    """The last checkpoint of a run."""
    config = configure.load(place / "config.toml")
    steps = checkpoint.steps(place / "checkpoints")
    if not steps:
        raise RunError("a run without a checkpoint; train it first")
    with torch.device("meta"):
        model = GPT(config.model)
    metadata = checkpoint.restore_weights(
        place / "checkpoints", steps[-1], model.to_empty(device="cpu")
    )
    meta = read_meta(data)
    if metadata.get("tokenizer") != fingerprint(meta)["tokenizer"]:
        raise _wrong_tokenizer("another", data, meta)
    return Weights(f"a run at step {steps[-1]}", config.model, model.state_dict(), [], {})


def _read_transformers(place: Path, model: Model, data: Path) -> Weights:
    """A folder that transformers or scripts.export wrote."""
    settings = _read_json(place / "config.json")
    kind = str(settings.get("model_type"))
    if kind not in FORMATS:
        raise RunError(
            f"config.json: model_type is {kind!r}, expected one of {', '.join(FORMATS)}; use other weights"
        )
    form, notes = FORMATS[kind], []
    described = _read_model(form, settings, model.top_k)
    activation = settings.get("activation_function", "gelu_new")
    if kind == "gpt2" and activation != "gelu":
        notes.append(f"{activation} is computed as exact GELU, up to 5e-4 apart")
    state = form.unify_names(_read_tensors(place))
    # older files store it twice
    head = state.pop("lm_head.weight", None) if described.tie_embeddings else None
    shapes = {
        name: t
        for name, t in _meta_state(described).items()
        if kind == "nanokern" or not name.endswith(BUFFERS)
    }
    _check_shapes(state, form.from_own(shapes))
    _check_vocabulary(place, settings, described.vocab_size, data)
    dtype = reduce(
        torch.promote_types,
        {tensor.dtype for tensor in state.values() if tensor.is_floating_point()},
    )
    own = {
        name: torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in shapes.items()
    }
    for name, view in form.from_own(own).items():
        view.copy_(state.pop(name))
    # transformers does not tie these
    if head is not None and not head.float().equal(own["wte.weight"].float()):
        raise RunError(
            "config.json: tie_word_embeddings is true, and lm_head.weight differs from the embedding; set it to false "
            "there, or use other weights"
        )
    return Weights(f"a model of class {form.architecture}", described, own, notes, {})


def _read_model(form: Format, settings: dict[str, Any], top_k: int) -> Model:
    """The [model] of a config.json; a dense MLP is described by `top_k`, if its width can be divided by it."""
    try:
        described = Model(**form.read_config(settings))
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise RunError(f"config.json: {'; '.join(faults)}; use other weights") from error
    except (TypeError, AttributeError) as error:
        raise RunError(
            f"config.json: a value has the wrong type ({error}); download it again"
        ) from error
    for conflict in find_conflicts(Config(model=described)):
        raise RunError(f"config.json: {conflict.partition('; set ')[0]}; use other weights")
    width = described.n_embd // described.n_head
    if settings.get("head_dim") not in (width, None):
        raise RunError(
            f"config.json: head_dim is {settings['head_dim']!r}, and model.py computes {width} only; use another model"
        )
    if described.router == "dense" and described.expert_hidden % top_k == 0:
        return described.model_copy(
            update={"top_k": top_k, "expert_hidden": described.expert_hidden // top_k}
        )
    return described


def _check_shapes(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise RunError if `state` has not the names and shapes of `expected`, or a tensor is not floating point."""
    for name in expected | state:
        shape = tuple(state[name].shape) if name in state else "missing"
        wanted = tuple(expected[name].shape) if name in expected else "none"
        if shape != wanted:
            raise RunError(
                f"config.json and the weights do not match: {name} is {shape}, expected {wanted}; download both again"
            )
        if name.endswith("hash_table"):
            known = torch.arange(len(expected[name.replace("hash_table", "weight")]))
            if not torch.isin(state[name], known).all():
                raise RunError(f"{name} names experts that do not exist; download it again")
        elif state[name].dtype not in FLOATS:
            raise RunError(
                f"{name} ({state[name].dtype}) is not floating point; use weights that are not quantized"
            )


def _read_tensors(place: Path) -> dict[str, Tensor]:
    """All tensors in `place`."""
    files, tensors = sorted(place.glob("model*.safetensors")), {}
    if not files:
        raise RunError(
            "no model*.safetensors; download it, or convert older formats by transformers' save_pretrained"
        )
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file.name} cannot be read ({error}); download it again") from error
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
    """Raise RunError if the ids of the weights are visibly not those of the data set.

    Compares their number (`rows`), the id that ends a document, and the vocabulary in
    tokenizer.json if there is one.
    """
    meta = read_meta(data)
    ids, end = meta.tokenizer["vocab_size"], settings.get("eos_token_id")
    if rows < ids:
        raise _wrong_tokenizer(f"one of {rows} ids", data, meta)
    # GPT2Config's default may be above `rows`
    if type(end) is int and end < rows and end != meta.tokenizer["eot"]:
        raise _wrong_tokenizer(f"one whose texts end with id {end}", data, meta)
    if not (place / TOKENIZER_FILE).is_file():
        return
    described = _read_json(place / TOKENIZER_FILE).get("model")
    vocabulary = described.get("vocab") if isinstance(described, dict) else None
    if not isinstance(vocabulary, dict):
        raise _wrong_tokenizer("not a byte-level one", data, meta)
    for text, number in make_vocabulary(open_tokenizer(data)).items():
        if vocabulary.get(text, number) != number:
            raise _wrong_tokenizer(f"one whose id of {text!r} is {vocabulary[text]}", data, meta)


def _wrong_tokenizer(theirs: str, data: Path, meta: Meta) -> RunError:
    return RunError(
        f"its tokenizer is {theirs}, that of the data set {data} is {meta.tokenizer['name']}. Prepare the text with "
        f"the tokenizer of the weights (python -m data.prepare … --tokenizer), or use other weights"
    )
