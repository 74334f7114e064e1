"""The measures of layers with experts: how each is named, computed and shown. Imports no torch.

balance.py and runtime/ measure, reports read the table. Functions are of tensors, L layers, E
experts.
"""

from collections.abc import Callable
from operator import methodcaller
from typing import Any, NamedTuple

OfTensor = Callable[[Any], Any]  # from tensor to tensor


class Measure(NamedTuple):
    """A number of each layer with experts: how it is added up, averaged, logged and printed."""

    label: str  # in tables of reports
    form: str  # format of the number over all layers
    # of balance.Stats, (L,): added over micro-batches, a mean over tokens; None: measured otherwise
    field: str | None = None
    of_mean: OfTensor | None = None  # computed from that mean
    of_loads: OfTensor | None = None  # computed from loads (L, E) instead
    over_layers: OfTensor = methodcaller("mean")
    in_validation: bool = True


# {NAME: measure}, logged as router/NAME of training steps and val/NAME of evaluations.
# Checkpoints have sums of the fields in this order: add at the end.
MEASURES = {
    "load_imbalance": Measure(
        "busiest expert's load, 1 = even",
        ".2f",
        of_loads=lambda loads: loads.amax(1) / loads.double().mean(1),
    ),
    "dead_experts": Measure(
        "experts without a token, all layers",
        ".1f",
        of_loads=lambda loads: (loads == 0).sum(1),
        over_layers=methodcaller("sum"),
    ),
    "balance_loss": Measure("balance loss, 1 = even", ".3f"),  # of `measure_loss`
    "entropy": Measure(
        "entropy of routing scores, nats", ".3f", field="entropy", in_validation=False
    ),
    "zero_gates": Measure("gates that are 0", ".1%", field="zero_gates"),
    "gate_norm": Measure("gate norm", ".3f", field="gate_square", of_mean=methodcaller("sqrt")),
    "gate_sum": Measure("sum of a token's gates", ".3f", field="gate_sum"),
    # of `TrainState.describe_routers`
    "gamma": Measure("γ, mean over layers", ".3f"),
    "bias_moved": Measure("move of the selection bias", ".2g"),
}
