"""How long a training step takes on a GPU: a sum over its parts, with rates measured on an H200.

Each part is bound by arithmetic or by memory. Rates are shares of a data sheet's numbers, from
traces of config/125m.toml (docs/gpu.md, 2026-11-26). Within 6% of eleven measured steps of three
sizes in half precision on an H200, within 7% of nine on an H100, which set no rate. Communication
between GPUs, activation checkpointing and waiting for the host are not in it.
"""

import math

from configure import Config
from runtime.distributed import GPU
from runtime.memory import flops_per_token, parameter_shapes

# Shares of the peak, H200, float16: 620, 732, 417, 543 and 600 of 989 TFLOP/s.
PROJECTIONS = 0.63
HEAD = 0.74
ATTENTION = 0.42  # counted without the causal half
EXPERTS = 0.55  # their products alone
MLP = 0.61
BANDWIDTH = 0.9  # share of the data sheet's: copies reach 4.3 of 4.8 TB/s

# Bytes through memory, by count or from the trace.
BLOCK_BYTES = 88  # norms, residual, gradients of q, k, v: per token, channel and layer
ROUTER_BYTES = 50  # per token, channel and MoE layer; its products are slower than their bytes
LOGITS_BYTES = 6  # softmax of the head: per token and word
WEIGHT_BYTES = 38  # clipping and AdamW: per weight and step
PASS_BYTES = 12  # a weight's value twice, its gradient's sum: per weight and pass after the first
REST = 1.08  # sorting, sums, casts, gaps


def estimate_mfu(config: Config, gpu: GPU, n_gpu: int = 1) -> float:
    """Estimate the model FLOPs utilisation of a run in half precision (source: PaLM, App. B).

    Args:
        config: the run.
        gpu: what its data sheet says.
        n_gpu: ranks that share a batch. Each rank updates all weights, as with DDP.
    """
    model = config.model
    channels = model.n_embd
    bandwidth = BANDWIDTH * gpu.bandwidth
    weights = {"projections": 0, "experts": 0, "mlp": 0}  # that act on a token
    total = 0
    token_bytes = LOGITS_BYTES * model.vocab_size + BLOCK_BYTES * channels * model.n_layer
    for name, shape in parameter_shapes(model).items():
        size = math.prod(shape)
        total += size
        if ".experts." in name:
            weights["experts"] += size // model.n_expert * model.top_k
        elif ".mlp." in name and ".router." not in name:
            weights["mlp"] += size
        elif ".attn." in name:
            weights["projections"] += size
        if name.endswith("experts.w_out"):
            width = shape[1]
            # of each chosen expert: 4 passes over its output or input, 8 over its hidden units
            token_bytes += model.top_k * (8 * channels + 16 * width) + ROUTER_BYTES * channels
    attention = 12 * model.n_layer * model.block_size * channels
    # seconds · peak of a token
    products = 6 * weights["projections"] / PROJECTIONS + 6 * weights["experts"] / EXPERTS
    products += 6 * weights["mlp"] / MLP + 6 * channels * model.vocab_size / HEAD
    products += attention / ATTENTION
    tokens = config.train.batch_size * model.block_size / n_gpu  # of a rank and step
    passes = config.train.batch_size / n_gpu / config.train.micro_batch_size
    seconds = REST * (products / gpu.peak + token_bytes / bandwidth)
    step_bytes = (WEIGHT_BYTES + PASS_BYTES * max(0, passes - 1)) * total
    seconds += REST * step_bytes / bandwidth / tokens
    return flops_per_token(model) / gpu.peak / seconds
