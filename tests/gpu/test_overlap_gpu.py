"""Pairs over NCCL at one rank: eagerly, in a CUDA graph, and with either side held back."""

import pytest
import torch
import torch.distributed as dist

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.moe import AllGather, AllToAll, overlap, step_in_halves
from pagestash.moe.parallel import exchange
from pagestash.moe.parallel.collectives import communication_stream
from pagestash.torch_internals import spin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_order")]
CUDA = torch.device("cuda", 0)
TOKENS, LONG = 64, 4_000_000  # cycles: about 2 ms
CONFIG = preset(
    "tiny", layers=3, vocab=256, width=128, dense_width=128, expert_width=64, dense_layers=1, shared_experts=1
)
POLICIES = {
    "plain": [],
    "stash": [("layers.*.moe.experts", "stash")],
    "offload": [("layers.*.attn", "offload")],
    "recompute": [("layers.*.moe.experts", "recompute"), ("layers.*.attn", "recompute")],
}


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(kind="padded"):
    dispatch = AllGather if kind == "gather" else AllToAll
    model = Decoder(
        CONFIG,
        make_dispatch=lambda config: dispatch(config, max_tokens=TOKENS),
        device=CUDA,
        dtype=torch.bfloat16,
    )
    model.initialise(0)
    return model


def in_sequence(forward, backward):
    done = backward()
    return forward(), done


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (1, TOKENS + 1), generator=generator).to(CUDA) for _ in range(3)]


def train(model, pair, keeper, parts):
    def forward(tokens):
        return sum(model(tokens[:, :-1], tokens[:, 1:]))

    with keeper.step():
        before = forward(parts[0])
        for tokens in parts[1:]:
            before, _ = pair(lambda tokens=tokens: forward(tokens), before.backward)
        before.backward()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def run(policy, kind, pair, steps=3):
    model = make(kind)
    rules = [ps.Rule(*rule, min_bytes=0) for rule in POLICIES[policy]]
    keeper = ps.Keeper(ps.Policy(rules)).attach(model)
    for _ in range(steps):
        model.zero_grad()
        train(model, pair, keeper, batches())
    return gradients(model)


@pytest.mark.parametrize("kind", ["gather", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_bits_are_those_of_one_after_the_other(policy, kind):
    assert all(map(torch.equal, run(policy, kind, overlap), run(policy, kind, in_sequence)))


@pytest.mark.parametrize("side", ["wire", "compute"])
def test_with_one_side_held_back(side, monkeypatch):
    wanted = run("stash", "padded", in_sequence)
    inner = exchange.pause

    def held_back(direction):
        if side == "compute":
            spin(LONG)
        else:
            with communication_stream(CUDA).after():
                spin(LONG)
        inner(direction)

    monkeypatch.setattr(exchange, "pause", held_back)
    assert all(map(torch.equal, run("stash", "padded", overlap), wanted))


def test_in_a_cuda_graph():
    wanted = run("plain", "padded", in_sequence)
    model, parts = make(), batches()
    keeper = ps.Keeper(ps.Policy([])).attach(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(model, overlap, keeper, parts)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(model, overlap, keeper, parts)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        graph.replay()
        assert all(map(torch.equal, gradients(model), wanted))


def test_no_wait_for_the_device():
    model, parts = make(), batches()
    keeper = ps.Keeper(ps.Policy([])).attach(model)
    train(model, overlap, keeper, parts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, overlap, keeper, parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_halves_of_a_batch():
    tokens = torch.cat(batches()[:2])

    def loss_of(part):
        return sum(model(part[:, :-1], part[:, 1:]))

    found = []
    for own in (False, True):
        model = make()
        if own:
            step_in_halves(loss_of, tokens)
        else:
            for part in tokens.chunk(2):
                (loss_of(part) / 2).backward()
        found.append(gradients(model))
    assert all(map(torch.equal, *found))
