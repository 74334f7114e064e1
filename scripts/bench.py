"""How fast it is: alternatives timed in turns within one process, compared by ratios of medians.

    python -m scripts.bench step config/quickstart.toml [--routers dense softmax kern] [--section.key=value ...]

`step` times whole training steps (forward, backward, clipping, AdamW; no auxiliary loss) of one micro-batch of random
tokens, for dense and each router.
"""

import argparse
import platform
import statistics
import sys
import time

import torch
from tqdm import tqdm

import configure
from model import GPT
from router import ROUTERS
from runtime import RunError, distributed
from train import build_optimizer


def in_turns(functions, rounds, device):
    """{name: seconds of each of `rounds` calls}; one call of every function per round, after two rounds of warm-up."""
    seconds = {name: [] for name in functions}
    for round_ in tqdm(range(rounds + 2), desc="rounds", disable=None):
        for name, function in functions.items():
            _synchronize(device)
            begin = time.perf_counter()
            function()
            _synchronize(device)
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def training_step(config, device, dtype):
    """A function that takes one training step of `config`'s model on random tokens."""
    torch.manual_seed(config.run.seed)
    model = GPT(config.model).to(device)
    optimizer = build_optimizer(model, config.optim)
    runner = torch.compile(model) if config.train.compile else model
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    x = torch.randint(config.model.vocab_size, (config.train.micro_batch_size, config.model.block_size), device=device)

    def step():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = runner(x, x).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def bench_step(args, overrides):
    configs = {router: configure.load(args.config, [*overrides, f"--model.router={router}"]) for router in args.routers}
    train, model = configs[args.routers[0]].train, configs[args.routers[0]].model
    device = distributed.pick_device(train.device)
    dtype = distributed.pick_dtype(train.dtype, device)
    tokens = train.micro_batch_size * model.block_size
    steps = {router: training_step(config, device, dtype) for router, config in configs.items()}
    seconds = in_turns(steps, args.rounds, device)
    print(f"{describe(device)}, {str(dtype).removeprefix('torch.')}; {args.config} {' '.join(overrides)}".rstrip())
    print(f"medians of {args.rounds} steps in turns, {tokens:,} tokens each; ratio: time over {args.routers[0]}'s")
    base = statistics.median(seconds[args.routers[0]])
    for router, times in seconds.items():
        median = statistics.median(times)
        print(f"{router:16} {1000 * median:9.1f} ms {tokens / median:12,.0f} tokens/s   ratio {median / base:.3f}")


def describe(device):
    threads, python = torch.get_num_threads(), platform.python_version()
    return f"{distributed.device_name(device)}, {threads} threads, torch {torch.__version__}, Python {python}"


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["step"], help="step: a training step of dense and each router")
    parser.add_argument("config", help="config file; --section.key=value overrides it")
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS), choices=ROUTERS, metavar="ROUTER")
    parser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
    args, overrides = parser.parse_known_args(argv)
    try:
        bench_step(args, overrides)
    except (configure.ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
