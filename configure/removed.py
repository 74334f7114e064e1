"""Keys and values that config files could set once.

A file or override that sets one is refused with what takes its place. The config.toml of a run that
has one at its default still loads: the run behaves as before without it.
"""

from typing import Any, NamedTuple

from configure.schema import KEYS

LAST_COMMIT = "e125ff1"  # it had them all


class Removed(NamedTuple):
    """A key that is gone, or the former default of a key that is still there."""

    default: Any  # of the key at LAST_COMMIT
    instead: str  # what happens now, or what to set


REMOVED = {
    "train.parallel": Removed("auto", "the default is ddp; scripts.plan lists what fits"),
    "model.n_dense_layer": Removed(0, "all blocks have experts, or none (model.router=dense)"),
    "train.match_gates": Removed(
        True, "gates of another router are matched, unless model.gate_norm or gate_scale is set"
    ),
    "optim.decay": Removed("linear", "the decay of schedule wsd is linear"),
    "eval.spread": Removed("documents", "windows come from many documents"),
    "eval.task_limit": Removed(0, "tasks are scored on all documents; eval.downstream has --limit"),
    "train.reduce_dtype": Removed("float32", "gradients are summed over ranks in float32"),
    "train.force_balance": Removed(False, "the router always chooses"),
    "train.on_save_error": Removed("stop", "a failed save ends the run"),
    "log.tensorboard": Removed(False, "log.wandb and the pages of scripts.report show a run"),
    "train.spike_sigma": Removed(6.0, "a spike is 6 standard deviations above the mean"),
    "train.max_skipped_steps": Removed(20, "20 skipped steps in a row stop the run"),
    "optim.muon_split": Removed(True, "Muon orthogonalizes q, k, v, gate and up each"),
    "optim.momentum": Removed(0.95, "Muon's is 0.95"),
}


def find_removed(key: str, value: Any) -> Removed | None:
    """What is removed: the key, or this value of it."""
    removed = REMOVED.get(key)
    if removed and key in KEYS and value != removed.default:
        return None
    return removed


def drop_removed(recorded: dict[str, Any]) -> None:
    """Delete, from a run's own settings by dotted key, what is removed and has its default."""
    for key, value in list(recorded.items()):
        removed = find_removed(key, value)
        if removed and repr(value) == repr(removed.default):  # 1 is not True
            del recorded[key]
