"""The weights in a folder of transformers: the files that its from_pretrained reads, no others.

See `_get_resolved_checkpoint_files` and `get_checkpoint_shard_files` of transformers 5.23. Reading
them executes nothing.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from runtime import RunError
from runtime.checkpoint import LazyTensors

ONE_FILE = "model.safetensors"
INDEX_ENDING = ".safetensors.index.json"
INDEX = f"model{INDEX_ENDING}"
DIGEST = "nanokern_sha256"  # key of a safetensors file's metadata: `hash_tensors` of its tensors
ADAPTER = "adapter_config.json"  # of PEFT
# a checkpoint of transformers' distributed training; from_pretrained joins all files beside it
DISTRIBUTED_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# weights, for transformers or for another program, and indexes of them
ANY_WEIGHTS = re.compile(
    r".+(\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack)|\.index(\..+)?\.json)"
)


def read_tensors(place: Path, settings: dict[str, Any]) -> tuple[LazyTensors, list[str]]:
    """Check the files with the weights of a folder, one after another.

    Args:
        place: the folder.
        settings: its config.json.

    Returns:
        Tensors by name, which are read when they are needed, and a note on files that were not
        read, if there are any.

    Raises:
        RunError: a file is missing or damaged, two files differ on a tensor, or from_pretrained
            would add what is not read here.
    """
    source, files = find_weights(place, settings)
    tensors = LazyTensors({})
    open_file = lru_cache(maxsize=1)(partial(safe_open, framework="pt"))

    def read_tensor(path: Path, name: str) -> Tensor:
        return open_file(path).get_tensor(name)

    origin: dict[str, str] = {}  # file of a tensor
    for file in files:
        try:
            read = load_file(place / file)  # mapped to memory, not copied
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file} cannot be read ({error}); download it again") from error
        check_digest(place / file, read)
        for name in read.keys() & tensors:
            one, other = tensors[name], read[name]
            if one.dtype != other.dtype or not one.equal(other):
                raise RunError(
                    f"{name} differs between {origin[name]} and {file}, so they were not saved "
                    f"together (from_pretrained would use the last); download all files again"
                )
        for name in read:
            tensors.makers[name] = partial(read_tensor, place / file, name)
        origin.update(dict.fromkeys(read, file))
        del read  # before the next file is mapped
    strays = _list_strays(place, {source, *files})
    if not strays:
        return tensors, []
    return tensors, [f"reads {source}, as from_pretrained does; not read: {', '.join(strays)}"]


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_digest(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise RunError if a file of scripts.export has other tensors than it was written with.

    Other programs write no digest, nor do they keep it.
    """
    with safe_open(path, "pt") as file:
        written = (file.metadata() or {}).get(DIGEST)
    if written and written != hash_tensors(tensors):
        raise RunError(
            f"{path.name}: damaged: its weights differ from those that were exported (sha256); "
            "export or download it again"
        )


def find_weights(place: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    """Choose the files of a folder as transformers' from_pretrained does.

    That is the file that `transformers_weights` in config.json names, else model.safetensors, else
    model.safetensors.index.json. An index stands for the files that it names: all their tensors
    are read, whatever it says on each.

    Args:
        place: the folder.
        settings: its config.json.

    Returns:
        The file that was chosen, and the files with the tensors, all below `place`.

    Raises:
        RunError: one is missing; or from_pretrained would add what is not read here.
    """
    if (place / ADAPTER).is_file():
        raise RunError(
            f"{ADAPTER}: from_pretrained adds this adapter to the weights where PEFT is installed; "
            f"merge it (PEFT's merge_and_unload, then save_pretrained), or move it elsewhere"
        )
    for path in sorted(place.iterdir()):
        if DISTRIBUTED_FILE.fullmatch(path.name):
            raise RunError(
                f"{path.name} is of a distributed checkpoint, which from_pretrained would read; "
                f"load it by transformers, and give a folder that save_pretrained then wrote"
            )
    source = _choose_source(place, settings.get("transformers_weights"))
    if not source.endswith(INDEX_ENDING):
        return source, [source]
    shards = read_json(place / source).get("weight_map")
    files = list(shards.values()) if isinstance(shards, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        raise RunError(f"{source}: weight_map names no files; download it again")
    files = sorted(set(files))
    for file in files:
        _check_is_inside(place, file, source)
    return source, files


def _choose_source(place: Path, named: Any) -> str:
    """The file of weights, or index, of a folder whose config.json names `named` or nothing."""
    if named is None:
        for name in (ONE_FILE, INDEX):
            if (place / name).is_file():
                return name
        strays = ", ".join(_list_strays(place, set())) or "none"
        raise RunError(
            f"neither {ONE_FILE} nor {INDEX} (other files of weights: {strays}); download it, or "
            f"convert older formats by transformers' save_pretrained. Files of other names are "
            f"not read, nor are pickles, which could run code"
        )
    if not str(named).endswith((".safetensors", INDEX_ENDING)):
        raise RunError(
            f"config.json: transformers_weights is {named!r}, neither a file *.safetensors nor an "
            f"index *{INDEX_ENDING}; remove it, or correct it"
        )
    _check_is_inside(place, named, "config.json")
    return named


def _check_is_inside(place: Path, name: str, source: str) -> None:
    """Raise RunError unless `name`, which the file `source` names, is a file below `place`."""
    path = Path(os.path.abspath(place / name))  # not resolve(): in the hub's cache files are links
    if not path.is_relative_to(os.path.abspath(place)) or not path.is_file():
        raise RunError(f"{source} names {name}, and no such file is in the folder; download it")


def _list_strays(place: Path, read: set[str]) -> list[str]:
    """Files of weights and indexes below `place` that are not in `read`, by relative path."""
    strays = []
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if ANY_WEIGHTS.fullmatch(name) and name not in read and path.is_file():
            strays.append(name)
    return strays


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises RunError if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path.name} is unreadable ({error}); download it again") from error
    if not isinstance(value, dict):
        raise RunError(f"{path.name} is not a JSON object; download it again")
    return value
