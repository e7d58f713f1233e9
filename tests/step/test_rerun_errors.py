"""What a step that overflowed raises is not believed, and what cannot be run again is refused by name."""

import os

import pytest
import torch
import torch.distributed as dist
from reruns import LARGE, SMALL, attach, data, ends, net
from support import same
from support.processes import start_ranks
from torch import nn

import pagestash as ps
from pagestash.moe import MoE, MoEConfig

# --- forwards after an update -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["two optimizers", "closure"])
def test_a_layer_of_bounded_capacity_after_an_update_is_refused(how):
    torch.manual_seed(0)
    config = MoEConfig(width=16, expert_width=8, experts=4, top_k=2, capacity=10)
    model = nn.ModuleDict({"lin": nn.Linear(16, 16), "moe": MoE(config)})
    first, second = (torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("lin", "moe"))
    keeper = ps.Keeper(ps.Policy([ps.Rule("lin", "recompute")])).attach(model)

    def forward(x):
        loss = model["moe"](model["lin"](x))[0].square().mean()
        loss.backward()
        return loss

    def train_step(x, y):
        if how == "closure":
            return second.step(lambda: forward(y))
        forward(x)
        first.step()
        loss = forward(y)
        second.step()
        return loss

    step = ps.GraphedStep(train_step, keeper, optimizer=[first, second])
    with pytest.raises(ValueError, match="bounded capacity"):
        step(torch.randn(4, 16), torch.randn(32, 16))


# --- errors -----------------------------------------------------------------------------------------------------


class Divide(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(32))

    def forward(self, x):
        y = x @ self.w
        return y / y.norm(dim=-1, keepdim=True)


class Solve(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(32))

    def forward(self, x):
        a = x.t() @ x + torch.eye(32)
        return torch.linalg.solve(a @ self.w, x.t()).t()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.l(x)) ** 2


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.inner = Inner()

    def forward(self, x):
        return x + self.inner(torch.sin(self.a(x)))


@pytest.mark.parametrize(
    ("layer", "what"), [(Divide, "anomaly"), (Divide, "clip"), (Solve, "plain"), (Outer, "recompute")]
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_zeros_of_a_refused_group_lead_to_is_not_believed(layer, what, caplog):
    def make(device):
        model = nn.Sequential(layer(), layer())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rules = [ps.Rule("*.inner", "recompute")] if what == "recompute" else []
        keeper = attach(model, device, [*rules, ps.Rule("*", "stash", min_bytes=0)])

        def train_step(x):
            with torch.autograd.set_detect_anomaly(what == "anomaly"):
                loss = model(x).sum()
                loss.backward()
            if what == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ps.GraphedStep(train_step, keeper, optimizer=optimizer), model.parameters

    assert same(*ends(make, small=256 * 10 if what == "recompute" else SMALL))
    assert "as a consequence" in caplog.text


def test_an_error_of_a_step_that_fits_is_the_users_and_the_next_step_is_right():
    def make(device):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(x):
            loss = model(x).square().mean()
            if len(x) == 5:
                raise KeyError("theirs")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, attach(model, device), optimizer=optimizer)
        with pytest.raises(KeyError, match="theirs"):
            step(torch.randn(5, 32, generator=torch.Generator().manual_seed(9)))
        assert step.reruns == 0
        return step, model.parameters

    assert same(*ends(make))


def test_two_steps_share_an_optimizer():
    """As for batches of two shapes."""

    def make(device):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper = attach(model, device)

        def train_step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        steps = [ps.GraphedStep(train_step, keeper, optimizer=optimizer) for _ in range(2)]
        steps[0](data()[0])
        steps[0](data()[2])
        train_step(data()[0])
        return steps[1], model.parameters

    assert same(*ends(make))


def _fails_on_one_rank(rank: int, path: str) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    seen = []
    for device in (LARGE, SMALL):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        keeper = attach(model, device)

        def train_step(x, fail, model=model, optimizer=optimizer, keeper=keeper):
            loss = model(x).square().mean()
            loss.backward()
            if fail or keeper.overflow:
                raise ArithmeticError("not finite")
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        # Rank 1 meets the longer batch, and what it makes of the zeros raises on that rank alone.
        for x in data((4, 64 if rank == 1 else 8, 8)):
            step(x, False)
        try:
            step(data()[0], rank == 1)
            failed = False
        except ArithmeticError:
            failed = True
        seen.append((step.reruns, failed, *(p.detach() for p in model.parameters())))
    torch.save(seen, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_a_rank_that_fails_votes_with_the_others(tmp_path):
    start_ranks(_fails_on_one_rank, (str(tmp_path),), 2)
    for rank in range(2):
        large, small = torch.load(tmp_path / f"{rank}.pt")
        assert [large[0], small[0]] == [0, 1]
        assert large[1] == small[1] == (rank == 1)
        assert same(large[2:], small[2:])
