"""`scripts.bench data`: how fast text becomes tokens, and tokens batches."""

import os
import statistics
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import torch

from data import DataError, prepare
from data.bins import open_tokens
from data.encode import Encoder
from data.loader import Loader
from data.prepare import cores
from data.readers import read
from data.sources import local_inputs, stdlib_inputs
from data.tokenizer import load_tokenizer
from scripts.bench.tools import describe, in_turns

PREPARED_CHARACTERS = 300_000_000  # so that a whole preparation outlasts its start


def bench_data(args, overrides):
    tokenizer = load_tokenizer("gpt2", args.bpe_ranks)
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
        ranks = ["--bpe-ranks", args.bpe_ranks] if args.bpe_ranks else []
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
