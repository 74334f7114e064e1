"""Text from a trained run.

python -m scripts.sample runs/quickstart-kern --prompt "def " --tokens 400 --temperature 0.8 --top-k 50
"""

import argparse
import sys
from pathlib import Path

import torch

import configure
from data.bins import open_tokenizer
from model import GPT
from runtime import checkpoint


@torch.no_grad()
def generate(model, idx, count, temperature=1.0, top_k=0, top_p=1.0, generator=None, vocab_size=None):
    """Continue idx (1, T) by `count` tokens: (1, T + count). The model sees the last block_size tokens.

    `temperature` 0 takes the likeliest token. `top_k` > 0 keeps the k likeliest, `top_p` < 1 the fewest whose
    probabilities reach p (nucleus sampling, arXiv 1904.09751). Ids from `vocab_size` on, which pad the
    model's vocabulary, are never drawn.
    """
    for _ in range(count):
        logits = model(idx[:, -model.config.block_size :]).logits[:, -1, :vocab_size].float()  # (1, V)
        if temperature == 0:
            idx = torch.cat([idx, logits.argmax(-1, keepdim=True)], dim=1)
            continue
        logits, order = (logits / temperature).sort(dim=-1, descending=True)
        if top_k:
            logits[:, top_k:] = -torch.inf
        probabilities = logits.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens hold already
        probabilities[before >= top_p] = 0
        idx = torch.cat([idx, order.gather(-1, torch.multinomial(probabilities, 1, generator=generator))], dim=1)
    return idx


def load_model(folder, step=None):
    """(model in evaluation mode, Config, step) of a run on the CPU. Raises ValueError if it has no checkpoint, or a
    damaged one."""
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder}: no config.toml, so not a run; give a folder such as runs/quickstart-kern")
    config = configure.load(folder / "config.toml")
    steps = checkpoint.steps(folder / "checkpoints")
    if not steps or (step is not None and step not in steps):
        wanted = "" if step is None else f" of step {step}"
        raise ValueError(f"{folder}: no checkpoint{wanted}, it has {steps or 'none'}; train it first")
    step = step or steps[-1]
    model = GPT(config.model).eval()
    checkpoint.load_model(folder / "checkpoints", step, model)
    return model, config, step


def load_run(folder, step=None):
    """The same with the tokenizer, second, which the data set holds."""
    model, config, step = load_model(folder, step)
    return model, open_tokenizer(Path(config.data.dir, config.data.name)), config, step


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.sample", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart-kern")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=400, help="tokens to add (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest up to this mass (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the last)")
    args = parser.parse_args(argv)
    try:
        if not args.temperature >= 0 or args.top_k < 0 or not 0 < args.top_p <= 1 or args.tokens < 1:
            raise ValueError("--temperature and --top-k must be at least 0, --top-p in (0, 1], --tokens at least 1")
        model, tokenizer, _, _ = load_run(args.run, args.step)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    prompt = [tokenizer.eot, *tokenizer.encode(args.prompt)]
    generator = torch.Generator().manual_seed(args.seed)
    sampling = (args.temperature, args.top_k, args.top_p, generator, tokenizer.vocab_size)
    idx = generate(model, torch.tensor([prompt]), args.tokens, *sampling)
    print(tokenizer.decode(idx[0, 1:].tolist()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
