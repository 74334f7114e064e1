"""How fast it is: alternatives timed in turns within one process, compared by ratios of medians.

    python -m scripts.bench step config/quickstart.toml [--routers dense softmax kern] [--section.key=value ...]
    python -m scripts.bench data [FILES]
    python -m scripts.bench scaling config/quickstart.toml --model.router=kern [--ranks 1 2]
    python -m scripts.bench save config/125m.toml --model.n_layer=2 --train.micro_batch_size=1 --train.dtype=auto

`step` times whole training steps (forward, backward, clipping, AdamW; no auxiliary loss) of one micro-batch of random
tokens, for dense and each router.

`data` times how fast text becomes GPT-2 tokens and tokens become batches: tiktoken alone on text in memory, a worker's
whole task (decode, parse, choose the split, tokenize) on the same documents, a whole preparation from file to file, and
the loader on the set that comes out.

`scaling` runs train.py itself on each number of ranks, with one micro-batch of the config's size a rank and step: then
averaging gradients weighs most. It prints tokens/s, and as efficiency tokens/s a rank over those of the first.

`save` times training steps while a checkpoint is being written against steps while none is, and the pause that training
makes for the copy.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import configure
from data import DataError, prepare
from data.bins import open_tokens
from data.encode import Encoder
from data.loader import Loader
from data.prepare import cores
from data.readers import read
from data.sources import local_inputs, stdlib_inputs
from data.tokenizer import load_tokenizer
from model import GPT
from router import ROUTERS
from runtime import RunError, checkpoint, distributed
from runtime.metrics import read as read_metrics
from train import build_optimizer

PREPARED_CHARACTERS = 300_000_000  # so that a whole preparation outlasts its start


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
    """(function that takes one training step of `config`'s model on random tokens, model, optimizer)."""
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

    return step, model, optimizer


def bench_step(args, overrides):
    configs = {router: configure.load(args.config, [*overrides, f"--model.router={router}"]) for router in args.routers}
    train, model = configs[args.routers[0]].train, configs[args.routers[0]].model
    device = distributed.pick_device(train.device)
    dtype = distributed.pick_dtype(train.dtype, device)
    tokens = train.micro_batch_size * model.block_size
    steps = {router: training_step(config, device, dtype)[0] for router, config in configs.items()}
    seconds = in_turns(steps, args.rounds, device)
    print(f"{describe(device)}, {str(dtype).removeprefix('torch.')}; {args.config} {' '.join(overrides)}".rstrip())
    print(f"medians of {args.rounds} steps in turns, {tokens:,} tokens each; ratio: time over {args.routers[0]}'s")
    base = statistics.median(seconds[args.routers[0]])
    for router, times in seconds.items():
        median = statistics.median(times)
        print(f"{router:16} {1000 * median:9.1f} ms {tokens / median:12,.0f} tokens/s   ratio {median / base:.3f}")


def bench_data(args, overrides):
    tokenizer = load_tokenizer("gpt2", args.ranks)
    inputs = local_inputs(map(Path, args.files)) if args.files else stdlib_inputs()
    encoder = Encoder(tokenizer, val_fraction=0.01)
    documents = [raw for file in inputs for raw in read(file, "text")]
    try:
        texts = [encoder.text(raw) for raw in documents]
    except ValueError as error:
        raise DataError(f"{args.files}: a document {error}") from error
    characters = sum(map(len, texts))
    if overrides or not characters:
        raise DataError(f"unknown options {overrides}" if overrides else f"no text in {args.files}: name other files")
    repeats = 1 + PREPARED_CHARACTERS // characters  # of the files
    folder = tempfile.TemporaryDirectory()
    source = Path(folder.name, "source")
    source.mkdir()
    for i in range(repeats):
        for number, file in enumerate(inputs):
            end = "".join(Path(file.name).suffixes[-2:]) if args.files else ".txt"
            Path(source, f"{i}-{number}{end}").symlink_to(Path(file.url).resolve())

    def whole_preparation():
        ranks = ["--ranks", args.ranks] if args.ranks else []
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            command = ["text", "--source", str(source), "--out", folder.name, "--name", "bench", "--force", *ranks]
            assert prepare.main(command) == 0

    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    rates = {
        "tiktoken, 1 thread": (lambda: tokenizer.bpe.encode_ordinary_batch(texts, num_threads=1), tokens),
        "our task, 1 process": (lambda: encoder(documents), tokens),
        f"tiktoken, {cores()} threads": (
            lambda: tokenizer.bpe.encode_ordinary_batch(texts, num_threads=cores()),
            tokens,
        ),
        f"whole preparation, {cores()} workers": (whole_preparation, tokens * repeats),
    }
    seconds = in_turns({name: function for name, (function, _) in rates.items()}, args.rounds, torch.device("cpu"))
    print(f"{describe(torch.device('cpu'))}; {characters / 1e6:.1f} M characters, {tokens / 1e6:.1f} M GPT-2 tokens")
    print(f"medians of {args.rounds} rounds in turns; ratio: to tiktoken with as many threads")
    base = 0.0
    for name, (_, count) in rates.items():
        rate = count / statistics.median(seconds[name])
        base = rate if name.startswith("tiktoken") else base
        print(f"{name:32} {rate:14,.0f} tokens/s   ratio {rate / base:.3f}")

    train = open_tokens(Path(folder.name, "bench"), "train")
    loaders = {(T, B): Loader(train, T, B, seed=0) for T in (512, 1024, 2048) for B in (8, 32)}
    steps = dict.fromkeys(loaders, 0)

    def load(key):
        for _ in range(100):
            steps[key] += 1
            loaders[key].batch(steps[key])

    seconds = in_turns({key: partial(load, key) for key in loaders}, args.rounds, torch.device("cpu"))
    print(f"loader, 1 thread, {len(train):,} tokens:")
    for (T, B), times in seconds.items():
        print(f"  {B} windows of {T:4} tokens {100 * B * T / statistics.median(times):14,.0f} tokens/s")
    folder.cleanup()


def bench_scaling(args, overrides):
    config = configure.load(args.config, overrides)
    device = distributed.pick_device(config.train.device)
    rates = {ranks: [] for ranks in args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for ranks in args.ranks:
                settings = {
                    "run.dir": folder,
                    "run.name": f"{ranks}-{round_}",
                    "train.batch_size": ranks * config.train.micro_batch_size,
                    "train.max_steps": args.steps,
                    "optim.warmup_steps": 1,
                    "eval.interval": args.steps,
                    "eval.windows": max(args.ranks),
                    "log.interval": args.steps // 5,
                }
                launch = (
                    ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
                )
                command = [sys.executable, *launch, "train.py", args.config, *overrides]
                command += [f"--{key}={value}" for key, value in settings.items()]
                threads = {} if device.type == "cuda" else {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
                done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True)
                if done.returncode:
                    raise RunError(f"{ranks} ranks failed:\n{done.stderr[-2000:]}")
                lines = read_metrics(Path(folder, f"{ranks}-{round_}", "metrics.jsonl"))
                rates[ranks] += [line["perf/tokens_per_sec"] for line in lines if "perf/tokens_per_sec" in line][1:]
    print(f"{describe(device)}, {cores()} cores; {args.config} {' '.join(overrides)}".rstrip())
    print(f"medians of {args.rounds} runs of {args.steps} steps each, their first fifth left out")
    base = statistics.median(rates[args.ranks[0]]) / args.ranks[0]
    for ranks, values in rates.items():
        rate = statistics.median(values)
        print(f"{ranks:4} ranks {rate:12,.0f} tokens/s   efficiency {rate / ranks / base:.2f}")
    if device.type == "cpu":
        print("ranks on one CPU share its cores: this shows that it works, not how it scales")


def bench_save(args, overrides):
    config = configure.load(args.config, overrides)
    device = distributed.pick_device(config.train.device)
    dtype = distributed.pick_dtype(config.train.dtype, device)
    step, model, optimizer = training_step(config, device, dtype)
    times = {"quiet": [], "saving": [], "pause": [], "whole save": []}

    def timed(name, function):
        _synchronize(device)
        begin = time.perf_counter()
        function()
        _synchronize(device)
        times[name].append(time.perf_counter() - begin)

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        saver = checkpoint.Saver(folder, distributed.Ranks(0, 1, device), sharded=False, keep=1, on_error="stop")
        for _ in range(2):
            step()
        for round_ in tqdm(range(args.rounds), desc="rounds", disable=None):
            begin = time.perf_counter()
            timed("pause", lambda round_=round_: saver.save(round_, model, optimizer, {}, {}))
            during = 0
            while not saver.pending.done():
                timed("saving", step)
                during += 1
            times["saving"][-1:] = []  # the save ended within it
            times["whole save"].append(time.perf_counter() - begin)
            for _ in range(max(3, during)):
                timed("quiet", step)
        saver.finish()
        files = Path(folder, f"step_{args.rounds - 1:08d}").iterdir()
        size = sum(path.stat().st_size for path in files)
    median = {name: statistics.median(values or [math.nan]) for name, values in times.items()}
    print(f"{describe(device)}, {str(dtype).removeprefix('torch.')}; {args.config} {' '.join(overrides)}".rstrip())
    print(f"medians of {args.rounds} saves of {size / 1e6:,.0f} MB each, and of the steps during and between them")
    print(f"training pauses for the copy      {median['pause'] * 1000:9.1f} ms")
    print(f"copied, written and hashed after  {median['whole save'] * 1000:9.1f} ms")
    print(f"a step while nothing is saved     {median['quiet'] * 1000:9.1f} ms")
    ratio = median["saving"] / median["quiet"]
    print(f"a step while a save is under way  {median['saving'] * 1000:9.1f} ms   ratio {ratio:.3f}")


def describe(device):
    threads, python = torch.get_num_threads(), platform.python_version()
    return f"{distributed.device_name(device)}, {threads} threads, torch {torch.__version__}, Python {python}"


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__.split("\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    step = what.add_parser("step", help="a training step of dense and each router")
    step.add_argument("config", help="config file; --section.key=value overrides it")
    step.add_argument("--routers", nargs="+", default=list(ROUTERS), choices=ROUTERS, metavar="ROUTER")
    data = what.add_parser("data", help="tokenizer, preparation and loader")
    data.add_argument("files", nargs="*", help="text as data.prepare takes it (default: Python's standard library)")
    data.add_argument("--ranks", metavar="FILE", help="GPT-2's ranks")
    scaling = what.add_parser("scaling", help="train.py on several numbers of ranks")
    scaling.add_argument("config", help="config file of a prepared data set; --section.key=value overrides it")
    scaling.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="(default: 1 2)")
    scaling.add_argument("--steps", type=int, default=50, help="of a run (default: %(default)s)")
    save = what.add_parser("save", help="steps while a checkpoint is being written, and without")
    save.add_argument("config", help="config file; --section.key=value overrides it")
    save.add_argument("--folder", help="on the disk that is to be tried (default: the one for temporary files)")
    for command, rounds in ((step, 10), (data, 5), (scaling, 3), (save, 5)):
        command.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    args, overrides = parser.parse_known_args(argv)
    if args.rounds < 1 or args.what == "scaling" and (args.steps < 5 or min(args.ranks) < 1):
        parser.error("--rounds and --ranks need at least 1, --steps at least 5")
    try:
        {"step": bench_step, "data": bench_data, "scaling": bench_scaling, "save": bench_save}[args.what](
            args, overrides
        )
    except (configure.ConfigError, DataError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
