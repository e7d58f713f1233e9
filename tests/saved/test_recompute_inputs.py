"""What a forward reads besides its arguments: put back as it was, or refused by name."""

import random

import numpy as np
import pytest
import torch
from support import same
from torch import nn
from torch.nn.utils import parametrize

import pagestash as ps
from pagestash.saved.recompute import value_checks

WIDTH = 16
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def keeper_of(model, *rules) -> ps.Keeper:
    rules = [ps.Rule(match, home, min_bytes=0) for match, home in rules]
    return ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=64)), backend="torch").attach(model)


class Block(nn.Module):
    """Reads what `read(self)` gives, besides its argument."""

    def __init__(self, read=lambda self: 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.read, self.scale = [read], 1.0
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh((x * self.read[0](self)) @ self.weight) ** 2


def weights_gradient(home, block, steps):
    """The gradient after `steps(model)`, with the block under `home`."""
    model = nn.ModuleDict({"block": block})
    keeper = keeper_of(model, ("block", home))
    with keeper.step():
        steps(model["block"])
    return block.weight.grad.clone()


def in_flight(prepare):
    """Two microbatches, both forwards before both backwards."""

    def steps(block):
        losses = []
        for number in range(2):
            prepare(block, number)
            losses.append(block(X).sum())
        for loss in losses:
            loss.backward()

    return steps


def backward_in_eval(block):
    loss = block(X).sum()
    block.eval()
    loss.backward()
    block.train()


def set_scale(block, number):
    block.scale = 1.0 + number


legacy = np.random.rand


def seed(block, number):
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


@pytest.mark.parametrize(
    ("read", "steps"),
    [
        (lambda self: self.scale, in_flight(set_scale)),
        (lambda self: 1.0 if self.training else 0.5, backward_in_eval),
        (lambda self: self.calls, in_flight(lambda block, number: None)),
        (lambda self: random.random(), in_flight(seed)),
        (lambda self: float(legacy()), in_flight(seed)),
        (lambda self: random.random() * ps.once(random.random) * random.random(), in_flight(seed)),
    ],
    ids=["attribute", "training", "counter", "random", "numpy", "random in once"],
)
def test_plain_attributes_and_generators_are_as_they_were(read, steps):
    results, after = [], []
    for home in ("keep", "recompute"):
        seed(None, 7)
        block = Block(read)
        results.append(weights_gradient(home, block, steps))
        after.append((block.calls, random.random(), legacy()))
    assert torch.equal(*results)
    assert after[0] == after[1], "what was run again leaves no trace"


def test_attention_may_take_the_kernels_that_it_might():
    class Tells(nn.Module):
        def forward(self, x):
            seen.append(torch.backends.cuda.flash_sdp_enabled())
            return x.sin().cos()

    seen: list = []
    model = nn.Sequential(Tells())
    with keeper_of(model, ("0", "recompute")).step():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(X.clone().requires_grad_()).sum()
        loss.backward()
    assert seen == [False, False]
    assert torch.backends.cuda.flash_sdp_enabled()


# --- weights ---


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)))


def test_functional_call_runs_again_with_the_weights_it_was_given():
    model = pair()
    keeper = keeper_of(model, ("*", "recompute"))
    with keeper.step():
        model(X).sum().backward()
    results = []
    for kept in (False, True):
        base = [p.detach().clone().requires_grad_() for p in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        with (keeper if kept else ps.Keeper(ps.Policy())).step():
            losses = [
                # Computed from others, as an inner loop's are.
                torch.func.functional_call(model, {n: p * k for n, p in zip(names, base)}, (X,))
                .square()
                .sum()
                for k in (-2, 3)
            ]
            results.append([g for loss in losses for g in torch.autograd.grad(loss, base)])
    assert same(*results)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_functional_call_runs_again_with_the_buffers_it_was_given():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.ones(32768))

        def forward(self, x):
            return (x.sin() * self.large[:WIDTH]).cos()

    model = nn.Sequential(Scaled())
    keeper = keeper_of(model, ("0", "recompute"))
    results = []
    for kept in (False, True, True):
        x = X.clone().requires_grad_()
        with (keeper if kept else ps.Keeper(ps.Policy())).step():
            losses = [
                torch.func.functional_call(model, {"0.large": torch.full((32768,), k)}, (x,)).sum()
                for k in (2.0, 3.0)
            ]
            results.append(torch.autograd.grad(sum(losses), [x]))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert model[0].large[0] == 1


def replaced_data(model):
    model[0][0].weight.data = torch.randn(WIDTH, WIDTH)


def replaced_twice(model):
    for _ in range(2):
        model[0][0].weight.data = model[0][0].weight.data + 1


def in_place(model):
    with torch.no_grad():
        model[0][0].weight.mul_(2)


def parametrized(model):
    parametrize.register_parametrization(model[0][0], "weight", nn.Tanh())


def replaced_layer(model):
    model[0][0] = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            replaced_data,
            r"weight '0.weight' was given other memory \(.data\) in forward, or between forward and backward",
        ),
        (replaced_twice, r"weight '0.weight' was given other memory"),
        (in_place, "weight '0.weight' was changed in place"),
        (parametrized, r"a Linear .* in forward is gone in backward \(a ParametrizedLinear is there\)"),
    ],
)
def test_other_weights_in_backward_are_refused(change, message):
    model = pair()
    keeper = keeper_of(model, ("0", "recompute"))
    for number in range(2):  # in a step after the first, too
        with keeper.step():
            loss = model(X).sum()
            if number:
                change(model)
                with pytest.raises(RuntimeError, match=f"region '0' is under recompute, and.*{message}"):
                    loss.backward()
            else:
                loss.backward()


def replaced_weight(model):
    model[0][0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


@pytest.mark.parametrize("change", [replaced_weight, replaced_layer])
def test_a_replaced_weight_is_put_back(change):
    results = []
    for rules in ([], [("0", "recompute")]):
        model = pair()
        x = X.clone().requires_grad_()
        with keeper_of(model, *rules).step():
            loss = model(x).sum()
            old = model[0][0].weight
            change(model)
            new = model[0][0].weight
            loss.backward()
        assert model[0][0].weight is new
        results.append([x.grad, old.grad, model[1][0].weight.grad])
    assert same(*results)


class Wrapper(nn.Module):
    """Parametrizes a weight of the module inside while forward runs, as PEFT does for target_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 2))
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        class Adds(nn.Module):
            def forward(_, weight):
                return weight + self.low @ self.low.T

        parametrize.register_parametrization(self.base, "weight", Adds())
        self.base.parametrizations.weight.original.requires_grad_(False)
        try:
            with parametrize.cached():
                return self.base(x.sin()).sin()
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_a_parametrization_inside_forward():
    torch.manual_seed(0)
    model = nn.Sequential(Wrapper(), Wrapper())
    results = []
    for rules in ([], [("0", "recompute"), ("1", "recompute")]):
        keeper = keeper_of(model, *rules)
        for _ in range(2):
            model.zero_grad()
            with keeper.step():
                losses = [model(X + number).sum() for number in range(2)]
                for loss in losses:
                    loss.backward()
            results.append([model[0].low.grad, model[1].low.grad, model[0].base.bias.grad])
        keeper.detach()
    assert all(same(results[0], other) for other in results[1:])
    keeper = keeper_of(model, ("*.base", "recompute"))
    with keeper.step():
        loss = model(X).square().sum()
        with pytest.raises(RuntimeError, match=r"region '1.base'.*gone in backward.*module around it"):
            loss.backward()


def test_a_forward_that_changes_its_weight_is_refused():
    class Clips(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x.sin()).sin()

    model = nn.Sequential(Clips(WIDTH, WIDTH))
    keeper = keeper_of(model, ("0", "recompute"))
    with pytest.raises(RuntimeError, match=r"region '0'.*its weight 'weight' was changed in its forward"):
        one_step(model, keeper)


def one_step(model, keeper, between=lambda: None):
    with keeper.step():
        loss = model(X).sum()
        between()
        loss.backward()


class Touches(nn.Linear):
    """Raises the version of its bias, and changes no byte."""

    def forward(self, x):
        with torch.no_grad():
            self.bias.mul_(1)
        return super().forward(x).sin()


def test_a_weight_whose_version_tells_nothing_is_still_watched():
    model = nn.Sequential(Touches(WIDTH, WIDTH))
    keeper = keeper_of(model, ("0", "recompute"))
    for _ in range(2):
        with keeper.step():
            sum(model(X + number).sum() for number in range(2)).backward()

    def add():
        with torch.no_grad():
            model[0].bias.add_(1)

    with pytest.raises(
        RuntimeError, match=r"region '0'.*its weight 'bias' was changed in .* or between forward"
    ):
        one_step(model, keeper, add)


# --- found by value ---


def test_other_values_are_found_in_the_first_step():
    scale = [torch.ones(WIDTH)]
    block = Block(lambda self: scale[0])
    with pytest.raises(
        RuntimeError, match=r"region 'block' .*tensor 0, torch.float32 \(4, 16\), had other values"
    ):
        weights_gradient("recompute", block, in_flight(lambda *_: scale.__setitem__(0, scale[0] * 1.01)))


def test_other_values_are_found_later_if_the_keeper_is_to_check():
    scale = [1.0]
    model = nn.ModuleDict({"block": Block(lambda self: scale[0])})
    keeper = ps.Keeper(ps.Policy([ps.Rule("block", "recompute")]), check=True).attach(model)
    for number in range(4):
        with keeper.step():
            loss = model["block"](X).sum()
            if number == 3:
                scale[0] += 1
                with pytest.raises(RuntimeError, match="had other values"):
                    loss.backward()
            else:
                loss.backward()


def test_sums_that_differ_by_rounding_are_accepted():
    """As of a kernel that adds in any order."""
    noise = [0.0]

    def read(self):
        noise[0] += 2e-7
        return 1 + noise[0] * torch.randn(WIDTH)

    weights_gradient("recompute", Block(read), in_flight(lambda *_: None))


def test_values_are_compared_by_groups():
    rows = torch.randn(64, 256)
    summary = value_checks.summary_of(rows)
    assert not value_checks.differ(summary, rows.clone())
    assert not value_checks.differ(summary, rows * (1 + 1e-6 * torch.randn(64, 256)))
    assert value_checks.differ(summary, rows[torch.randperm(64)])
    assert value_checks.differ(summary, rows * 1.01)
    assert value_checks.differ(summary, torch.where(torch.arange(64)[:, None] == 7, float("nan"), rows))
    half = rows.bfloat16()
    summary = value_checks.summary_of(half)
    assert not value_checks.differ(summary, half.nextafter(torch.full_like(half, torch.inf)))
    assert value_checks.differ(summary, half * 1.1)
    assert value_checks.differ(summary, torch.randn(64, 256).bfloat16())
    for odd in (
        torch.full((9,), -torch.inf),
        torch.full((3, 5), torch.nan),
        torch.randn(131, dtype=torch.cfloat),
    ):
        assert not value_checks.differ(value_checks.summary_of(odd), odd.clone())
    with_inf = torch.where(rows > 1, -torch.inf, rows)
    assert not value_checks.differ(value_checks.summary_of(with_inf), with_inf.clone())
    assert value_checks.differ(value_checks.summary_of(with_inf), rows)
    assert value_checks.summary_of(torch.ones(3)) is None
    assert value_checks.differ(value_checks.summary_of(torch.tensor([1, 2, 3])), torch.tensor([1, 3, 2]))
    assert value_checks.differ(value_checks.summary_of(torch.randn(32, 16)), torch.randn(32, 16))
    eight_bits = torch.randn(32, 16).to(torch.float8_e4m3fn)
    assert not value_checks.differ(value_checks.summary_of(eight_bits), eight_bits.clone())


# --- arguments ---


class Box:
    def __init__(self, tensor) -> None:
        self.tensor, self.log, self.name = tensor, [], None


class Takes(nn.Module):
    def __init__(self, do) -> None:
        super().__init__()
        self.do = [do]

    def forward(self, x, box):
        self.do[0](box, x)
        value = box.tensor if isinstance(box, Box) else box[0]
        return (x * value).sin().cos()


def takes(do, box, after=lambda box: None, home="recompute"):
    model = nn.ModuleDict({"takes": Takes(do)})
    x = X.clone().requires_grad_()
    with keeper_of(model, ("takes", home)).step():
        loss = model["takes"](x, box).sum()
        after(box)
        loss.backward()
    return x.grad


@pytest.mark.parametrize(
    "change",
    [
        lambda box, x: box.log.append(x),
        lambda box, x: setattr(box, "tensor", box.tensor + 1),
        lambda box, x: box.tensor.add_(1),
        lambda box, x: setattr(box, "log", None),
    ],
)
def test_an_object_that_changes_is_refused(change):
    with pytest.raises(RuntimeError, match=r"region 'takes' .*changes its argument a Box.*another home"):
        takes(change, Box(torch.ones(WIDTH)))
    with pytest.raises(RuntimeError, match=r"argument that was changed between forward and backward, a Box"):
        takes(lambda box, x: None, Box(torch.ones(WIDTH)), after=lambda box: change(box, X))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (torch.Generator, lambda drawn: torch.rand(1, generator=drawn)),
        (random.Random, lambda drawn: drawn.random()),
        (np.random.default_rng, lambda drawn: drawn.random()),
        (lambda: np.ones(WIDTH, np.float32), lambda array: array.fill(2)),
        (lambda: {1}, lambda some: some.add(2)),
    ],
)
def test_an_argument_without_attributes_that_changes_is_refused(make, change):
    model = nn.ModuleDict({"takes": Second()})

    def changed(inside):
        argument, x = make(), X.clone().requires_grad_()
        with keeper_of(model, ("takes", "recompute")).step():
            loss = model["takes"](x, argument, change if inside else None).sum()
            change(argument)
            loss.backward()

    for inside in (True, False):
        with pytest.raises(RuntimeError, match=r"region 'takes' .*argument.* a \w+"):
            changed(inside)


class Second(nn.Module):
    def forward(self, x, argument, change):
        if change is not None:
            change(argument)
        return x.sin().cos()


def test_an_object_that_remembers_something_is_no_change():
    def remember(box, x):
        box.name, box.rows = "four", x.shape[0]

    box = Box(torch.ones(WIDTH))
    assert torch.equal(takes(remember, box), takes(lambda box, x: None, box, home="keep"))


def test_what_an_object_is_told_after_forward_is_a_change():
    box = Box(torch.ones(WIDTH))
    with pytest.raises(RuntimeError, match=r"changed between forward and backward, a Box"):
        takes(lambda box, x: None, box, after=lambda box: setattr(box, "name", "four"))


def test_an_iterator_is_refused():
    model = nn.ModuleDict({"takes": Second()})
    with (
        keeper_of(model, ("takes", "recompute")).step(),
        pytest.raises(RuntimeError, match="takes a list_iterator"),
    ):
        model["takes"](X.clone().requires_grad_(), iter([1.0]), None)


def test_a_list_that_forward_appends_to_is_rebuilt_for_each_run():
    def append(box, x):
        box.append(x.detach() * len(box))
        box[0] = box[0] + box[-1]

    boxes = [[torch.ones(WIDTH)], [torch.ones(WIDTH)]]
    assert torch.equal(takes(append, boxes[0]), takes(append, boxes[1], home="keep"))
    assert len(boxes[0]) == 2


class Drops(nn.Module):
    """Drops its result by chance, once the training loop says so."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.linear, self.out, self.draw, self.on = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            draw,
            False,
        )

    def forward(self, x):
        return x + self.out(self.linear(x).tanh() * (self.draw() if self.on else 1.0))


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn],
    ids=["Python", "Python's normal", "NumPy", "NumPy's normal"],
)
def test_a_forward_that_draws_in_python_from_a_later_step_on(draw):
    found = []
    for rules in ([], [("1", "recompute"), ("2", "recompute")]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Drops(draw), Drops(draw), nn.Linear(WIDTH, 1))
        keeper = keeper_of(model, *rules)
        for step in range(5):
            model[1].on = model[2].on = step > 1
            with keeper.step():
                model(X).square().mean().backward()
        drawn = torch.tensor([random.random(), np.random.rand()])  # noqa: NPY002
        found.append([*(p.grad for p in model.parameters()), drawn])
    assert same(*found)
