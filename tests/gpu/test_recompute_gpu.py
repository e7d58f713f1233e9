"""Recompute on a GPU: eagerly and in a CUDA graph, the same bits in less memory."""

import gc
import os
from types import SimpleNamespace

import pytest
import torch
from support import same
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.saved.calls import under_way
from pagestash.saved.recompute import rng

# Read once, at the first product on a GPU, which may be another file's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.gpu
ROWS, WIDTH, INNER, DEPTH = 4096, 512, 2048, 4
DROPPED = ROWS * INNER * (4 + 1 + 4)
"""Of one MLP: the first projection, dropout's mask, and its result; its input is held."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.down(self.dropout(torch.nn.functional.silu(self.up(x))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.gate = nn.LayerNorm(WIDTH), MLP(), nn.Linear(WIDTH, 4)
        self.routed = 0

    def choose(self, x):
        self.routed += 1
        return (self.gate(x) + torch.randn(x.shape[0], 4, device=x.device)).softmax(1).max(1)

    def forward(self, x):
        y = self.norm(x)
        weight, ids = ps.once(lambda: self.choose(y))
        return x + self.mlp(y) * weight[:, None] * (1 + ids[:, None])


def make(rules, warmup=2, mixed=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(DEPTH))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    policy = ps.Policy([ps.Rule(match, home) for match, home in rules.items()])
    keeper = ps.Keeper(policy).attach(model)

    def train_step(x):
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, keeper, ps.GraphedStep(train_step, keeper, optimizer=optimizer, warmup=warmup)


def train(made, steps=5):
    model, _, step = made
    torch.manual_seed(5)
    generator = torch.Generator("cuda").manual_seed(7)
    losses = [step(torch.randn(ROWS, WIDTH, device="cuda", generator=generator)) for _ in range(steps)]
    step.wait()
    return [*losses, *(value.detach().clone() for value in (*model.parameters(), *model.buffers()))]


RULES = [
    {"*": "recompute"},
    {"*.mlp": "recompute"},
    {"*.norm": "recompute", "*.mlp": "recompute"},
    {"*.mlp": "recompute", "*": "stash"},
    {"*.mlp": "stash", "*": "recompute"},
]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_eager_and_graphed_steps_give_the_bits_of_keep(rules, mixed):
    """With dropout in what is run again: in a graph, too, it draws the numbers of the first forward."""
    plain = train(make({}, warmup=100, mixed=mixed))
    assert same(train(make(rules, warmup=100, mixed=mixed)), plain)
    graphed = make(rules, mixed=mixed)
    assert same(train(graphed), plain)
    assert graphed[0][0].mlp.seen == 5
    assert graphed[1].stats().homes["recompute"].bytes == 0
    if "*" in rules and rules["*"] == "recompute":
        assert graphed[0][0].routed == 3, "two warm-up steps and one capture: the choice is never made again"


def train_decoder(rules):
    """Losses and weights after five steps in bf16, of which the third is captured."""
    model = Decoder(
        preset("tiny", layers=3, dense_layers=1, shared_experts=1), device="cuda", dtype=torch.bfloat16
    )
    model.initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    policy = ps.Policy([ps.Rule(match, home, min_bytes=0) for match, home in rules.items()])
    keeper = ps.Keeper(policy).attach(model)

    def train_step(tokens):
        loss = sum(model(tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
    generator = torch.Generator("cuda").manual_seed(7)
    losses = [step(torch.randint(0, 256, (2, 129), device="cuda", generator=generator)) for _ in range(5)]
    step.wait()
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def test_layers_with_experts_are_run_again_in_a_graph(one_order):
    plain = train_decoder({})
    assert same(train_decoder({"layers.*": "recompute"}), plain)
    assert same(train_decoder({"layers.*": "recompute", "layers.*.moe.moe_act": "stash"}), plain)
    assert same(train_decoder({"layers.*.moe": "recompute", "layers.*": "offload"}), plain)


def held_after_forward(rules):
    model, keeper, _ = make(rules)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with keeper.step():
            loss = model(x).square().mean()
            held = torch.cuda.memory_allocated()
            loss.backward()
        peak = torch.cuda.max_memory_allocated()
        del loss
        model.zero_grad()
    return held, peak


def test_memory_falls_by_what_is_dropped():
    (held, peak), (plain_held, plain_peak) = (
        held_after_forward({"*.mlp": "recompute"}),
        held_after_forward({}),
    )
    assert plain_held - held >= 0.99 * DEPTH * DROPPED
    # In backward one region's tensors are there at a time.
    assert plain_peak - peak >= 0.99 * (DEPTH - 1) * DROPPED


def reserved_by_graph(rules):
    made = make(rules)
    train(made, steps=2)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    train(made, steps=2)
    return torch.cuda.memory_reserved() - before


def test_a_graph_takes_less_memory():
    recomputed, plain = reserved_by_graph({"*.mlp": "recompute"}), reserved_by_graph({})
    assert plain - recomputed >= 0.9 * (DEPTH - 1) * DROPPED


def test_a_region_on_a_stream_of_its_own():
    """Backward asks on the stream that forward ran on, which need not be the one that made the tensor again."""

    class Sides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.stream = MLP(), torch.cuda.Stream()

        def forward(self, x):
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                y = self.mlp(x)
                x.record_stream(self.stream)
            here.wait_stream(self.stream)
            y.record_stream(here)
            return y.sin() * self.mlp(x).cos()

    results = []
    for rules in ([], [ps.Rule("0", "recompute")], [ps.Rule("0.mlp", "recompute")]):
        torch.manual_seed(0)
        model = nn.Sequential(Sides()).cuda()
        keeper = ps.Keeper(ps.Policy(rules)).attach(model)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        for _ in range(3):
            model.zero_grad()
            x.grad = None
            torch.manual_seed(1)
            with keeper.step():
                model(x).square().sum().backward()
        torch.cuda.synchronize()
        results.append([x.grad.clone(), *(p.grad.clone() for p in model.parameters())])
    assert same(results[1], results[0])
    assert same(results[2], results[0])


# --- checks by value ---


class Reads(nn.Module):
    """Reads what is no argument of its."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.scale = MLP(), SimpleNamespace(now=torch.ones(WIDTH, device="cuda"))

    def forward(self, x):
        return self.mlp(torch.tanh(x * self.scale.now))


def reading():
    model = nn.Sequential(Reads(), nn.Linear(WIDTH, WIDTH)).cuda()
    return model, ps.Keeper(ps.Policy([ps.Rule("0", "recompute")])).attach(model)


def test_steps_after_the_first_wait_for_nobody():
    model, keeper = reading()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    for number in range(4):
        if number == 1:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            with keeper.step():
                model(x).square().mean().backward()
        finally:
            if number == 3:
                torch.cuda.set_sync_debug_mode("default")


def test_other_values_are_found_in_the_first_step():
    model, keeper = reading()
    with keeper.step():
        loss = model(torch.randn(ROWS, WIDTH, device="cuda")).square().mean()
        model[0].scale.now = model[0].scale.now * 1.5
        with pytest.raises(RuntimeError, match=r"region '0' .*had other values"):
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_adds_in_any_order_is_accepted(dtype):
    class Adds(nn.Module):
        def forward(self, x):
            # Small sums: in bf16 each addition rounds, and `exp` of large ones would be other values indeed.
            y = torch.zeros(8, WIDTH, device="cuda", dtype=dtype).index_add(0, where, x * 0.01)
            return y.sin().cos() * y.exp().tanh()

    torch.manual_seed(0)
    where = torch.randint(0, 8, (ROWS,), device="cuda")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Adds(), nn.LayerNorm(WIDTH)).to("cuda", dtype)
    keeper = ps.Keeper(ps.Policy([ps.Rule("1", "recompute")])).attach(model)
    for number in range(5):
        torch.manual_seed(number)
        with keeper.step():
            model(torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype)).square().mean().backward()


def test_noise_is_drawn_before_it_is_taken():
    """rrelu saves its noise before its kernel has drawn it."""
    results = []
    for rules in ([], [ps.Rule("1", "recompute")]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()).cuda()
        keeper = ps.Keeper(ps.Policy(rules)).attach(model)
        with keeper.step():
            model(torch.ones(ROWS, WIDTH, device="cuda")).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert same(*results)


def test_generators_are_set_back_to_where_they_were():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(2**63 + 5)  # a seed that no signed integer holds
    torch.rand(7, device=device)
    state = rng.torch_rng_state(device)
    assert not rng.torch_rng_drawn(device, state)
    first = torch.rand(100, device=device), torch.rand(100)
    assert rng.torch_rng_drawn(device, state)
    torch.cuda.manual_seed(3)
    rng.set_torch_rng_state(device, state)
    assert same([torch.rand(100, device=device), torch.rand(100)], list(first))


def test_calls_inside_that_a_replay_leaves_early_do_not_gather_in_the_thread_of_backward():
    layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
    model = nn.Sequential(nn.Linear(8, 8), *layers).cuda()
    rules = [ps.Rule(match, "recompute", min_bytes=0) for match in ("{1,2}", "{1,2}.2")]
    keeper = ps.Keeper(ps.Policy(rules)).attach(model)
    left = []
    # The gradient of the first layer comes last, behind all replays.
    model[0].weight.register_hook(lambda gradient: left.append(len(under_way())))
    for _ in range(3):
        with keeper.step():
            model(torch.ones(4, 8, device="cuda")).sum().backward()
    assert left == [0, 0, 0]
