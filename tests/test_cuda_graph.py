"""runtime/graph.py: a run with train.cuda_graph is equal to one without it, to the bit."""

import gc
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from runs import end, run

from model import Experts
from runtime import graph, state

FEATURES = [
    "train.micro_batch_size=4",  # two to a step
    "train.max_steps=7",
    "train.ema_decay=0.9",
    "train.balance_loss_coef=0.01",
    "train.bias_update_rate=0.001",
    "train.deterministic=true",
    "train.compile=off",
    "model.router=softmax",
    "model.dropout=0.1",
]


class Rerun:
    """In place of a CUDA graph: runs the function once more, into the same tensors."""

    def __init__(self, function, parameters):
        self.function, self.parameters = function, parameters
        # a CUDA graph goes on reading the casts of experts' weights that it was captured with
        mixtures = [item for item in gc.get_objects() if type(item) is Experts]
        self.copies = [(experts, experts.copies) for experts in mixtures if experts.copies]
        self.is_first = parameters[0].grad is None
        before = [] if self.is_first else [p.grad.clone() for p in parameters]
        with torch.random.fork_rng([]):
            self.statistics = function()
        self.gradients = [p.grad for p in parameters]
        for static, gradient in zip(self.gradients, before, strict=False):
            static.copy_(gradient)

    def pool(self):
        return None

    def replay(self):
        if self.is_first:
            for p in self.parameters:
                p.grad = None
        with ExitStack() as stack:
            for experts, copies in self.copies:
                stack.enter_context(mock.patch.object(experts, "copies", copies))
            self.statistics.copy_(self.function())
        for static, p in zip(self.gradients, self.parameters, strict=True):
            if p.grad is not static:
                static.copy_(p.grad)


@pytest.fixture
def captured(monkeypatch):
    """Capture on a CPU, too; the names of what was captured."""
    calls, graphs = [], []

    def capture(self, passes, x, y, loads, is_first):
        calls.append("first" if is_first else "later")
        graphs.append(self)
        return real(self, passes, x, y, loads, is_first)

    def capture_graph(function, pool):
        rerun = Rerun(function, graphs[-1].parameters)
        return rerun, rerun.statistics

    real = graph.StepGraph.capture
    monkeypatch.setattr(graph.StepGraph, "capture", capture)
    monkeypatch.setattr(graph, "capture_graph", capture_graph)
    monkeypatch.setattr(state, "can_capture", lambda asked, *_: asked == "on")
    return calls


def compare_runs(tiny, *overrides):
    """Run without a graph and with one; assert that both end with equal weights and metrics."""
    ends = []
    for asked in ("off", "on"):
        own = [f"run.name={asked}", f"train.cuda_graph={asked}"]
        config = tiny(*FEATURES, *own, *overrides)
        run(config)
        ends.append(end(config))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("more", [["data.document_mask=true"], ["train.micro_batch_size=8"]])
def test_a_run_that_replays_is_equal_to_one_that_does_not(tiny, captured, more):
    compare_runs(tiny, *more)
    assert captured == (["first"] if "train.micro_batch_size=8" in more else ["first", "later"])


@pytest.mark.parametrize("fails", ["first", "later"])
def test_steps_run_without_a_graph_that_cannot_be_captured(tiny, captured, fails, capsys):
    capture_graph = graph.capture_graph

    def refuse(function, pool):
        if captured[-1] == fails:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return capture_graph(function, pool)

    with mock.patch.object(graph, "capture_graph", refuse):
        compare_runs(tiny)
    line = "train.cuda_graph: steps run without a graph, it cannot be captured: operation not"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize("more", [["optim.name=muon"], ["eval.interval=3"]])
def test_a_graph_reads_weights_that_something_else_changed(tiny, captured, more):
    """Muon writes no copies; an evaluation exchanges weights and mean, and leaves old copies."""
    compare_runs(tiny, "train.dtype=bfloat16", *more)
    assert captured == ["first", "later"]


GPU, CPU = torch.device("cuda"), torch.device("cpu")


SPARE = {"device": GPU, "is_sharded": False, "has_kernels": True, "planned_bytes": 699}
NEEDS_GPU = "it needs one CUDA device"


@pytest.mark.parametrize(
    "asked, differs, captures, words",
    [
        ("auto", {}, True, ""),
        ("auto", {"planned_bytes": 700}, False, ""),
        ("auto", {"is_sharded": True}, False, ""),
        ("auto", {"has_kernels": False}, False, ""),
        ("auto", {"device": CPU}, False, ""),
        ("off", {}, False, ""),
        ("on", {"planned_bytes": 900}, True, ""),
        ("on", {"is_sharded": True}, False, NEEDS_GPU),
        ("on", {"device": CPU}, False, NEEDS_GPU),
        ("on", {"has_kernels": False}, False, "it needs model.backend = triton"),
    ],
)
def test_a_graph_needs_one_gpu_with_memory_to_spare(
    asked, differs, captures, words, capsys, monkeypatch
):
    monkeypatch.setattr(graph, "memory_bytes", lambda device: 1000)
    assert graph.can_capture(asked, **SPARE | differs) == captures
    printed = capsys.readouterr().out
    assert words in printed and bool(words) == bool(printed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["train.compile=on"],
        ["model.router=kern"],
        ["optim.name=muon"],
        ["optim.name=muon", "train.compile=on"],
    ],
)
def test_a_run_that_replays_is_equal_to_one_that_does_not_on_gpu(tiny, more, dtype, capsys):
    compare_runs(tiny, "train.device=cuda", f"train.dtype={dtype}", *more)
    assert "steps run without a graph" not in capsys.readouterr().out


@pytest.mark.gpu
def test_experts_of_torch_run_without_a_graph_on_gpu(tiny, capsys):
    compare_runs(tiny, "train.device=cuda", "train.dtype=bfloat16", "model.backend=torch")
    assert capsys.readouterr().out.count("steps run without a graph: it needs model.backend") == 1


@pytest.mark.gpu
def test_steps_run_without_a_graph_whose_capture_fails_on_gpu(tiny, monkeypatch, capsys):
    capture_graph = graph.capture_graph

    def wait_in_capture(function, pool):
        def passes():
            statistics = function()
            statistics[0].item()  # the host may not wait while a stream is captured
            return statistics

        return capture_graph(passes, pool)

    monkeypatch.setattr(graph, "capture_graph", wait_in_capture)
    compare_runs(tiny, "train.device=cuda", "train.dtype=float16")
    assert capsys.readouterr().out.count("a graph, it cannot be captured: ") == 1
