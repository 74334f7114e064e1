"""The settings that shape what a model computes: a checkpoint's weights mean nothing without them.

Imports no torch.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from configure import Config
from configure.schema import KEYS
from runtime import RunError

SETTINGS = "model_settings"  # key of a checkpoint's metadata; older ones lack it


def list_model_keys() -> list[str]:
    """The keys that shape the model's function, dotted."""
    keys = [
        key
        for key, schema in KEYS.items()
        if key.startswith("model.") and schema["report"] != "neutral"
    ]
    return [*keys, "data.document_mask"]


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
