"""Any home for any region of a decoder in a CUDA graph, to the bits of no policy; and what regions hold there."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support import same

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.models.attention import SHORT, RMSNorm, make_attention, rotation
from pagestash.policy import HOMES

# Read once, at the first product on a GPU, which may be another file's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from ten_names import MORE, NAMES, TINY, covering, table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_order")]
SEQUENCES, LENGTH = 2, 128
MLA = {"attention": "mla", "q_rank": 32, "kv_rank": 16, "nope_dim": 16, "rope_dim": 16, "v_dim": 24}


def make():
    model = Decoder(
        preset("tiny", layers=2, dense_layers=0, shared_experts=1), device="cuda", dtype=torch.bfloat16
    )
    model.initialise(0)
    return model


def tokens(seed):
    return torch.randint(
        0, 256, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    ).cuda()


def train(homes, steps=5):
    """Losses and weights after five steps, of which the third is captured."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rules = [ps.Rule(f"layers.*.{name}", home, min_bytes=0) for name, home in zip(NAMES, homes)]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page="4KiB"))).attach(model)

    def train_step(batch):
        loss = sum(model(batch[:, :-1], batch[:, 1:]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    losses = [step(tokens(number)) for number in range(steps)]
    step.wait()
    assert step.reruns == 0
    return [torch.stack(losses), *(parameter.detach().clone() for parameter in model.parameters())]


def test_all_pairs_of_homes_over_all_pairs_of_regions_give_the_same_bits_in_a_graph():
    plain = train([])
    assert same(train([]), plain)
    wrong = [homes for homes in covering(HOMES) if not same(train(homes), plain)]
    assert not wrong


def test_the_documented_formulas_hold_on_a_gpu():
    """In bf16, and with norms that are one kernel."""
    model, batch = make(), tokens(0)
    rules = [ps.Rule(f"layers.*.{name}", "keep") for name in NAMES + MORE]
    keeper = ps.Keeper(ps.Policy(rules), check=True).attach(model)
    with keeper.step():
        sum(model(batch[:, :-1], batch[:, 1:])).backward()
    regions = keeper.stats().regions
    for region, _, new, _ in table(TINY | {"b": 2, "c": 0}):
        if "parallel" in region:
            continue
        names = [f"layers.1.{name}" for name in re.findall("`([^`]+)`", region)]
        size = sum(regions[name].peak for name in names if name in regions)
        # Beside what grows with the tokens there are a few numbers for each expert, and attention's random state.
        assert 0 <= size - new * SEQUENCES * LENGTH <= 8 * 8 + 32, region


def agree(got, wanted):
    """`got` in bf16 is `wanted`, float64 on the host, rounded: sums in another order may round otherwise."""
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=2**-7, atol=2**-8 * float(wanted.abs().max()))


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_norms_of_heads_of_a_fused_projection_are_those_of_torch(dim):
    """Our kernel up to 256 elements a row, torch's beyond; other heads are NaN, and nobody reads them."""
    torch.manual_seed(0)
    norm = RMSNorm(dim, 1e-6, device="cuda", dtype=torch.bfloat16)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    qkv = torch.randn(2, 96, 8, dim, device="cuda", dtype=torch.bfloat16)
    qkv[:, :, 5:] = torch.nan
    x = qkv[:, :, 1:5].detach().requires_grad_()
    assert not x.is_contiguous()
    exact, weight = (value.detach().double().cpu().requires_grad_() for value in (x, norm.weight))
    dy = torch.randn(2, 96, 4, dim, device="cuda", dtype=torch.bfloat16)
    y = norm(x)
    y.backward(dy)
    wanted = torch.nn.functional.rms_norm(exact, (dim,), weight, 1e-6)
    wanted.backward(dy.double().cpu())
    agree(y, wanted.detach())
    agree(x.grad, exact.grad)
    agree(norm.weight.grad, weight.grad)
    assert (y.grad_fn.name() == "_RMSNormBackward") == (dim <= SHORT)


@pytest.mark.parametrize("kind", ["grouped", "grouped without norms", "latent"])
def test_attention_on_a_gpu_is_that_on_the_host(kind):
    """In float32, with our kernels there and torch's operators here."""
    changes = {"grouped": {}, "grouped without norms": {"qk_norm": False}, "latent": MLA}[kind]
    config = preset("tiny", **changes)
    torch.manual_seed(0)
    here = make_attention(config, dtype=torch.float64)
    there = make_attention(config, device="cuda", dtype=torch.float32)
    there.load_state_dict(here.state_dict())
    x = torch.randn(2, 64, config.width, dtype=torch.float64)
    dim = config.rope_dim if config.attention == "mla" else config.head_size
    got, wanted = x.float().cuda().requires_grad_(), x.clone().requires_grad_()
    dy = torch.randn_like(x)
    results = []
    for layer, given in ((there, got), (here, wanted)):
        result = layer(given, rotation(64, dim, config.rope_theta, given.device))
        result.backward(dy.to(result))
        results.append(result)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(results[0].double().cpu(), results[1], **close)
    torch.testing.assert_close(got.grad.double().cpu(), wanted.grad, **close)
    for (name, one), other in zip(there.named_parameters(), here.parameters()):
        torch.testing.assert_close(
            one.grad.double().cpu(), other.grad, msg=lambda text, name=name: f"{name}: {text}", **close
        )
