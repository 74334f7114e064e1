"""`scripts.bench eval`: eval.downstream against lm-evaluation-harness' own client of Hugging Face models (HFLM)."""

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

import configure
from data.tokenizer import load_tokenizer
from eval.downstream import TASKS, build_task_manager, check_tasks, load_documents, write_task_spec
from eval.trained import load_run
from model import GPT
from runtime import distributed
from runtime.names import from_gpt2
from scripts.bench.harness import Benchmark

CONFIG = Path(__file__).parents[2] / "config/125m.toml"
BATCH_SIZES = (1, 8, 32)  # of HFLM; its default is 1
SHAPE = ("n_layer=6", "n_head=8", "n_embd=256", "expert_hidden=128", "router=dense", "pos=learned", "bias=true")


def bench_eval(args: Namespace, overrides: list[str]) -> None:
    """Score the paper's tasks by both clients: items/s, and whether log-likelihoods and answers agree."""
    manager = build_task_manager(TASKS)
    from lm_eval.models.huggingface import HFLM

    from eval.harness import Adapter
    from eval.scoring import Scorer

    check_tasks(manager, TASKS, args.tasks_dir)
    device = distributed.pick_device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs, tokenizer, hf_tokenizer = load_models(args, Path(scratch), overrides)
        specs = {name: write_task_spec(manager, name, args.tasks_dir, scratch) for name in TASKS}
        load_documents(manager, specs, args.tasks_dir)
        tasks = {name: build_requests(manager, spec, args.limit) for name, spec in specs.items()}
    theirs, length = theirs.to(device), ours.config.block_size
    adapter = Adapter(Scorer(ours.to(device)), tokenizer)
    for name, requests in tasks.items():  # HFLM refuses documents with an answer longer than the model's block
        long = {request.doc_id for request in requests if len(adapter._encode_pair(*request.args)[1]) > length}
        tasks[name] = [request for request in requests if request.doc_id not in long]
    clients: dict[str, Any] = {"nanokern": adapter}
    for size in BATCH_SIZES:
        clients[f"HFLM, batch {size}"] = HFLM(theirs, tokenizer=hf_tokenizer, batch_size=size, max_length=length)
    answers: dict[str, dict[str, list]] = {}

    def score(name: str) -> None:
        client = clients[name]
        answers[name] = {task: client.loglikelihood(asked, disable_tqdm=True) for task, asked in tasks.items()}

    items = sum(len({request.doc_id for request in requests}) for requests in tasks.values())
    title = f"{args.run or 'random GPT-2'}, {items} items of {len(tasks)} tasks without answers of over {length} tokens"
    bench = Benchmark(args, device, title)
    median = bench.time({name: lambda name=name: score(name) for name in clients}, warm_up=0)
    rows = [[name, items / seconds, median["nanokern"] / seconds] for name, seconds in median.items()]
    bench.add_table(["client", "items/s", "of nanokern's"], rows)
    columns = ["task", "log-likelihoods", "largest difference", "other greedy flags", "other answers", "items"]
    both = answers["nanokern"], answers[f"HFLM, batch {BATCH_SIZES[-1]}"]
    bench.add_table(columns, [[task, *compare(asked, *(one[task] for one in both))] for task, asked in tasks.items()])


def load_models(args: Namespace, scratch: Path, overrides: list[str]) -> tuple[GPT, Any, Any, Any]:
    """Load a run, or else a random GPT-2, here and in transformers: two models, two tokenizers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from scripts.export.__main__ import export_run
    from scripts.export.tokenizer_files import write_tokenizer

    if args.run:
        trained, tokenizer = load_run(args.run)
        export_run(args.run, scratch / "export")
        theirs = AutoModelForCausalLM.from_pretrained(scratch / "export", trust_remote_code=True)
        return trained.model, theirs.eval(), tokenizer, AutoTokenizer.from_pretrained(scratch / "export")
    tokenizer = load_tokenizer("gpt2", args.bpe_ranks)
    write_tokenizer(tokenizer, scratch, 512)
    config = configure.load(CONFIG, [*(f"--model.{part}" for part in SHAPE), *overrides]).model
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_embd": config.n_embd, "n_layer": config.n_layer, "n_head": config.n_head}
    shape |= {"vocab_size": config.vocab_size, "n_positions": config.block_size}
    shape |= {"n_inner": config.top_k * config.expert_hidden, "activation_function": "gelu"}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.1))
    ours = GPT(config)
    ours.load_state_dict(from_gpt2({name: w for name, w in theirs.state_dict().items() if name != "lm_head.weight"}))
    return ours.eval(), theirs.eval(), tokenizer, AutoTokenizer.from_pretrained(scratch)


def build_requests(manager: Any, spec: str, limit: int) -> list[Any]:
    """Build what the harness asks of a client for the first `limit` documents of a task."""
    (task,) = manager.load([spec])["tasks"].values()
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return task.instances


def compare(requests: list[Any], ours: list[tuple], theirs: list[tuple]) -> list[float]:
    """Compare two clients' (log-likelihood, greedy) of each request: the columns of a task."""
    picks: list[dict[int, tuple[float, int]]] = [{}, {}]  # of each client, by document: the best answer
    for request, *pair in zip(requests, ours, theirs, strict=True):
        for pick, (logp, _) in zip(picks, pair, strict=True):
            pick[request.doc_id] = max(pick.get(request.doc_id, (-1e9, 0)), (logp, request.idx))
    largest = max(abs(mine[0] - other[0]) for mine, other in zip(ours, theirs, strict=True))
    greedy = sum(mine[1] != other[1] for mine, other in zip(ours, theirs, strict=True))
    answers = sum(picks[0][doc][1] != picks[1][doc][1] for doc in picks[0])
    return [len(requests), largest, greedy, answers, len(picks[0])]
