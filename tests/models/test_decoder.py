"""The decoder as a whole: it looks back only, its loss is the loss of its logits, its weights have names."""

import pytest
import torch
import torch.nn.functional as F
from support import same

from pagestash.models import Decoder, preset

SMALL = {
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "dense_width": 32,
    "experts": 4,
    "expert_width": 16,
    "vocab": 50,
}
LATENT = {"attention": "mla", "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "v_dim": 6}
KINDS = {
    "gqa": {},
    "mla": LATENT,
    "shared": {"shared_experts": 2},
    "sigmoid": {"score": "sigmoid", "correction_bias": True, "groups": 2, "group_limit": 1},
    "clamped": {"activation": "clamped", "expert_bias": True, "attention_bias": True},
}


def make(kind="gqa", seed=0, **changes):
    model = Decoder(preset("tiny", layers=3, **{**SMALL, **KINDS[kind], **changes}))
    model.initialise(seed)
    return model


def tokens(seed=0, length=9):
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one(kind):
    model = make(kind)
    first, second = tokens(), tokens()
    second[:, 5:] = tokens(1)[:, 5:]
    a, b = model(first), model(second)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=1e-5, atol=1e-6)
    assert (a[:, 5:] - b[:, 5:]).abs().min(1).values.max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_logits_and_so_are_the_gradients(kind):
    model, x = make(kind), tokens(length=10)
    inputs, labels = x[:, :-1], x[:, 1:]
    loss, aux = model(inputs, labels)
    (loss + aux).backward()
    fused = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, plain)
    _, aux = model(inputs, labels)
    (plain + aux).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, fused[name], rtol=1e-4, atol=1e-6, msg=name)


def test_weights_come_from_the_seed_and_their_names():
    a, b, c = make(seed=1), make(seed=1), make(seed=2)
    assert same(a.parameters(), b.parameters())
    assert not torch.equal(a.head.weight, c.head.weight)
    assert not torch.equal(a.layers[1].moe.expert_fc1.weight, a.layers[2].moe.expert_fc1.weight)


def test_ranks_together_have_the_experts_of_one_process():
    class Half:
        experts = 2

    whole = make(seed=3).layers[1].moe
    for rank in range(2):
        config = preset("tiny", layers=3, **SMALL)
        model = Decoder(config, make_dispatch=lambda config: Half())
        model.initialise(3, first_expert=2 * rank)
        part = model.layers[1].moe
        assert torch.equal(part.expert_fc1.weight, whole.expert_fc1.weight[2 * rank :][:2])
        assert torch.equal(part.expert_fc2.weight, whole.expert_fc2.weight[2 * rank :][:2])


def test_selection_biases_move_towards_an_even_load():
    model, x = make("sigmoid"), tokens()
    model(x, x)
    router = model.layers[1].moe.router
    load = router.load.clone()
    assert load.sum() == x.numel() * 2
    model.update_router_bias(0.1)
    torch.testing.assert_close(router.correction, 0.1 * torch.sign(load.mean() - load))
    assert router.load.sum() == 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_autocast_computes_in_bf16_and_keeps_a_float32_loss():
    model, x = make(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss, aux = model(x[:, :-1], x[:, 1:])
    (loss + aux).backward()
    assert loss.dtype == torch.float32
    exact, _ = model(x[:, :-1], x[:, 1:])
    assert abs(loss - exact) < 0.05
    assert loss != exact
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
