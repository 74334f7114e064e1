"""Sums that must stay in float32, what torch.compile is told of dtypes and shapes, and options of few tokens."""

import pytest
import torch
from numerics import seeded
from test_kernels import FORMS, assert_equals_reference, make_inputs, on_layout, run_backend  # noqa: F401

from attention import rotate
from configure import Config
from model import GPT
from router import ROUTERS


def run_and_check_fake(operator, *inputs):
    torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))
    return operator(*inputs)


@pytest.mark.numerics
def test_sums_over_many_experts_stay_in_float32(on_layout):  # noqa: F811
    """Of 512 equal terms in bfloat16 a running sum would stop growing at the 256th: output and gradient of x."""
    N, C, H, E = 3, 4, 4, 512
    leaves, _, d_out = make_inputs(N, C, H, E, E, "any shape", torch.bfloat16)
    leaves[1], leaves[2] = (w[:1].abs().expand(E, -1, -1).contiguous() for w in leaves[1:3])
    leaves[0], leaves[3], d_out = leaves[0].abs(), torch.ones(N, E), d_out.abs()
    assert_equals_reference(leaves, on_layout(torch.arange(E).expand(N, E).contiguous()), d_out)


def test_gradients_of_gates_are_not_rounded_to_half_precision(on_layout):  # noqa: F811
    leaves, experts, d_out = make_inputs(70, 16, 24, 8, 2, dtype=torch.bfloat16)
    d_weights = run_backend(leaves, on_layout(experts), d_out)[4]
    assert d_weights.dtype == torch.float32 and not torch.equal(d_weights, d_weights.bfloat16().float())


@pytest.mark.parametrize("form", FORMS)
def test_fake_experts_are_as_the_real_ones(form):
    """Of half-precision inputs with float32 weights and their copies, as under autocast; gated experts are wider."""
    ours = pytest.importorskip("kernels.triton_experts")
    activation, *gated = FORMS[form]
    (x, w_in, w_out, weights), experts, d_out = make_inputs(5, 8, 6, 3, 2, "", torch.float32, "cpu", *gated)
    x, d_out, silu = x.half(), d_out.half(), activation == "silu"
    copies = w_in.half(), w_out.half()
    _, *kept = run_and_check_fake(ours.experts_forward, x, w_in, w_out, weights, experts, silu, *copies)
    further = d_out, x, *copies, weights, *kept, silu, torch.float32
    gradients = run_and_check_fake(ours.experts_backward, *further)
    assert [t.dtype for t in gradients] == [torch.float16, *[torch.float32] * 3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("name", ["kern", "softmax"])
def test_fake_router_is_as_the_real_one(name):
    ours = pytest.importorskip("kernels.triton_router")
    spec, B, T, E, K = ROUTERS[name], 2, 3, 6, 2
    gamma = torch.ones(1) if spec.gamma else None
    inputs = torch.randn(B * T, E), torch.zeros(E), torch.ones(1), gamma, spec.phi, spec.pre, spec.post
    experts = run_and_check_fake(ours.route_forward, *inputs, K, B)[1]
    if gamma is not None:
        upstream = torch.ones(B * T, K), torch.ones(B, E), torch.ones(())
        run_and_check_fake(ours.route_backward, inputs[0], experts, *inputs[2:], B, *upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_is_computed_in_float32(dtype):
    x = torch.randn(2, 3, 400, 8, generator=seeded()).to(dtype)
    assert torch.equal(rotate(x, 10000.0), rotate(x.float(), 10000.0).to(dtype))


@pytest.mark.parametrize("router", ["dense", "softmax"])
def test_dropout_drops_its_share_of_each_branch(router):
    """Of the embedding, of attention's output and of the MLP's; none in evaluation."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 40, "n_expert": 4, "top_k": 2}
    torch.manual_seed(0)
    model = GPT(Config().model.model_copy(update=sizes | {"router": router, "dropout": 0.25}))
    block, x, idx = model.blocks[0], torch.randn(8, 32, 64), torch.zeros(8, 32, dtype=torch.int64)
    torch.nn.init.zeros_(block.attn.proj.weight)
    with torch.no_grad():
        assert ((block(x, idx)[0] == x).float().mean() - 0.25).abs() < 0.03
        torch.nn.init.normal_(block.attn.proj.weight)
        assert ((block.attn(x) == 0).float().mean() - 0.25).abs() < 0.03
        model.eval()
        assert (block.attn(x) != 0).all() and (block(x, idx)[0] != x).float().mean() > 0.99
