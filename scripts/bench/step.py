"""`scripts.bench step`, `router`, `experts` and `length`: whole training steps, and what of them is the router's."""

import math
from functools import partial
from pathlib import Path

import torch

import configure
from model import GPT, count_parameters, flops_per_token
from router import ROUTERS, Router
from runtime import RunError, distributed
from runtime.parallel import compile_blocks
from runtime.updates import Updates
from scripts.bench.peers import PEERS
from scripts.bench.tools import DTYPES, Report, in_turns, is_hopper, medians, over, skip, synchronize, usable
from train import build_optimizer

MFU = "MFU: tokens/s · (6 a token and active weight, head included, + 12·L·T·C) / the data sheet's dense peak"


def build(config, device):
    """(model, optimizer) of `config`."""
    torch.manual_seed(config.run.seed)
    with device:
        model = GPT(config.model)
    for block in model.blocks:
        block.checkpointing = config.train.activation_checkpointing
    return model, build_optimizer(model, config.optim)


def training_step(model, optimizer, config, device, dtype, shape=None, compile=False):
    """`step(update=True)`: forward, backward and, if `update`, clipping and AdamW (no auxiliary loss), on one
    micro-batch of random tokens, of `shape` (B, T) or that of `config`. As train.py does it."""
    runner = compiled(model) if compile else model
    updates = Updates(optimizer, device, scaled=dtype == torch.float16, grad_clip=config.optim.grad_clip)
    x, y = torch.randint(model.config.vocab_size, (2, *(shape or shape_of(config))), device=device)

    def step(update=True):
        try:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = runner(x, y).loss
            (loss * updates.scale).backward()
            if update:  # at rate 0: weights, and with them the routing, stay those of the start
                updates.step(0, 0.0, loss.detach())
        finally:  # of memory, too
            optimizer.zero_grad(set_to_none=True)

    return step


def compiled(model):
    """Ours as train.py does it, one of another make as a whole."""
    if not isinstance(model, GPT):
        return torch.compile(model)
    compile_blocks(model)
    return model


def shape_of(config):
    """(B, T) of a micro-batch."""
    return config.train.micro_batch_size, config.model.block_size


def bench_step(args, overrides):
    configs = load_routers(args, overrides)
    first = configs[args.routers[0]]
    device = distributed.pick_device(first.train.device)
    compiles = sorted(word == "on" for word in args.compile) if args.compile else [first.train.compile]
    tokens = math.prod(shape_of(first))
    columns = {"router": "<16", "dtype": "<8", "compile": "<7", "ms": ".3f", "tokens/s": ",.0f"}
    columns |= {"ratio": ".3f", "MFU": ".1%", "peak GB": ".2f"}
    report = Report(args, overrides, device, f"{args.config}, steps of {tokens} tokens", columns)
    dtypes = step_dtypes(args, first, device, report)
    more_graphs()
    built = {router: build(config, device) for router, config in configs.items()}
    peers = build_peers(args.peers, first, device, report)
    built |= peers
    configs |= dict.fromkeys(peers, first)
    for compile in compiles:  # one after the other: compiling takes minutes, and may be cut short
        steps = {
            (router, name): training_step(*built[router], configs[router], device, dtype, compile=compile)
            for router in configs
            for name, dtype in dtypes.items()
        }
        may_fail = [(peer, name) for peer in peers for name in dtypes]
        median = medians(in_turns(steps, args.rounds, device, may_fail, report))
        mfu, mode = {}, "on" if compile else "off"
        for (router, name), time in median.items():
            ratio = over(time, median.get((args.routers[0], name)))
            rate = tokens / time
            mfu[router, name] = (
                None if router in peers else utilisation(configs[router].model, rate, device, dtypes[name])
            )
            peak = peak_of(steps[router, name], device, *built[router])
            report.row([router, name, mode, 1000 * time, tokens / time, ratio, mfu[router, name], over(peak, 2**30)])
        step_goals(report, args, overrides, shape_of(first), mode, median, mfu)
        report.go_on()
    print(f"ratio: time over {args.routers[0]}'s in that dtype and mode. peak: with weights and AdamW's state")
    for peer, (model, _) in peers.items():
        print(f"{peer}: {sum(p.numel() for p in model.parameters()) / 1e6:,.1f}M parameters, no MFU: others' FLOPs")
    print(MFU)
    if median:
        router, name = list(median)[-1]
        report.profile(steps[router, name], f"step of {router}, {name}, compile {mode}")


def build_peers(names, config, device, report):
    """{name: (model, optimizer)} of what others offer, in the shape of `config`; a line for what is missing here."""
    built = {}
    for name in names:
        try:
            torch.manual_seed(config.run.seed)
            model = PEERS[name](config.model).to(device)
            built[name] = (model, build_optimizer(model, config.optim))
        except Exception as error:  # whatever ails another make, ours is still to be timed
            skip(name, f"{type(error).__name__}: {str(error).strip()}".splitlines()[0], report.skipped)
    return built


def step_goals(report, args, overrides, shape, mode, median, mfu):
    """For the models that the goals are stated for."""
    file, changed = Path(args.config).name, {word.lstrip("-").split("=")[0] for word in overrides}
    resized = {key for key in changed if key.startswith("model.")} - {"model.block_size"}
    flagship = is_hopper(report.device) and file == "125m.toml" and shape == (32, 1024) and not resized
    quick = report.device.type == "cpu" and file == "quickstart.toml" and not changed - {"train.dtype", "train.device"}
    for (router, name), time in median.items():
        words = f"{name}, compile {mode}"
        over_dense, over_softmax = (over(time, median.get((other, name))) for other in ("dense", "softmax"))
        if router == "kern" and flagship and name != "float32":
            report.goal(f"kern's MFU, {words}", mfu[router, name], least=0.45)
            report.goal(f"kern over dense, {words}", over_dense, most=1.35)
        if router == "kern" and quick:
            report.goal(f"kern over dense, {words}", over_dense, most=1.8)
            report.goal(f"kern over softmax, {words}", over_softmax, most=1.02)


def bench_router(args, overrides):
    routers = [router for router in args.routers if ROUTERS[router]]
    if not routers:
        raise RunError("dense has no router: name others")
    config = configure.load(args.config, [*overrides, "--model.router=kern"])
    device = distributed.pick_device(config.train.device)
    model = config.model
    N, C, E, K = math.prod(shape_of(config)), model.n_embd, model.n_expert, model.top_k
    columns = {"router": "<16", "forward ms": ".3f", "forward+backward ms": ".3f", "ratio": ".3f"}
    columns |= {"ms a step": ".2f", "share of step": ".2%"}
    report = Report(args, overrides, device, f"{args.config}, N {N}, C {C}, E {E}, K {K}", columns)
    ((name, dtype),) = step_dtypes(args, config, device, report).items()
    x = torch.randn(N, C, device=device, requires_grad=True)  # fp32, which LayerNorm returns under autocast too
    d_weights = torch.randn(N, K, device=device)
    with device:
        modules = {router: Router(C, E, K, ROUTERS[router]) for router in routers}

    @torch.no_grad()
    def forward(router):
        modules[router](x)

    def both(router):
        torch.autograd.grad(modules[router](x).weights, [x, *modules[router].parameters()], d_weights)

    functions = {(router, way.__name__): partial(way, router) for router in routers for way in (forward, both)}
    functions["step", "kern"] = training_step(
        *build(config, device), config, device, dtype, compile=config.train.compile
    )
    median = medians(in_turns(functions, args.rounds, device, report=report))
    base = "softmax" if "softmax" in routers else routers[0]
    step = median.get(("step", "kern"))
    for router in routers:
        time = median[router, "both"]
        row = [router, 1000 * median[router, "forward"], 1000 * time, time / median[base, "both"]]
        report.row([*row, 1000 * time * model.n_layer, over(time * model.n_layer, step)])
    whole = f"{1000 * step:.1f} ms" if step else "unknown"
    print(f"forward and backward of the gates, in fp32, without balance losses. ratio: time over {base}'s")
    print(f"a step: that of kern's model in {name}, {whole}, with {model.n_layer} routers")
    if is_hopper(device) and {"kern", "softmax"} <= {*routers}:
        report.goal("kern's router over softmax's", median["kern", "both"] / median["softmax", "both"], most=1.0)
    profiled = "kern" if "kern" in routers else routers[-1]
    report.profile(partial(both, profiled), f"router {profiled}, forward and backward")


def bench_experts(args, overrides):
    configs = {E: configure.load(args.config, [*overrides, f"--model.n_expert={E}"]) for E in args.experts}
    config = configs[args.experts[0]]
    if ROUTERS[config.model.router] is None:
        raise RunError("dense has no experts: set --model.router=kern")
    device = distributed.pick_device(config.train.device)
    tokens = math.prod(shape_of(config))
    columns = {"experts": "d", "M total": ",.1f", "M active": ",.1f", "ms": ".3f", "ratio": ".3f"}
    columns |= {"forward+backward ms": ".3f", "its ratio": ".3f", "tokens/s": ",.0f"}
    title = f"{args.config}, {config.model.router}, steps of {tokens} tokens"
    report = Report(args, overrides, device, title, columns)
    ((name, dtype),) = step_dtypes(args, config, device, report).items()
    more_graphs()
    steps = {}
    for E, c in configs.items():
        try:
            step = training_step(*build(c, device), c, device, dtype, compile=c.train.compile)
        except torch.OutOfMemoryError:
            skip(f"{E} experts", "out of memory", report.skipped)
            break
        steps |= {(E, True): step, (E, False): partial(step, update=False)}
    median = medians(in_turns(steps, args.rounds, device, report=report))
    first = args.experts[0]
    ratios = {}
    for E in configs:
        time, half = median.get((E, True)), median.get((E, False))
        if time is None or half is None:
            continue
        total, active = count_parameters(configs[E].model)
        ratios[E] = over(time, median.get((first, True)))
        its_ratio = over(half, median.get((first, False)))
        row = [E, total / 1e6, active / 1e6, 1000 * time, ratios[E], 1000 * half, its_ratio]
        report.row([*row, tokens / time])
    print(f"{name}; ratio: time over that of {first} experts")
    print("the rest of a step is AdamW and clipping, which go over all experts, active or not")
    if is_hopper(device) and (first, args.experts[-1]) == (32, 256):
        report.goal("step of 256 experts over that of 32", ratios.get(256), most=1.15)
    if ratios:
        last = list(ratios)[-1]
        report.profile(steps[last, True], f"step of {last} experts")


def bench_length(args, overrides):
    longest = max(args.lengths)
    configs = load_routers(args, [*overrides, f"--model.block_size={longest}"])
    first = configs[args.routers[0]]
    given = configure.load(args.config, [*overrides, f"--model.router={args.routers[0]}"])
    tokens = math.prod(shape_of(given))
    if tokens % longest:
        raise RunError(
            f"a micro-batch of {tokens} tokens does not divide into sequences of {longest}: set "
            f"--train.micro_batch_size, or other --lengths"
        )
    device = distributed.pick_device(first.train.device)
    columns = {"router": "<16", "length": "d", "sequences": "d", "ms": ".3f", "tokens/s": ",.0f", "ratio": ".3f"}
    columns |= {"of shortest": ".3f", "MFU": ".1%"}
    report = Report(args, overrides, device, f"{args.config}, steps of {tokens} tokens", columns)
    ((name, dtype),) = step_dtypes(args, first, device, report).items()
    more_graphs()
    steps = {}
    for router, config in configs.items():
        model, optimizer = build(config, device)
        for T in args.lengths:
            shape, compile = (tokens // T, T), config.train.compile
            steps[router, T] = training_step(model, optimizer, config, device, dtype, shape, compile)
    median = medians(in_turns(steps, args.rounds, device, report=report))
    for (router, T), time in median.items():
        base, short = median.get((args.routers[0], T)), median.get((router, min(args.lengths)))
        at_T = configs[router].model.model_copy(update={"block_size": T})
        mfu = utilisation(at_T, tokens / time, device, dtype)
        report.row([router, T, tokens // T, 1000 * time, tokens / time, over(time, base), over(time, short), mfu])
    print(f"{name}; ratio: time over {args.routers[0]}'s of that length; of shortest: over the router's own")
    print(MFU)
    if median:
        router, T = list(median)[-1]
        report.profile(steps[router, T], f"step of {router} at length {T}")


def load_routers(args, overrides):
    return {router: configure.load(args.config, [*overrides, f"--model.router={router}"]) for router in args.routers}


def step_dtypes(args, config, device, report):
    """{name: torch.dtype} of --dtype, else of the config."""
    own = distributed.pick_dtype(config.train.dtype, device)
    names = args.dtype or [name for name, dtype in DTYPES.items() if dtype == own]
    if args.what != "step" and len(names) > 1:
        raise RunError(f"{args.what} takes one --dtype")
    found = usable(names, device, report.skipped)
    if not found:
        raise RunError(f"{distributed.device_name(device)} has none of {', '.join(names)}: set another --dtype")
    return found


def more_graphs():
    """Dynamo gives up compiling one piece of code, silently, after 8 graphs: fewer than there may be models here."""
    torch._dynamo.config.recompile_limit = 1000


def utilisation(model, tokens_per_second, device, dtype):
    """Model FLOPs utilisation, or None where the device's peak is not known."""
    return over(flops_per_token(model) * tokens_per_second, distributed.peak_flops(device, dtype))


def peak_of(step, device, model, optimizer):
    """Bytes at the peak of a step with the model and optimizer that it trains, whatever else is on the device; None on
    a CPU, which does not count."""
    if device.type != "cuda":
        return None
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *moments])
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before + held
