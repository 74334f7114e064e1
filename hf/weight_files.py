"""The weights in a folder of transformers: the files that its from_pretrained reads, no others.

See `_get_resolved_checkpoint_files` and `get_checkpoint_shard_files` of transformers 5.23. Reading
them executes nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.files import is_file, read_json
from runtime import RunError
from runtime.checkpoint import LazyTensors

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DIGEST = "nanokern_sha256"  # key of a safetensors file's metadata: `hash_tensors` of its tensors
ORIGIN = "nanokern"  # key of the same and of config.json: the run, its id, and which weights
ADAPTER = "adapter_config.json"  # of PEFT


class Index(BaseModel):
    """What is read of an index: the file of each tensor."""

    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def read_tensors(place: Path, settings: dict[str, Any]) -> LazyTensors:
    """Check the files with the weights of a folder, one after another.

    Args:
        place: the folder.
        settings: its config.json.

    Returns:
        Tensors by name, which are read when they are needed.

    Raises:
        RunError: a file is missing, damaged or of another export, two files have one tensor, or
            from_pretrained would read other weights.
    """
    tensors = LazyTensors({})
    for file in find_weights(place):
        try:
            opened: Any = safe_open(place / file, "pt")  # mapped to memory, not copied
            read = opened.get_tensors()
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file} cannot be read ({error}); download it again") from error
        metadata = opened.metadata() or {}
        digest = metadata.get(DIGEST)  # other programs write none
        if digest and digest != hash_tensors(read):
            raise RunError(
                f"{file}: damaged: its weights differ from those that were exported (sha256); "
                f"export or download it again"
            )
        expected = format_origin(settings.get(ORIGIN))
        origin = metadata.get(ORIGIN, expected)
        if origin != expected:
            raise RunError(
                f"{file}: of another export: it has {origin}, config.json {expected}; "
                f"copy all files of one export again"
            )
        for name in read:
            if name in tensors:
                raise RunError(
                    f"{name} is in {file} and in another file, so they were not saved together; "
                    f"download all files again"
                )
            tensors.data[name] = partial(opened.get_tensor, name)
    return tensors


def format_origin(origin: object) -> str:
    """The text of ORIGIN in a safetensors file's metadata, from config.json's."""
    return json.dumps(origin, sort_keys=True)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_weights(place: Path) -> list[str]:
    """Choose the files of a folder as transformers' from_pretrained does.

    That is model.safetensors, else the files that model.safetensors.index.json names: all their
    tensors are read, whatever it says on each.

    Args:
        place: the folder.

    Returns:
        The files with the tensors.

    Raises:
        RunError: one is missing; or from_pretrained would read other weights.
    """
    if is_file(place / ADAPTER):
        raise RunError(
            f"{ADAPTER}: from_pretrained adds this adapter to the weights where PEFT is installed; "
            f"merge it (PEFT's merge_and_unload, then save_pretrained), or move it elsewhere"
        )
    if is_file(place / ONE_FILE):
        return [ONE_FILE]
    if not is_file(place / INDEX):
        raise RunError(
            f"neither {ONE_FILE} nor {INDEX}; download it, or convert older formats by "
            f"transformers' save_pretrained. Files of other names are not read, nor are pickles, "
            f"which could run code"
        )
    files = sorted(set(read_json(place / INDEX, Index).weight_map.values()))
    for file in files:
        if Path(file).name != file or not is_file(place / file):
            raise RunError(f"{INDEX} names {file}, and no such file is in the folder; download it")
    return files
