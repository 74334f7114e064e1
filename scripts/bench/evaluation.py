"""`scripts.bench eval`: eval.downstream against lm-evaluation-harness' own client of Hugging Face models (HFLM)."""

import statistics
import tempfile
import time
from pathlib import Path

import torch

import configure
from data.tokenizer import load_tokenizer
from eval.downstream import TASKS, build_task_manager, check_tasks, load_documents, write_task_spec
from eval.trained import load_run
from model import GPT
from runtime import RunError, distributed
from runtime.names import from_gpt2
from scripts.bench.tools import describe, synchronize
from scripts.export.tokenizer_files import write_tokenizer

REPO_ROOT = Path(__file__).parents[2]
BATCH_SIZES = (1, 8, 32)  # of HFLM; 1 is what it does unless told otherwise
SHAPE = ("n_layer=6", "n_head=8", "n_embd=256", "top_k=8", "expert_hidden=128", "router=dense", "pos=learned")


def bench_eval(args, overrides):
    """Log-likelihoods of the paper's tasks by both, in turns: items/s, the largest difference, and whether any answer
    differs. The model is a run, exported for HFLM, or without one a random GPT-2."""
    manager = build_task_manager(TASKS)
    from lm_eval.models.huggingface import HFLM

    from eval.harness import Adapter
    from eval.scoring import Scorer

    check_tasks(manager, TASKS, args.tasks_dir)
    device = distributed.pick_device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs, tokenizer, hf_tokenizer = models_of(args, Path(scratch), overrides)
        specs = {name: write_task_spec(manager, name, args.tasks_dir, scratch) for name in TASKS}
        load_documents(manager, specs, args.tasks_dir)
        tasks = {name: requests_of(manager, spec, args.limit) for name, spec in specs.items()}
    theirs, length = theirs.to(device), ours.config.block_size
    adapter = Adapter(Scorer(ours.to(device)), tokenizer)
    tasks = {name: that_fit(requests, adapter, length) for name, requests in tasks.items()}
    clients = {"nanokern": adapter}
    for size in BATCH_SIZES:
        clients[f"HFLM, batch {size}"] = HFLM(theirs, tokenizer=hf_tokenizer, batch_size=size, max_length=length)
    seconds, answers = {name: [] for name in clients}, {}
    for _ in range(args.rounds):
        for name, client in clients.items():
            begin = time.perf_counter()
            answers[name] = {
                task: client.loglikelihood(requests, disable_tqdm=True) for task, requests in tasks.items()
            }
            synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
    items = sum(len({request.doc_id for request in requests}) for requests in tasks.values())
    print(
        f"{describe(device)}; {args.run or 'random GPT-2'}, {items} items of {len(tasks)} tasks, {args.rounds} rounds"
    )
    for name, taken in seconds.items():
        ratio = statistics.median(seconds["nanokern"]) / statistics.median(taken)
        print(f"{name:16} {items / statistics.median(taken):8.1f} items/s   {ratio:5.2f} of nanokern's")
    compare(tasks, answers["nanokern"], answers[f"HFLM, batch {BATCH_SIZES[-1]}"])


def models_of(args, scratch, overrides):
    """(GPT, transformers' model, Tokenizer, transformers' tokenizer), of the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from scripts.export.__main__ import export

    if args.run:
        trained, tokenizer = load_run(args.run)
        export(args.run, scratch / "export")
        theirs = AutoModelForCausalLM.from_pretrained(scratch / "export", trust_remote_code=True)
        return trained.model, theirs.eval(), tokenizer, AutoTokenizer.from_pretrained(scratch / "export")
    tokenizer = load_tokenizer("gpt2", args.bpe_ranks)
    write_tokenizer(tokenizer, scratch, 512)
    config = configure.load(REPO_ROOT / "config/125m.toml", [*(f"model.{part}" for part in SHAPE), *overrides]).model
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, n_inner=config.top_k * config.expert_hidden, activation_function="gelu",
            initializer_range=0.1,
        )
    )  # fmt: skip
    state = from_gpt2({name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"})
    ours = GPT(config)
    left = {name for name in state if name not in ours.state_dict()}
    if any(state[name].any() for name in left):
        raise RunError("the random GPT-2 has biases that are not 0")
    ours.load_state_dict({name: tensor for name, tensor in state.items() if name not in left})
    return ours.eval(), theirs.eval(), tokenizer, AutoTokenizer.from_pretrained(scratch)


def requests_of(manager, spec, limit):
    """What the harness asks of a client for the first `limit` documents of a task."""
    (task,) = manager.load([spec])["tasks"].values()
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return task.instances


def that_fit(requests, adapter, length):
    """Without documents that have an answer longer than the model's block, which HFLM refuses."""
    long = {request.doc_id for request in requests if len(adapter._encode_pair(*request.args)[1]) > length}
    if long:
        print(f"{requests[0].task_name}: {len(long)} documents left out: answers of more than {length} tokens")
    return [request for request in requests if request.doc_id not in long]


def compare(tasks, ours, theirs):
    """Print, task by task, the largest difference of a log-likelihood and how many answers differ."""
    for task, requests in tasks.items():
        pairs = list(zip(ours[task], theirs[task], strict=True))
        largest = max(abs(mine[0] - other[0]) for mine, other in pairs)
        greedy = sum(mine[1] != other[1] for mine, other in pairs)
        picks = []
        for client in (ours, theirs):
            best = {}
            for request, (logp, _) in zip(requests, client[task], strict=True):
                best[request.doc_id] = max(best.get(request.doc_id, (-1e9, 0)), (logp, request.idx))
            picks.append({doc: idx for doc, (_, idx) in best.items()})
        other = sum(picks[0][doc] != picks[1][doc] for doc in picks[0])
        print(
            f"{task:14} {len(requests):6} log-likelihoods, largest difference {largest:.1e}, "
            f"{greedy} greedy flags and {other} of {len(picks[0])} answers differ"
        )
