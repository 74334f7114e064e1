"""Steps that are taken or skipped on the device: loss scale, clipping, spikes, runs that are halted."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from numerics import SEED, assert_near, seeded, tolerance
from runs import checkpoints, column, metrics, run, steps
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configure.schema import Model, Optim
from data.bins import open_tokens
from data.loader import Loader
from model import GPT
from runtime import RunError, checkpoint, folder
from runtime import state as train_state
from runtime.state import build_optimizer
from runtime.updates import BAD_GRADIENTS, WINDOW, Updates, is_spike


# ---- against formulas in float64
class ByHand:
    """AdamW with clipping and a loss scale, in float64; `groups` says each parameter's rate ratio and decay."""

    def __init__(self, parameters, ratios, decays, optim, scaled):
        self.weights = {name: p.detach().double() for name, p in parameters.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.ratios, self.decays, self.optim, self.scaled = ratios, decays, optim, scaled
        self.taken, self.healthy, self.scale = 0, 0, 65536.0 if scaled else 1.0

    def step(self, lr, gradients, growth_interval):
        """Returns the norm of all gradients, before clipping."""
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
        if not math.isfinite(norm):
            self.scale, self.healthy = (max(1.0, self.scale / 2) if self.scaled else 1.0), 0
            return norm
        self.healthy += 1
        if self.scaled and self.healthy == growth_interval:
            self.scale, self.healthy = self.scale * 2, 0
        self.taken += 1
        optim = self.optim
        factor = min(1.0, optim.grad_clip / (norm + 1e-6)) if optim.grad_clip else 1.0
        for name, weight in self.weights.items():
            rate, gradient = lr * self.ratios[name], gradients[name].double() * factor
            self.first[name] = optim.beta1 * self.first[name] + (1 - optim.beta1) * gradient
            self.second[name] = optim.beta2 * self.second[name] + (1 - optim.beta2) * gradient**2
            mean = self.first[name] / (1 - optim.beta1**self.taken)
            deviation = (self.second[name] / (1 - optim.beta2**self.taken)).sqrt()
            self.weights[name] = weight * (1 - rate * self.decays[name]) - rate * mean / (deviation + optim.eps)
        return norm


SMALL = Model(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=11, n_expert=3, top_k=2, expert_hidden=4)


@pytest.mark.numerics
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("grad_clip", [0.0, 0.5, 100.0])
def test_steps_are_those_of_adamw_in_float64(grad_clip, scaled, monkeypatch):
    """Matrices alone decay; routers and w_out have their own rates; gradients that are not finite change nothing."""
    monkeypatch.setattr("runtime.updates.GROWTH_INTERVAL", 3)
    optim = Optim(router_lr_ratio=0.5, expert_out_lr_ratio=0.25, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-2)
    optim = optim.model_copy(update={"grad_clip": grad_clip})
    torch.manual_seed(SEED)
    parameters = dict(GPT(SMALL).named_parameters())
    ratios = {name: 0.25 if "w_out" in name else 0.5 if "router" in name else 1.0 for name in parameters}
    spared = ("gamma", "bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    decays = {name: 0.0 if name.endswith(spared) else 0.3 for name in parameters}
    assert {*ratios.values()} == {0.25, 0.5, 1.0} and {*decays.values()} == {0.0, 0.3}
    wanted = ByHand(parameters, ratios, decays, optim, scaled)
    model = GPT(SMALL)
    model.load_state_dict(parameters, strict=False)
    mine = dict(model.named_parameters())
    updates = Updates(build_optimizer(model, optim), "cpu", scaled=scaled, grad_clip=grad_clip)
    generator = seeded(1)
    for step in range(16):
        gradients = {name: torch.randn(p.shape, generator=generator) for name, p in mine.items()}
        if step in (0, 5, 6, 13):
            gradients["wte.weight"][step % 5, 0] = (math.inf, math.nan)[step % 2]
        for name, p in mine.items():
            p.grad = gradients[name] * updates.scale
        taken = updates.step(step, 0.01 * (step + 1), torch.tensor(1.0, dtype=torch.float64))
        norm, counters = wanted.step(0.01 * (step + 1), gradients, growth_interval=3), updates.read()
        assert taken.item() == math.isfinite(norm) == math.isfinite(counters.grad_norm)
        assert (counters.taken, counters.skipped) == (wanted.taken, step + 1 - wanted.taken)
        assert counters.scale == wanted.scale
        if math.isfinite(norm):
            assert_near(torch.tensor(counters.grad_norm), torch.tensor(norm), tolerance(torch.float32, 400), "norm")
        # Each step rounds a weight about five times, and the errors of all steps add up.
        limit = tolerance(torch.float32, 400, roundings=10 + 2 * step)
        for name, p in mine.items():
            moments = updates.optimizer.state[p]
            assert moments["step"].item() == wanted.taken
            assert_near(p, wanted.weights[name].float(), limit, name)
            assert_near(moments["exp_avg"], wanted.first[name].float(), limit, name)  # which show a gradient's size
            assert_near(moments["exp_avg_sq"], wanted.second[name].float(), limit, name)
    assert not scaled or wanted.scale != 65536


def two_parameters(scaled, **own):
    """Two parameters and the Updates of an AdamW over them."""
    parameters = [torch.nn.Parameter(torch.ones(5, 3)), torch.nn.Parameter(torch.ones(7))]
    updates = Updates(torch.optim.AdamW(parameters, fused=True), "cpu", scaled=scaled, grad_clip=1.0, **own)
    return parameters, updates


def take_step(updates, parameters, step, gradient=1.0, loss=1.0, lr=0.1):
    """A step with this number for every gradient; returns whether it was taken, on the device."""
    for p in parameters:
        p.grad = torch.full_like(p, gradient)
    return updates.step(step, lr, torch.tensor(loss, dtype=torch.float64))


def test_halted_run_stays_as_it_is():
    mine, updates = two_parameters(True, max_skipped_steps=2)
    for step, gradient in enumerate([1.0, math.inf, 1.0, math.inf, math.inf]):
        take_step(updates, mine, step, gradient)
    halted = updates.read()
    assert (halted.halted, halted.step, halted.skipped, halted.skipped_in_row) == (BAD_GRADIENTS, 4, 3, 2)
    frozen = [t.clone() for t in (*mine, *(state["exp_avg"] for state in updates.optimizer.state.values()))]
    for step in range(5, 9):
        assert not take_step(updates, mine, step, loss=math.nan if step == 7 else 1.0)
    assert updates.read() == halted
    now = [*mine, *(state["exp_avg"] for state in updates.optimizer.state.values())]
    assert all(torch.equal(a, b) for a, b in zip(now, frozen, strict=True))


class HostReads(TorchDispatchMode):
    """Notes the operators by which a number leaves its device: .item(), bool(), if, float()."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function) or "nonzero" in str(function) or "is_nonzero" in str(function):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


EAGER = ["log.interval=100", "eval.interval=100", "train.max_steps=9", "train.bias_update_rate=0.01"]
EAGER += ["train.loss_spike=skip", "train.balance_loss_coef=0.01", "train.z_loss_coef=0.001"]


@pytest.fixture
def in_steady_steps(before_steps):
    """`in_steady_steps(begin, end)` calls begin before the fifth training step, and end after the seventh.

    Returns a list of the steps begun.
    """

    def watch(begin, end):
        begun = []
        before_steps(lambda step: {4: begin, 7: end}.get(step, lambda: None)())
        before_steps(begun.append)
        return begun

    return watch


@pytest.mark.parametrize("router, dtype", [("dense", "float32"), ("kern", "float16"), ("softmax-renorm", "float16")])
def test_steady_step_reads_no_number(tiny, in_steady_steps, router, dtype):
    """But for the loads that the experts of a CPU go by, which they read as a list."""
    with HostReads() as reads:
        torch.ones(()).item()
    assert reads.found.pop()  # it sees them
    begun = in_steady_steps(reads.__enter__, lambda: reads.__exit__(None, None, None))
    run(tiny(*EAGER, f"model.router={router}", f"train.dtype={dtype}", "model.backend=torch", "train.ema_decay=0.9"))
    assert {4, 7} < set(begun) and not reads.found


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("router", ["dense", "kern", "softmax-renorm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steady_step_never_makes_the_host_wait(tiny, in_steady_steps, router, dtype, compile):
    mode = torch.cuda.set_sync_debug_mode
    torch._dynamo.reset()  # after some graphs of one function it gives up, and says nothing
    torch._dynamo.utils.counters.clear()
    begun = in_steady_steps(lambda: mode("error"), lambda: mode("default"))
    own = [f"train.dtype={dtype}", f"model.router={router}", f"train.compile={str(compile).lower()}"]
    try:
        run(tiny(*EAGER, "train.device=cuda", *own))
    finally:
        mode("default")
    assert {4, 7} < set(begun)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compile


# ---- steps that are not finite
def flat(model):
    return torch.cat([t.detach().flatten() for t in (*model.parameters(), *model.buffers())])


@pytest.fixture
def poison(monkeypatch):
    """`poison(steps)` makes the gradients of those training steps infinite, `poison(steps, factor)` multiplies their
    losses. It returns a list that training fills: weights and biases, in one vector, as each step found them."""

    def poison(steps, factor=None):
        forward, found = GPT.forward, []

        def poisoned(model, idx, targets=None):
            out = forward(model, idx, targets)
            if model.training and torch.is_grad_enabled():
                found.append(flat(model))
                if len(found) - 1 in steps:
                    loss = out.loss * (factor or 1)
                    if factor is None:
                        loss.register_hook(lambda gradient: gradient * math.inf)
                    out = out._replace(loss=loss)
            return out

        monkeypatch.setattr(GPT, "forward", poisoned)
        return found

    return poison


def crash_report(config, step):
    """The one crash report of the run, of that step. It must be JSON, which has no NaN and no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    (file,) = folder.path_of(config).glob("crash-*")
    assert file.name == f"crash-step_{step:08d}.json"
    return json.loads(file.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_step_that_is_not_finite_is_skipped(tiny, poison, dtype):
    weights = poison({1, 2})
    lines = run(tiny("train.max_steps=5", f"train.dtype={dtype}", "train.bias_update_rate=0.01"))
    assert [bool(torch.equal(a, b)) for a, b in zip(weights, weights[1:], strict=False)] == [False, True, True, False]
    assert column(lines, "optim/skipped_steps") == [0, 1, 2, 2, 2]
    assert math.isfinite(lines[-1]["val/loss"])


@pytest.mark.parametrize(
    "dtype, most, factor, message",
    [
        ("float32", 3, None, r"3 steps in a row skipped, the last for gradients .*\(step 9, .*lower optim\.lr"),
        ("float16", 20, None, r"20 steps in a row.* loss scale 1\)\. .*train\.dtype = bfloat16 or float32"),
        ("float32", 4, 50, r"4 steps in a row skipped, the last for a loss spike \(step 10"),
    ],
)
def test_too_many_skipped_steps_in_a_row_stop_the_run(tiny, short_history, poison, dtype, most, factor, message):
    """Of infinite gradients, or losses that stay high; two such gradients apart do not."""
    weights = poison({*range(6, 100)} if factor else {1, 3, *range(6, 100)}, factor)
    own = [f"train.max_skipped_steps={most}", f"train.dtype={dtype}", "train.loss_spike=skip", "eval.interval=50"]
    with pytest.raises(RunError, match=message):
        run(tiny("train.max_steps=50", *own))
    assert len(weights) == 6 + most
    assert torch.equal(weights[6], weights[-1]) and weights[-1].isfinite().all()


def test_loss_scale_has_a_floor(tiny, poison):
    """GradScaler alone halves 65536 without end: after 20 such steps 1/16, after 150 zero."""
    weights = poison(range(20))
    lines = run(tiny("train.max_steps=22", "train.max_skipped_steps=21", "train.dtype=float16", "optim.warmup_steps=0"))
    scales = column(lines, "optim/loss_scale")
    assert scales[:16] == [2.0**power for power in range(15, -1, -1)]
    assert set(scales[16:]) == {1.0}
    assert not torch.equal(weights[20], weights[21])  # and it learns again


@pytest.mark.parametrize(
    "pause, saved",
    [(["log.interval=5", "train.checkpoint_interval=3"], [3]), (["train.checkpoint_interval=5"], [])]
    + [(["eval.interval=5"], [])],
)
def test_halted_run_is_noticed_before_it_logs_saves_or_evaluates(tiny, poison, saves_end_first, pause, saved):
    saves_end_first()
    weights = poison({3}, math.nan)
    config = tiny("train.max_steps=50", "log.interval=50", "eval.interval=50", *pause)
    with pytest.raises(RunError, match="train loss nan in step 4, before its update") as error:
        run(config)
    assert "bfloat16" not in str(error.value)  # of no help to a run in float32
    assert len(weights) == 6  # steps 1 to 5; computed once more, step 4 is finite: a fault of the hardware, say
    assert torch.equal(weights[3], weights[4]) and torch.equal(weights[3], weights[5])
    assert steps(config) == saved and [line["step"] for line in metrics(config)] == [0]
    report = crash_report(config, 3)
    assert report["loss"] == "nan" and math.isfinite(report["ranks"][0]["micro_batches"][0]["loss"])


@pytest.fixture
def model(monkeypatch):
    """A function that returns the model that was trained last."""
    build, built = train_state.build_optimizer, []
    monkeypatch.setattr(train_state, "build_optimizer", lambda model, optim: built.append(model) or build(model, optim))
    return lambda: built[-1]


@pytest.mark.parametrize("factor", [math.nan, -math.inf])
def test_loss_that_is_not_finite_stops_before_the_update(tiny, poison, model, saves_end_first, factor):
    saves_end_first()
    weights = poison({5, 7}, factor)  # the second micro-batch of step 3, and once more for the dump
    config = tiny("train.micro_batch_size=4", "train.checkpoint_interval=1", "train.keep_checkpoints=9")
    with pytest.raises(RunError, match=rf"train loss {factor} in step 3, before its update.*optim\.lr"):
        run(config)
    assert len(weights) == 8 and weights[5].isfinite().all() and torch.equal(weights[5], weights[7])
    assert torch.equal(flat(model()), weights[5])
    assert not torch.equal(weights[3], weights[4])
    assert all(buffer.isfinite().all() for buffer in model().buffers())
    assert steps(config) == [1, 2]
    checkpoint.load_model(checkpoints(config), 2, model())
    assert torch.equal(flat(model()), weights[4])

    report = crash_report(config, 2)
    assert (report["step"], report["loss"], report["loss_scale"]) == (2, str(factor), 1.0)
    assert report["learning_rate"] == train.learning_rate(config.optim, 4, 2)
    (rank,) = report["ranks"]
    tokens = open_tokens(Path(config.data.dir, config.data.name), "train")
    loader = Loader(tokens, config.model.block_size, config.train.batch_size, config.run.seed)
    assert [part["windows"] for part in rank["micro_batches"]] == [loader.indices(2, at, 4).tolist() for at in (0, 4)]
    assert math.isfinite(rank["micro_batches"][0]["loss"]) and rank["micro_batches"][1]["loss"] == str(factor)
    named = dict(model().named_parameters())
    assert report["parameters"].keys() == named.keys()
    for name, p in named.items():
        assert report["parameters"][name]["weight_norm"] == pytest.approx(p.norm().item(), rel=1e-5), name
    assert any(not isinstance(norms["gradient_norm"], float) for norms in report["parameters"].values())


@pytest.mark.numerics
def test_dump_repeats_the_step_and_has_unscaled_gradients(tiny, poison):
    """Of a step whose loss was bad only once: its windows, dropout and weights give the loss of an undisturbed run."""
    own = ["model.dropout=0.1", "train.dtype=float16", f"run.seed={SEED}"]
    third = run(tiny("run.name=undisturbed", *own))[4]
    poison({2}, math.nan)
    with pytest.raises(RunError, match="train loss nan in step 3"):
        run(tiny(*own))
    dump = crash_report(tiny(), 2)
    assert (third["step"], dump["ranks"][0]["micro_batches"][0]["loss"]) == (3, third["train/loss"])
    norm = torch.tensor([norms["gradient_norm"] for norms in dump["parameters"].values()]).norm()
    limit = tolerance(torch.float32, 257 * 32)  # the longest tensor
    assert_near(norm, torch.tensor(third["optim/grad_norm"]), limit, "gradient norm")


# ---- spikes of the loss
def test_spike_by_hand():
    def spikes(losses, loss, sigma):
        ring = torch.zeros(WINDOW, dtype=torch.float64)
        ring[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        spike, mean = is_spike(ring, torch.tensor(float(len(losses))), torch.tensor(loss).double(), sigma)
        assert mean.item() == pytest.approx(statistics.fmean(losses))
        return spike.item()

    losses = [1.0, 3.0] * 32
    limit = 2 + 6 * statistics.stdev(losses)
    assert limit == pytest.approx(8.047, abs=1e-3)
    assert spikes(losses, limit + 1e-5, 6) and not spikes(losses, limit - 1e-5, 6)
    assert spikes(losses, limit - 1e-5, 5)
    assert not spikes(losses[1:], 1e9, 6)  # too few to tell
    assert not spikes(losses, -1e9, 6)
    assert spikes([2.0] * 128, 2.1, 6) and not spikes([2.0] * 128, 2.0, 6)


def test_spikes_are_measured_against_the_steps_that_were_taken():
    mine, updates = two_parameters(False, loss_spike="skip")
    losses = [1.0 + step % 3 for step in range(150)] + [1e6, 1e5, 2.0, 1e4]
    for step, loss in enumerate(losses):
        take_step(updates, mine, step, loss=loss, lr=0.0)
    state = updates.read()
    assert (state.spikes, state.skipped, state.taken, state.spike_step, state.spike_loss) == (3, 3, 151, 153, 1e4)
    assert state.spike_mean == pytest.approx(statistics.fmean([*losses[23:150], 2.0]), rel=1e-12)


LONG = ["train.max_steps=8", "eval.interval=100", "train.keep_checkpoints=9"]


@pytest.fixture
def short_history(monkeypatch):
    """Spikes are measured against the last 8 losses, once there are 4."""
    monkeypatch.setattr("runtime.updates.WINDOW", 8)


@pytest.mark.parametrize("policy", ["off", "warn", "skip"])
def test_loss_spike(tiny, short_history, poison, capsys, policy):
    weights = poison({5}, 50)
    lines = run(tiny(*LONG, f"train.loss_spike={policy}"))
    assert column(lines, "train/loss")[5] > 100
    said = [line for line in capsys.readouterr().out.splitlines() if "is a spike" in line]
    assert torch.equal(weights[5], weights[6]) == (policy == "skip")
    assert not torch.equal(weights[6], weights[7])
    assert column(lines, "optim/skipped_steps")[4:7] == ([0, 1, 1] if policy == "skip" else [0, 0, 0])
    if policy == "off":
        assert not said and not column(lines, "optim/loss_spikes")
    else:
        assert column(lines, "optim/loss_spikes") == [0] * 5 + [1] * 3
        (line,) = said
        assert "step 6," in line and ("skipped" if policy == "skip" else "taken all the same") in line


def test_spikes_are_reported_at_the_next_log_line_and_not_again_after_a_resume(tiny, short_history, poison, capsys):
    poison({4, 5, 7, 9}, 50)
    for last, reports in ((8, ["tiny: 2 spikes, the last: step 6, ", "tiny: step 8, "]), (12, ["tiny: step 10, "])):
        run(tiny(*LONG, "train.loss_spike=skip", "log.interval=6", f"train.max_steps={last}"))
        lines = [line for line in capsys.readouterr().out.splitlines() if "is a spike" in line]
        assert [report in line for report, line in zip(reports, lines, strict=True)] == [True] * len(reports)


def test_losses_that_stay_high_stop_the_run_that_skips_them(tiny, short_history, poison):
    weights = poison(range(6, 50), 50)
    own = ["train.max_steps=50", "train.loss_spike=skip", "train.max_skipped_steps=4"]
    with pytest.raises(RunError, match=r"4 steps in a row skipped, the last for a loss spike \(step 10"):
        run(tiny("eval.interval=50", *own))
    assert len(weights) == 10 and torch.equal(weights[6], weights[9])
