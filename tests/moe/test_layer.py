"""The layer against plain autograd code: values, gradients, what is saved, and what a short pool costs."""

import pytest
import torch
from support import error
from support.activations import plain as activated
from support.tiers import slow

from pagestash.kernels.moe.activation import Activation, as_activation
from pagestash.kernels.moe.choose_experts import weigh_reference
from pagestash.kernels.moe.route import route
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.moe.router import auxiliary_losses, choose_experts, logits_of, scoring_of
from pagestash.pages.pool import PagePool

T, D, N, E, K = 40, 32, 24, 6, 2


@pytest.fixture(params=["reference", "kernels"])
def both(request):
    """The torch references (fast), and the kernels, interpreted."""
    if request.param == "kernels":
        request.getfixturevalue("interpreted_kernels")


def config(**changes):
    return MoEConfig(**{"width": D, "expert_width": N, "experts": E, "top_k": K} | changes)


def plain(moe, x):
    """The same layer as anyone would write it, every expert over every token, in float64."""
    c, act = moe.config, as_activation(moe.config.activation)
    get = {name: p.detach().double().requires_grad_() for name, p in moe.named_parameters()}
    x = x.detach().double().requires_grad_()
    logits = x @ get["router.weight"].t()
    ids, _ = choose_experts(logits.detach().float(), moe.router.correction, c)
    counts = torch.bincount(ids.view(-1), minlength=c.experts).double()
    weights, aux = weigh_reference(logits, ids, scoring_of(c)), auxiliary_losses(logits, ids, counts, c)
    y = 0
    for e in range(c.experts):
        h = x @ get["expert_fc1.weight"][e].t()
        if c.bias:
            h = h + get["expert_fc1.bias"][e]
        out = activated(h, act) @ get["expert_fc2.weight"][e].t()
        if c.bias:
            out = out + get["expert_fc2.bias"][e]
        y = y + out * (weights * (ids == e)).sum(1, keepdim=True)
    if c.shared_experts:
        y = y + activated(x @ get["shared_experts.up"][0].t(), act) @ get["shared_experts.down"][0].t()
    return y, aux, x, get


def compare(moe, x, most):
    dy = torch.randn(x.shape).to(x.dtype)
    x = x.clone().requires_grad_()
    y, aux = moe(x)
    ((y * dy).sum() + aux).backward()
    y_true, aux_true, x_true, get = plain(moe, x)
    ((y_true * dy.double()).sum() + aux_true).backward()
    assert error(y, y_true) < most
    assert abs(aux.item() - aux_true.item()) <= 1e-5 * abs(aux_true.item())
    assert error(x.grad, x_true.grad) < most
    for name, parameter in moe.named_parameters():
        assert error(parameter.grad, get[name].grad) < most, name


@pytest.mark.parametrize("changes", [
    {},
    {"normalise": False, "balance_loss": 0.1, "z_loss": 0.01},
    {"score": "sigmoid", "correction_bias": True, "groups": 3, "group_limit": 2, "route_scale": 2.5},
    {"score": "sigmoid", "normalise": False, "balance_loss": 0.1},
    {"activation": "clamped", "bias": True},
    {"activation": "gelu", "shared_experts": 2},
    {"activation": Activation(curve="relu2", gated=False), "shared_experts": 1, "bias": True},
    {"activation": Activation(curve="erf", limit=1.0)},
])  # fmt: skip
@pytest.mark.usefixtures("both")
def test_values_and_gradients_are_those_of_plain_code(changes):
    torch.manual_seed(0)
    moe = MoE(config(**changes))
    if moe.router.correction is not None:
        moe.router.correction.normal_(std=0.1)
    if moe.config.bias:
        moe.expert_fc1.bias.data.normal_()
        moe.expert_fc2.bias.data.normal_()
    compare(moe, torch.randn(T, D), 2e-5)


def test_bf16_is_as_close_as_bf16_can_be():
    torch.manual_seed(0)
    moe = MoE(config(), dtype=torch.bfloat16)
    compare(moe, torch.randn(T, D).to(torch.bfloat16), 2e-2)


@pytest.mark.usefixtures("both")
def test_an_expert_chosen_twice_counts_twice():
    """As if chosen once, with both weights."""
    torch.manual_seed(0)
    moe = MoE(config(bias=True))
    moe.expert_fc2.bias.data.normal_()
    x, w = torch.randn(4, D), torch.rand(4, K)
    twice = torch.tensor([[0, 0], [1, 0], [5, 5], [2, 3]], dtype=torch.int32)
    once, summed = twice.clone(), w.clone()
    once[[0, 2], 1], summed[[0, 2], 0] = -1, w[[0, 2]].sum(1)
    found = []
    for ids, weights in ((twice, w), (once, summed)):
        moe.zero_grad()
        x, weights = x.detach().requires_grad_(), weights.clone().requires_grad_()
        y = moe.experts(x, weights, ids)
        y.square().sum().backward()
        grads = [p.grad for name, p in moe.named_parameters() if name.startswith("expert_")]
        found.append([y, x.grad, weights.grad[[0, 2], 0], *grads])
    assert len(found[0]) == 7
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("both")
def test_ids_and_weights_may_be_columns_of_a_wider_tensor():
    torch.manual_seed(0)
    moe = MoE(config(bias=True))
    moe.expert_fc2.bias.data.normal_()
    x, wide_weights, wide_ids = torch.randn(T, D), torch.rand(T, E), torch.rand(T, E).argsort(1)
    weights, ids = wide_weights[:, :K], wide_ids[:, :K]
    got, wanted = moe.experts(x, weights, ids), moe.experts(x, weights.contiguous(), ids.contiguous())
    assert torch.equal(got, wanted)


def test_experts_without_rows_get_zero_gradients():
    moe = MoE(config(top_k=1))
    moe.router.weight.data.zero_()  # ties go to the lowest id: every token to expert 0
    y, _ = moe(torch.randn(T, D))
    y.sum().backward()
    assert moe.expert_fc1.weight.grad[0].any()
    assert not moe.expert_fc1.weight.grad[1:].any()
    assert not moe.expert_fc2.weight.grad[1:].any()


def saved_bytes(moe, x):
    """Bytes that autograd keeps, by storage, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = moe(x)
    return sum(size for size, _ in seen.values()), out


def test_saved_are_the_input_and_the_first_projection_and_nothing_else_of_size():
    c = MoEConfig(width=256, expert_width=128, experts=E, top_k=K)
    moe = MoE(c, dtype=torch.bfloat16)
    tokens = 128
    x = torch.randn(tokens, 256).to(torch.bfloat16).requires_grad_()
    total, _ = saved_bytes(moe, x)
    promised = 2 * tokens * 256 + 4 * tokens * K * 128
    # Beside them: ids, weights, order and inverse, 4 bytes each a choice, and the bounds and counts.
    assert promised <= total <= promised + 16 * tokens * K + 8 * E + 4
    pool = PagePool("cpu", 4096, 1024)
    moe.experts.pool = pool
    total, out = saved_bytes(moe, x)
    assert total <= 2 * tokens * 256 + 16 * tokens * K + 8 * E
    assert pool.stats().device.in_use_bytes == 4 * tokens * K * 128
    del out
    assert pool.stats().device.in_use == 0


def gradients(moe, x, dy, retain=False):
    for p in moe.parameters():
        p.grad = None
    x = x.clone().requires_grad_()
    y, _ = moe(x)
    if retain:
        torch.autograd.grad(y, list(moe.parameters()), dy, retain_graph=True)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in moe.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_pool_costs_time_and_not_a_bit(dtype):
    moe = MoE(config(), dtype=dtype)
    x, dy = torch.randn(T, D).to(dtype), torch.randn(T, D).to(dtype)
    wanted = gradients(moe, x, dy)
    needed = -(-T * K * 2 * N * x.element_size() // 1024)
    for pages in (needed + 1, needed, needed - 1, 1):
        moe.experts.pool = PagePool("cpu", 1024, pages)
        for one, two in zip(gradients(moe, x, dy), wanted):
            assert torch.equal(one, two)
        stats = moe.experts.pool.stats()
        assert not stats.overflow
        assert stats.device.in_use == 0
        assert stats.given_up_groups == (pages < needed)
        assert stats.device.wanted == needed


@pytest.mark.parametrize("pages", [100, 1, 0])
def test_backward_twice_is_right_and_a_third_time_raises(pages):
    moe = MoE(config(shared_experts=1))
    moe.experts.pool = PagePool("cpu", 1024, pages) if pages else None
    x, dy = torch.randn(T, D), torch.randn(T, D)
    for one, two in zip(gradients(moe, x, dy, retain=True), gradients(moe, x, dy)):
        assert torch.equal(one, two)
    x.requires_grad_()
    y, _ = moe(x)
    y.backward(dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_without_gradients_nothing_is_reserved():
    moe = MoE(config(), pool=PagePool("cpu", 1024, 100))
    with torch.no_grad():
        y, _ = moe(torch.randn(T, D))
    assert not y.requires_grad
    assert moe.experts.pool.stats().device.peak == 0


def test_beyond_capacity_the_flag_is_raised_unless_dropping_was_asked_for():
    moe = MoE(config(capacity=T * K - 5))
    x = torch.randn(T, D, requires_grad=True)
    y, _ = moe(x)
    assert moe.over_capacity == 1
    y.sum().backward()
    assert x.grad.isfinite().all()
    moe = MoE(config(capacity=T * K - 5, drop=True))
    moe(x)
    assert moe.over_capacity == 0
    moe = MoE(config(capacity=T * K))
    compare(moe, torch.randn(T, D), 2e-5)
    assert moe.over_capacity == 0


@pytest.mark.usefixtures("interpreted_kernels")
def test_kernels_and_pages_together():
    """One pass of the interpreted kernels over a pool that has room, and one that has not."""
    moe = MoE(config(), dtype=torch.float32)
    x, dy = torch.randn(12, D), torch.randn(12, D)
    wanted = gradients(moe, x, dy)
    for pages in (5, 1):
        moe.experts.pool = PagePool("cpu", 1024, pages)
        for one, two in zip(gradients(moe, x, dy), wanted):
            assert torch.equal(one, two)


class Loopback:
    """A dispatch whose wire ends where it starts: among slots of NaN, with room to spare for rows."""

    experts = E

    def __init__(self, expected):
        self.expected = expected

    def send(self, x, ids, weights, over):
        def padded(tensor, value):
            return torch.cat([tensor, torch.full((7, tensor.shape[1]), value, dtype=tensor.dtype)])

        ids = padded(ids, -1)
        routing = route(ids, E, capacity=T * K + 17, over=over)
        return Received(padded(x, torch.nan), padded(weights, torch.nan), ids, routing, self.expected)

    def collect(self, slots, received):
        return slots[:T]


@pytest.mark.parametrize(
    ("bias", "expected"), [(False, T * K - 9), *slow((True, 0), (True, T * K - 9), (False, T * K + 100))]
)
@pytest.mark.usefixtures("both")
def test_received_rows_give_the_result_of_local_ones(bias, expected):
    torch.manual_seed(1)
    local = MoE(config(bias=bias))
    if bias:
        local.expert_fc1.bias.data.normal_()
        local.expert_fc2.bias.data.normal_()
    remote = MoE(config(bias=bias), dispatch=Loopback(expected))
    remote.load_state_dict(local.state_dict())
    x, dy = torch.randn(T, D), torch.randn(T, D)
    beyond = max(T * K - expected, 0)
    rows_pages = -(-(beyond * D * 4) // 256)
    h_pages = -(-(beyond * 2 * N * 4) // 256)
    unstashed = gradients(remote, x, dy)
    for one, two in zip(unstashed, gradients(local, x, dy)):
        assert error(one, two.double()) < 1e-6
    for pages in (rows_pages + h_pages, rows_pages + h_pages - 1, rows_pages):
        remote.experts.pool = PagePool("cpu", 256, max(pages, 1))
        for one, two in zip(gradients(remote, x, dy, retain=True), unstashed):
            assert torch.equal(one, two)
        stats = remote.experts.pool.stats()
        assert not stats.overflow
        assert stats.device.in_use == 0
        assert stats.given_up_groups == (0 <= pages < rows_pages + h_pages)
        assert stats.device.peak == (rows_pages if stats.given_up_groups else rows_pages + h_pages)
    if beyond:
        # Fewer pages than the received rows need: those cannot be had again.
        remote.experts.pool = PagePool("cpu", 256, rows_pages - 1)
        gradients(remote, x, dy)
        assert remote.experts.pool.overflow


def test_autocast_computes_in_bf16_with_float32_parameters():
    moe = MoE(config())
    x = torch.randn(T, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = moe(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert moe.expert_fc1.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float32


def test_routing_in_backward_is_that_of_forward():
    """Even when the router's weights change in between, gradients flow where the tokens went."""
    moe = MoE(config(top_k=1))
    x = torch.randn(T, D)
    ids, _ = choose_experts(logits_of(x, moe.router.weight), None, moe.config)
    y, _ = moe(x)
    moe.router.correction = None
    y.sum().backward()
    used = torch.bincount(ids.view(-1), minlength=E) > 0
    assert torch.equal(moe.expert_fc1.weight.grad.abs().sum((1, 2)) > 0, used)


def test_bad_configurations_are_named():
    for changes, match in [
        ({"top_k": 7}, "top_k=7"),
        ({"groups": 4}, "groups=4"),
        ({"activation": "relu"}, "relu"),
        ({"score": "tanh"}, "tanh"),
        ({"drop": True}, "capacity"),
        ({"experts": 0}, "experts=0"),
        ({"groups": 6, "group_limit": 1}, "top_k=2"),
    ]:
        with pytest.raises(ValueError, match=match):
            config(**changes)
    with pytest.raises(ValueError, match=r"\[\.\.\., 32\]"):
        MoE(config())(torch.randn(3, 31))
