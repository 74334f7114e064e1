"""`scripts.bench data`: how fast text becomes tokens, and tokens batches."""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from data import DataError, prepare
from data.bins import open_tokens
from data.encode import Encoder
from data.loader import Loader
from data.prepare import cores
from data.readers import Input, read_documents
from data.sources import local_inputs, stdlib_inputs
from data.tokenizer import load_tokenizer
from runtime import RunError
from scripts.bench.harness import Benchmark

PREPARED_CHARACTERS = 300_000_000  # so that a full preparation takes longer than its start


def bench_data(args: Namespace, overrides: list[str]) -> None:
    """Time tiktoken alone, a worker's task, a full preparation and the loader."""
    tokenizer: Any = load_tokenizer("gpt2", args.bpe_ranks)
    inputs = local_inputs(map(Path, args.files)) if args.files else stdlib_inputs()
    encoder = Encoder(tokenizer, val_fraction=0.01)
    documents = [raw for file in inputs for raw in read_documents(file, "text")]
    try:
        texts = [text for raw in documents if (text := encoder.text(raw)) is not None]
    except ValueError as error:
        raise DataError(f"{args.files}: a document {error}") from error
    characters = sum(map(len, texts))
    if overrides or not characters:
        raise RunError(f"unknown options {overrides}" if overrides else f"no text in {args.files}: name other files")
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    title = f"{characters / 1e6:.1f} M characters, {tokens / 1e6:.1f} M GPT-2 tokens"
    bench = Benchmark(args, torch.device("cpu"), title, "ratio: to tiktoken with as many threads")
    with tempfile.TemporaryDirectory() as folder:
        repeats = 1 + PREPARED_CHARACTERS // characters
        link_copies(inputs, Path(folder, "source"), repeats)
        command = ["text", "--source", f"{folder}/source", "--out", folder, "--name", "bench", "--force"]
        command += ["--bpe-ranks", args.bpe_ranks] if args.bpe_ranks else []
        tiktoken = tokenizer.bpe.encode_ordinary_batch
        functions: dict[str, tuple[Callable[[], object], int]] = {
            "tiktoken, 1 thread": (partial(tiktoken, texts, num_threads=1), tokens),
            "our task, 1 process": (partial(encoder, documents), tokens),
            f"tiktoken, {cores()} threads": (partial(tiktoken, texts, num_threads=cores()), tokens),
            f"full preparation, {cores()} workers": (partial(prepare_quietly, command), tokens * repeats),
        }
        median = bench.time({name: function for name, (function, _) in functions.items()})
        rates = [functions[name][1] / seconds for name, seconds in median.items()]
        bases = [rates[0], rates[0], rates[2], rates[2]]
        rows = [[name, rate, rate / base] for name, rate, base in zip(functions, rates, bases, strict=True)]
        bench.add_table(["what", "tokens/s", "ratio"], rows)

        train = open_tokens(Path(folder, "bench"), "train")
        shapes = [(B, T) for T in (512, 1024, 2048) for B in (8, 32)]
        loaders = {(B, T): partial(load_batches, Loader(train, T, B, seed=0), count()) for B, T in shapes}
        median = bench.time(loaders)
        rows = [["loader, 1 thread", B, T, 100 * B * T / seconds] for (B, T), seconds in median.items()]
        bench.add_table(["what", "windows", "length", "tokens/s"], rows)


def link_copies(inputs: list[Input], folder: Path, repeats: int) -> None:
    """Link each of `inputs` into the new `folder`, `repeats` times; Python modules as text."""
    folder.mkdir()
    for i in range(repeats):
        for number, file in enumerate(inputs):
            name = Path(file.name).name
            link = Path(folder, f"{i}-{number}-{name}{'.txt' if name.endswith('.py') else ''}")
            link.symlink_to(Path(file.url).resolve())


def prepare_quietly(command: list[str]) -> None:
    """Run data.prepare without its output."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        assert prepare.main(command) == 0


def load_batches(loader: Loader, steps: Iterator[int]) -> None:
    """Load the batches of the next 100 steps."""
    for step in islice(steps, 100):
        loader.batch(step)
