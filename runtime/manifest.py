"""manifest.json of a checkpoint, where checkpoints are, and the config that one belongs to.

Imports no torch.
"""

import hashlib
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

from common.files import check_regular
from configure import Config
from configure.schema import KEYS, select_keys
from runtime import RunError

MANIFEST = "manifest.json"


class DamagedError(RunError):
    """A checkpoint's files differ from what was written."""


def steps(folder: str | Path, end: str = "") -> list[int]:
    """Steps of the checkpoints in `folder`, ascending; empty if it does not exist.

    Names of quarantined checkpoints end in .damaged: pass that as `end` to list them.
    """
    return sorted(int(path.name[5:13]) for path in Path(folder).glob(f"step_{8 * '[0-9]'}{end}"))


def folder_of(folder: str | Path, step: int) -> Path:
    """The path of the checkpoint of `step`."""
    return Path(folder, f"step_{step:08d}")


def read_manifest(path: Path) -> dict[str, Any]:
    """manifest.json of a checkpoint, its own checksum verified.

    Returns:
        `step`; `files`: {name: {bytes, sha256}}; `facts`: the metadata.

    Raises:
        DamagedError: it is missing, unreadable or changed.
    """
    file = Path(path, MANIFEST)
    body = {}
    try:
        check_regular(file)
        text = file.read_bytes().decode()
        body = json.loads(text)["body"]
        is_own = path.name == folder_of("", body["step"]).name
        names_are_plain = all(Path(name).name == name for name in body["files"])  # no subfolders
        has_form = isinstance(body["files"], dict) and isinstance(body["facts"], dict)
        intact = text == format_manifest(body) and is_own and names_are_plain and has_form
    except OSError as error:
        raise DamagedError(f"{file}: damaged, it cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{file}: damaged, checksum mismatch")
    return body


def format_manifest(body: dict[str, Any]) -> str:
    """The text of a manifest with its own checksum."""
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"sha256": digest, "body": body}, indent=1) + "\n"


# ---- the settings that shape what a model computes: without them its weights mean nothing
SETTINGS = "model_settings"  # key of a checkpoint's metadata; older ones lack it


def list_model_keys() -> list[str]:
    """The keys that shape the model's function, dotted."""
    keys = [
        key
        for key, schema in KEYS.items()
        if key.startswith("model.") and schema["report"] != "neutral"
    ]
    return [*keys, *select_keys("outside_model")]


def describe_model_settings(config: Config) -> dict[str, dict[str, Any]]:
    """The metadata that ties a checkpoint to its config."""
    return {SETTINGS: {key: attrgetter(key)(config) for key in list_model_keys()}}


def check_model_settings(config: Config, metadata: dict[str, Any], path: Path) -> None:
    """Compare a config with the metadata of the checkpoint `path`.

    Raises RunError if a key has another value than the weights were trained with. A checkpoint that
    is older than a key knows nothing of it.
    """
    recorded = metadata.get(SETTINGS)
    if not isinstance(recorded, dict):
        return
    changes = []
    for key in list_model_keys():
        now = attrgetter(key)(config)
        then = recorded.get(key, now)
        if then != now:
            changes.append(f"{key}: {then!r} in the checkpoint, {now!r} in the config")
    if changes:
        differences = "\n  ".join(changes)
        raise RunError(
            f"{path}: its weights were trained with other settings:\n  {differences}\n"
            "Restore them in the run's config.toml, or start over in a new folder (--fresh)"
        )
