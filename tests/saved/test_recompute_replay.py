"""What is run again is what ran: the same module on the same arguments, each operation to its end."""

import copy

import pytest
import torch
from recomputed import Log
from support import same
from torch import nn

import pagestash as ps
from pagestash.saved.calls import under_way

F = torch.nn.functional
WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def keeper_of(model, *rules, **pool) -> ps.Keeper:
    rules = [ps.Rule(match, home, min_bytes=0) for match, home in rules]
    return ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=64, **pool)), backend="torch").attach(model)


def gradients(model, x=X, keeper=None, call=lambda model, x: model(x)):
    """The input's and the weights', after one step."""
    model.zero_grad()
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    with (keeper or ps.Keeper(ps.Policy())).step():
        call(model, x).sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def test_a_copy_of_an_attached_model_is_run_again_with_its_own_weights():
    model = nn.Sequential(mlp(), mlp())
    keeper = keeper_of(model, ("*", "recompute"))
    gradients(model, keeper=keeper)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    plain = nn.Sequential(mlp(), mlp())
    plain.load_state_dict(other.state_dict())
    assert same(gradients(other, keeper=keeper), gradients(plain))


def test_calls_inside_that_a_replay_leaves_early_are_over_with_it():
    """A GPU's backward has a thread of its own, in which no step ends: what is left there would stay for good."""
    model = nn.Sequential(mlp(), mlp())
    keeper = keeper_of(model, ("*", "recompute"), ("*.2", "recompute"))
    left = []
    for _ in range(2):
        with keeper.step():
            model(X).sum().backward()
        left.append(under_way())
    assert left == [(), ()]


class Noisy(nn.Module):
    """Ends with an operation that saves its noise before it is drawn, as ATen's does."""

    def forward(self, x):
        y = x.sin()
        return F.rrelu(y, training=True) + 1


@pytest.mark.parametrize("times", [1, 2])
def test_an_operation_runs_to_its_end_before_its_tensors_are_taken(times):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Noisy() for _ in range(times))))
    plain = gradients(model)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    keeper = keeper_of(model, ("1", "recompute"))
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # what is read before it is written is NaN
    try:
        for _ in range(2):
            assert same(gradients(model, keeper=keeper), plain)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def test_the_last_product_is_not_run_again():
    class Counts(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            ended.append(1)
            return y

    ended: list = []
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Counts(WIDTH, WIDTH)))
    gradients(model, keeper=keeper_of(model, ("0", "recompute")))
    assert len(ended) == 1


def test_a_forward_that_catches_exceptions_is_stopped_all_the_same():
    class Catches(nn.Module):
        def forward(self, x):
            y = x.sin()
            try:
                return y.cos()
            except Exception:
                return y.tanh().exp()

    model = nn.Sequential(Catches())
    assert same(gradients(model, keeper=keeper_of(model, ("0", "recompute"))), gradients(model))


def test_one_tensor_in_two_arguments_is_one_again():
    class Same(nn.Module):
        def forward(self, q, k, *, v):
            return (q.sin() if q is k and k is v[0] else q.cos().exp()) * k.sin()

    model = nn.ModuleDict({"attention": nn.MultiheadAttention(WIDTH, 2), "same": Same()})

    def call(model, x):
        return model["same"](y := model["attention"](x, x, x)[0], y, v=[y])

    plain = gradients(model, call=call)
    keeper = keeper_of(model, ("*", "recompute"))
    for _ in range(2):
        assert same(gradients(model, keeper=keeper, call=call), plain)


def test_an_inference_tensor_may_be_an_argument():
    class Adds(nn.Module):
        def forward(self, x, y):
            return torch.tanh(x.sin() + y) * 2

    with torch.inference_mode():
        y = torch.ones(WIDTH)
    model = nn.ModuleDict({"adds": Adds()})

    def call(model, x):
        return model["adds"](x, y)

    plain = gradients(model, call=call)
    for home in ("keep", "stash", "offload", "recompute"):
        assert same(gradients(model, keeper=keeper_of(model, ("adds", home)), call=call), plain)


# --- a region inside one of another home, inside one that is run again ---


class Inner(nn.Module):
    def forward(self, x):
        return x.sin() * x * ps.once(lambda: torch.rand(WIDTH)) * torch.rand(WIDTH)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(self.inner(x))) * ps.once(lambda: torch.rand(WIDTH))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid = Middle()

    def forward(self, x):
        return self.mid(x * x).exp() * x * torch.rand(WIDTH)


@pytest.mark.parametrize("inner", ["keep", "stash", "offload", "recompute"])
@pytest.mark.parametrize("home", ["keep", "stash", "offload", "recompute"])
def test_recompute_inside_any_home_inside_recompute(home, inner):
    model = nn.Sequential(Outer(), Outer())
    plain = gradients(model)
    keeper = keeper_of(model, ("*.mid", home), ("*.mid.inner", inner), ("**", "recompute"))
    for _ in range(3):
        assert same(gradients(model, keeper=keeper), plain)
    assert all(each.bytes == 0 for each in keeper.stats().homes.values())


# --- gradients inside a forward ---


class Energy(nn.Module):
    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.linear, self.create_graph = nn.Linear(WIDTH, WIDTH), create_graph

    def forward(self, x):
        here = x.detach().requires_grad_()
        halves = self.linear(here).tanh().chunk(2, dim=-1)
        energy = (halves[0] * halves[1].t().t()).square().sum()
        (force,) = torch.autograd.grad(energy, here, create_graph=self.create_graph)
        return force * x


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_gradients_are_taken_inside_a_forward(home, create_graph):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Energy(create_graph))
    plain = gradients(model)
    keeper = keeper_of(model, ("*", home))
    for _ in range(3):
        assert same(gradients(model, keeper=keeper), plain)
    assert all(each.bytes == 0 for each in keeper.stats().homes.values())


# --- valid rows ---


class Garbage(nn.Module):
    """Leaves rows that are not valid as it finds them: they are others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(WIDTH, WIDTH), Log()

    def forward(self, x):
        self.runs.append(None)
        valid = torch.arange(4)[:, None] < 2
        return ps.rows(torch.where(valid, self.linear(x), float(len(self.runs))), torch.tensor(2))


@pytest.mark.parametrize("rules", [["0.up"], ["0.inner"], ["0.up", "0.inner"]], ids=" ".join)
@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_rows_that_are_not_valid_are_not_compared(home, rules):
    """Neither in what a region takes in nor in what it saves."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.inner = Garbage(), mlp()
            self.inner[0].register_forward_pre_hook(
                lambda module, args: seen.append(args[0].detach().clone())
            )

        def forward(self, x):
            return torch.where(torch.arange(4)[:, None] < 2, self.inner(self.up(x)), 0.0)

    seen = []
    model = nn.Sequential(Layer())
    plain = gradients(model)
    keeper = keeper_of(model, *((match, "recompute") for match in rules), ("0", home))
    for _ in range(3):
        seen.clear()
        assert same(gradients(model, keeper=keeper), plain)
        if "0.inner" in rules:
            assert same(seen[0][:2], seen[1][:2])
            # (A rule of "keep" holds the output of 0.up.)
            assert same(*seen) == ("0.up" not in rules or home == "keep")
