"""`ps.Keeper(budget=)`: the first step is noted, the second begins with measuring, and training keeps its bits."""

import gc
import math
import random
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import Mock
from weakref import ref

import numpy as np
import pytest
import torch
from support import same
from support.limit import MemoryLimit
from support.steps import training_step
from support.tiers import slow
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import NothingFits, make, target
from pagestash.planning.budget import device_budget
from pagestash.saved.keeper import Keeper as SavedKeeper

WIDTH, DEPTH = 64, 4


class Layer(nn.Module):
    """Draws from all generators, and changes buffers in place and by replacing them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x, scale=1.0):
        self.seen = self.seen + 1
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        noise = random.random() + np.random.rand()  # noqa: NPY002
        h = torch.nn.functional.gelu(self.up(self.norm(x) + self.mean))
        return x + scale * noise * self.down(torch.nn.functional.dropout(h, 0.2, self.training))


class Net(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x, scale=scale)
        return x.square().mean()


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002


def batches(count: int, rows: int = 64):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, rows, WIDTH, generator=generator) for _ in range(count)]


def train(model, keeper, *, steps: int = 5, micro: int = 1, inside: bool = True):
    """Losses, parameters and buffers of a training run; evaluates between steps."""
    seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def update():
        optimizer.step()
        optimizer.zero_grad()

    for x in batches(steps):
        with nullcontext() if keeper is None else keeper.step():
            for part in x.chunk(micro):
                loss = model(part)
                loss.backward()
                losses.append(loss.detach())
            if inside:
                update()
        if not inside:
            update()
        model.eval()
        with torch.no_grad():
            losses.append(model(x))
        model.train()
    return losses, [p.detach() for p in model.parameters()], list(model.buffers())


def made(cls=Net, **options):
    seed()
    return cls(**options)


def budgeted(model, budget=0.7, **options) -> ps.Keeper:
    return ps.Keeper(budget=budget, repeats=1, **options).attach(model)


@pytest.fixture
def planned():
    """A model and a keeper whose plan is made."""
    model = made()
    keeper = budgeted(model)
    train(model, keeper, steps=2)
    assert keeper.plan is not None
    return model, keeper


# --- what it is for ---


@pytest.mark.parametrize("micro", [*slow(1), 2])
@pytest.mark.parametrize("inside", [True, False])
def test_training_has_the_same_bits_from_the_first_step_on(micro, inside):
    plain = train(made(), None, micro=micro, inside=inside)
    model = made()
    keeper = budgeted(model)
    assert same(train(model, keeper, micro=micro, inside=inside), plain)
    assert keeper.plan is not None
    assert keeper.policy.rules
    assert keeper.policy == keeper.plan.policy


def test_gradients_that_are_held_across_steps_have_the_same_bits():
    results = []
    for with_keeper in (False, True):
        model = made()
        keeper = budgeted(model) if with_keeper else None
        seed(1)
        for x in batches(4):
            with nullcontext() if keeper is None else keeper.step():
                model(x).backward()
        results.append([p.grad for p in model.parameters()])
    assert same(*results)


def test_the_plan_is_that_of_ps_plan_and_is_in_effect(planned):
    model, keeper = planned
    assert keeper.plan.predicted.peak_bytes <= keeper.plan.budget_bytes < keeper.plan.unplanned.peak_bytes
    with keeper.step():
        model(batches(1)[0]).backward()
    homes = {home: size.peak for home, size in keeper.stats().homes.items() if home != "keep"}
    assert any(homes.values())


def test_the_first_step_recomputes_layers_and_the_second_has_the_plan():
    model = made()
    keeper = budgeted(model)
    assert repr(keeper) == "Keeper(budget=0.7, not planned yet)"
    with keeper.step():
        model(batches(1)[0]).backward()
        assert [rule.match for rule in keeper.policy.rules] == [f"layers.{at}" for at in range(DEPTH)]
        assert {rule.home for rule in keeper.policy.rules} == {"recompute"}
    assert keeper.plan is None
    with keeper.step():
        assert keeper.plan is not None
        assert keeper.policy.rules
        model(batches(1)[0]).backward()
    assert "rules" in repr(keeper)
    # What noted the call is gone: hooks are left on the regions of the policy alone.
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_step_that_fits_gets_an_empty_plan_and_no_hooks():
    model = made()
    keeper = budgeted(model, "1GiB")
    plain = train(made(), None)
    assert same(train(model, keeper), plain)
    assert keeper.plan.is_empty
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_of_a_plans_rules_nothing_is_said_that_its_table_says(monkeypatch, caplog):
    """One may move nothing, and be there because of how others then move."""
    inner = target.Target.plan

    def with_idle(self, first):
        found = inner(self, first)
        return replace(found, policy=ps.Policy([ps.Rule("layers.0", "offload", min_bytes="1GiB")]))

    monkeypatch.setattr(target.Target, "plan", with_idle)
    model = made()
    with caplog.at_level("WARNING", logger="pagestash"):
        train(model, budgeted(model))
    assert "moved nothing" not in caplog.text


def test_the_plan_is_logged_once(caplog):
    with caplog.at_level("INFO", logger="pagestash"):
        model = made()
        train(model, budgeted(model), steps=4)
    lines = [record.message for record in caplog.records if "planned for" in record.message]
    assert len(lines) == 1
    assert "print(keeper.plan)" in lines[0]


def test_other_shapes_later_keep_the_plan(planned):
    model, keeper = planned
    before = keeper.plan
    for rows in (8, 96):
        with keeper.step():
            model(batches(1, rows)[0]).backward()
    assert keeper.plan is before


def test_regions_that_are_no_modules_need_not_be_declared():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            x = x * self.weight
            for number in range(6):
                with ps.region(f"parts.{number}"):
                    x = torch.sin(torch.tanh(torch.sin(x)))
            return x.sum()

    def gradients(keeper_of):
        model = made(Parts)
        keeper = keeper_of(model)
        for x in batches(3):
            with nullcontext() if keeper is None else keeper.step():
                model(x).backward()
        return model.weight.grad, keeper, model

    plain, _, _ = gradients(lambda model: None)
    found, keeper, model = gradients(budgeted)
    assert torch.equal(found, plain)
    assert keeper.policy.rules
    assert all(rule.match.startswith("parts.") for rule in keeper.policy.rules)
    keeper.detach()
    keeper.attach(model)


def test_a_decoder_is_trained_in_one_line():
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (2, 65))

    def losses(keeper_of):
        torch.manual_seed(0)
        model = Decoder(preset("tiny", layers=3))
        model.initialise(0)
        keeper = keeper_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(4):
            with nullcontext() if keeper is None else keeper.step():
                loss = sum(model(tokens[:, :-1], tokens[:, 1:]))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found, keeper

    plain, _ = losses(lambda model: None)
    found, keeper = losses(lambda model: budgeted(model, 0.7))
    assert same(found, plain)
    assert keeper.plan.policy.rules


# --- how a model is called ---


def test_keywords_beside_positional_arguments_are_measured_by_name():
    model = made()
    keeper = budgeted(model)
    for x in batches(2):
        with keeper.step():
            model(x, scale=0.5).backward()
    assert keeper.plan is not None


def test_inputs_that_need_gradients_keep_no_graph_alive():
    model, before = made(), nn.Linear(WIDTH, WIDTH)
    keeper = budgeted(model)
    x = before(batches(1)[0])
    alive = ref(x)
    with keeper.step():
        model(x).backward()
    del x
    assert alive() is None
    assert keeper._first.call.args[0].grad_fn is None
    before.zero_grad()
    with keeper.step():
        model(before(batches(1)[0])).backward()
    assert keeper.plan is not None
    assert before.weight.grad is not None


def test_what_is_measured_runs_under_the_callers_autocast():
    model = made()
    keeper = budgeted(model, 0.5)
    seen = []
    model.layers[0].register_forward_hook(lambda m, a, out: seen.append(torch.is_autocast_enabled("cpu")))
    for x in batches(2):
        with keeper.step(), torch.autocast("cpu", torch.bfloat16):
            model(x).backward()
    assert len(seen) > 2
    assert all(seen)


def test_a_loss_can_be_given():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return {"tokens": 3, "value": self.net(x)}

    model = made(Pair)
    keeper = budgeted(model)
    for x in batches(1):
        with keeper.step():
            model(x)["value"].backward()
    with pytest.raises(ValueError, match="pass loss="), keeper.step():
        pass
    keeper = budgeted(made(Pair), loss=lambda output: output["value"])
    model = keeper._first.model
    for x in batches(2):
        with keeper.step():
            model(x)["value"].backward()
    assert keeper.plan is not None


def test_forwards_without_gradients_and_forwards_aside_are_not_noted():
    model, (x, y) = made(), batches(2)
    keeper = budgeted(model)
    with keeper.step():
        with torch.no_grad():
            model(y[:1])
        with keeper.aside():
            model(y[:2])
        model(x).backward()
    assert keeper._first.call.args[0] is x
    assert not keeper._first.overlaps


def test_several_forwards_before_a_backward_are_refused_by_name():
    model, (x, y) = made(), batches(2)
    keeper = budgeted(model)
    with keeper.step():
        (model(x) + model(y)).backward()
    with pytest.raises(ValueError, match="one forward and its backward"), keeper.step():
        pass
    with keeper.step():  # and training goes on
        (model(x) + model(y)).backward()
    assert keeper.plan is None


# --- when nothing comes of it ---


def test_nothing_fits_is_raised_once_between_steps_and_training_goes_on():
    plain = train(made(), None)
    model = made()
    keeper = budgeted(model, "1MiB", host=0)
    said = []

    class Persistent:
        """Opens the step again where nothing fits."""

        @contextmanager
        def step(self):
            try:
                step = keeper.step()
                step.__enter__()
            except NothingFits as error:
                said.append(str(error))
                step = keeper.step()
                step.__enter__()
            yield
            step.__exit__(None, None, None)

    assert same(train(model, Persistent()), plain)
    assert len(said) == 1
    assert said[0].startswith("nothing fits 1.0 MiB: the smallest plan takes ")
    assert keeper.plan is None
    assert not keeper.policy.rules


def test_a_policy_that_cannot_be_attached_leaves_the_model_without_one(monkeypatch):
    plain = train(made(), None, steps=2)
    model = made()
    keeper = budgeted(model)
    seed(1)
    with keeper.step():
        model(batches(1)[0]).backward()
    monkeypatch.setattr("pagestash.saved.attached._refuse_checkpointed", Mock(side_effect=ValueError("on")))
    with pytest.raises(ValueError, match="on"), keeper.step():
        pass
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    again = made()
    model.load_state_dict(again.state_dict())
    model.zero_grad()
    assert same(train(model, keeper, steps=2), plain)
    assert not keeper.policy.rules


@pytest.mark.parametrize("part", [0.7, 0.8])
def test_a_step_that_finds_no_memory_trains_under_a_plan_with_the_same_bits(part):
    """It is measured while its layers are recomputed; the step without a policy is predicted."""
    plain = train(made(), None)
    whole = peak_of(ps.profile(made(), batches(1)[0], repeats=1))
    with pytest.raises(torch.OutOfMemoryError), MemoryLimit(int(part * whole)):
        made()(batches(1)[0]).backward()
    model = made()
    keeper = budgeted(model, 0.5, host=0)  # which would be the same memory, on a CPU
    with MemoryLimit(int(part * whole) + sum(2 * p.nbytes for p in model.parameters())):
        found = train(model, keeper)
    assert same(found, plain)
    assert keeper.plan.recomputed_layers == DEPTH
    assert f"predicted: it was measured with {DEPTH} layers recomputed" in str(keeper.plan)


def peak_of(profile):
    return max(segment.peak_bytes for segment in profile.segments)


def test_a_step_that_finds_no_memory_at_all_says_what_would_help_and_the_next_one_is_measured():
    model, (x, *_) = made(), batches(1)
    keeper = budgeted(model)
    with keeper.step():
        model(x).backward()
    said = pytest.raises(torch.OutOfMemoryError, match=r"even with all 4 layers recomputed.* A smaller batch")
    with said, MemoryLimit(200_000), keeper.step():
        pass
    for _ in range(2):
        assert keeper.plan is None
        with keeper.step():
            model(x[:2]).backward()
    assert keeper.plan is not None


def test_a_first_step_that_raises_is_not_measured():
    model, (x, y) = made(), batches(2)
    keeper = budgeted(model)
    with pytest.raises(ZeroDivisionError), keeper.step():
        model(x).backward(1 / 0)
    with keeper.step():
        assert keeper.plan is None
        model(y).backward()
    assert keeper._first.call.args[0] is y


def test_a_step_under_no_grad_plans_nothing_yet():
    model, (x, *_) = made(), batches(1)
    keeper = budgeted(model)
    with keeper.step():
        model(x).backward()
    with torch.no_grad(), keeper.step():
        model(x)
    assert keeper.plan is None
    with keeper.step():
        model(x).backward()
    assert keeper.plan is not None


def test_steps_that_never_call_the_model_are_named(caplog):
    model, (x, *_) = made(), batches(1)
    keeper = budgeted(model)
    for _ in range(4):
        with keeper.step():
            model.layers[0](x).sum().backward()
    (record,) = caplog.records
    assert "no call of its model in 3 steps" in record.message


def test_training_without_any_step_is_named(caplog):
    model = made()
    keeper = budgeted(model)
    for x in batches(4):
        model(x).backward()
    assert "outside of its `with keeper.step():`" in caplog.text
    assert keeper.plan is None


# --- attach and detach ---


def test_detached_before_the_plan_it_leaves_the_model_alone(no_collector):
    model = made()
    keeper = budgeted(model)
    with keeper.step():
        model(batches(1)[0]).backward()
    keeper.detach()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with keeper.step():
        model(batches(1)[0]).backward()
    assert keeper.plan is None
    alive = ref(keeper)
    del keeper
    assert alive() is None


def test_a_detached_keeper_plans_for_the_model_that_it_is_attached_to_next():
    keeper = budgeted(made())
    keeper.detach()
    model = made()
    train(model, keeper.attach(model), steps=2)
    assert keeper.plan is not None


def test_a_plan_lasts_over_detach_and_attach(planned):
    model, keeper = planned
    before = keeper.plan
    keeper.detach()
    train(model, keeper.attach(model), steps=3)
    assert keeper.plan is before
    assert keeper.policy.rules


def test_it_is_for_one_model_once():
    model = made()
    keeper = budgeted(model)
    with pytest.raises(ValueError, match="attached to the model already"):
        keeper.attach(model)
    with pytest.raises(ValueError, match="plans for one model"):
        keeper.attach(made())
    train(model, keeper, steps=2)
    assert keeper.plan is not None


def test_a_dropped_keeper_with_a_plan_is_gone_at_once(no_collector):
    model = made()
    keeper = budgeted(model)
    train(model, keeper, steps=3)
    alive = ref(keeper)
    keeper.detach()
    del keeper
    assert alive() is None


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": -1}, "expected 0 or more"),
        ({"budget": 0}, "a step takes more"),
        ({"budget": 1.5}, "expected a part"),
        ({"budget": "much"}, "expected a part"),
        ({"budget": "1GiB", "host": "all"}, "host='all'"),
        ({"budget": "1GiB", "repeats": 0}, "repeats=0"),
    ],
)
def test_a_budget_is_checked_when_the_keeper_is_made(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ps.Keeper(**options)


@pytest.mark.parametrize(
    "options", [{}, {"policy": ps.Policy(), "budget": 0.5}, {"policy": ps.Policy(), "loss": sum}]
)
def test_a_keeper_has_a_policy_or_a_budget(options):
    with pytest.raises(TypeError, match="budget="):
        ps.Keeper(**options)


def test_auto_needs_a_gpu_and_says_so():
    model = made()
    keeper = budgeted(model, "auto")
    with keeper.step():
        model(batches(1)[0]).backward()
    with pytest.raises(ValueError, match="cpu has no memory of its own"), keeper.step():
        pass


@pytest.mark.parametrize(("fraction", "can_have"), [(1.0, 60), (0.5, 40)])
def test_auto_is_what_the_process_can_have_of_its_gpu_less_a_reserve(monkeypatch, fraction, can_have):
    gpu = {"free": 50 << 30, "reserved": 10 << 30, "total": 80 << 30}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu["free"], gpu["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu["reserved"])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: fraction)
    assert device_budget("cuda:0") == int(0.97 * (can_have << 30))


def test_hooks_that_update_in_backward_are_refused():
    model = made()
    model.layers[1].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight has a hook"):
        budgeted(model)
    assert not model._forward_hooks


def test_a_model_that_was_compiled_in_place_is_refused():
    model = made()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"attach torch\.compile"):
        budgeted(model)


@pytest.mark.slow
def test_layers_that_are_compiled_are_planned_for():
    plain, model = made(), made()
    for each in (plain, model):
        for number, layer in enumerate(each.layers):
            each.layers[number] = torch.compile(layer, backend="eager")
    expected = train(plain, None, steps=3)
    keeper = budgeted(model, 0.7)
    assert same(train(model, keeper, steps=3), expected)
    assert keeper.plan is not None


def test_pipelines_are_refused():
    with pytest.raises(ValueError, match="one forward and its backward"):
        budgeted(made()).follow(object())


# --- with others ---


def test_it_is_a_keeper_for_everyone(planned):
    _, keeper = planned
    assert isinstance(keeper, ps.Keeper)
    assert isinstance(keeper, SavedKeeper)
    assert isinstance(ps.Keeper(ps.Policy()), SavedKeeper)
    assert isinstance(ps.Keeper(ps.Policy()).attach(made()), ps.Keeper)


def graphed(model, keeper, optimizer):
    step = ps.GraphedStep(training_step(model, optimizer), keeper, optimizer=optimizer)
    seed(1)
    return [step(x) for x in batches(5)], [p.detach() for p in model.parameters()]


def test_a_graphed_step_takes_it():
    plain, model = made(), made()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    expected = graphed(plain, ps.Keeper(ps.Policy()).attach(plain), optimizers[0])
    keeper = budgeted(model, optimizer=optimizers[1])
    assert same(graphed(model, keeper, optimizers[1]), expected)
    assert keeper.plan.policy.rules


@pytest.mark.parametrize("options", [{}, {"graphed": True}])
def test_a_plan_for_a_graph_can_be_asked_for(monkeypatch, options):
    asked = []

    def plan(*given, graphed, **named):
        asked.append(graphed)
        return make.plan(*given, graphed=graphed, **named)

    monkeypatch.setattr(target, "make_plan", plan)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphed(model, budgeted(model, optimizer=optimizer, **options), optimizer)
    assert asked == [bool(options)]


def test_a_capture_before_the_plan_is_refused(monkeypatch):
    keeper = budgeted(made())
    monkeypatch.setattr("pagestash.keeper.capturing", lambda: True)
    with pytest.raises(RuntimeError, match="warmup=2"), keeper.step():
        pass


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_count_all_the_time_where_a_microbatch_finds_them(microbatches):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    x = torch.randn(512, 64)
    keeper = ps.Keeper(budget=1.0, loss=torch.sum, repeats=1).attach(model)
    for _ in range(2):
        with keeper.step():
            for _ in range(microbatches):
                model(x).sum().backward()
        model.zero_grad(set_to_none=True)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert keeper.plan.unplanned.memory["base"][0] == microbatches * weights


class Counting(nn.Module):
    """Scales by how often it ran, and by a mean; it has both in plain attributes, and a list of the counts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.calls, self.history = 0, []
        self.mean, self.row = torch.ones(32), torch.ones(1).expand(32)
        self.turned, self.unset = torch.ones(32, 2).t(), torch.full((2,), math.nan)

    def forward(self, *args, **kwargs):
        self.calls += 1
        self.history.append(self.calls)
        x = args[0] * kwargs["by"] * self.mean.clone() * self.row
        self.mean.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        x = x * self.turned[0].clone()
        self.turned.mul_(0.9)
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.calls


def test_attributes_and_arguments_of_both_kinds_are_those_without_a_budget():
    results = []
    for with_budget in (False, True):
        torch.manual_seed(0)
        model, x = Counting(), torch.randn(256, 32)
        keeper = ps.Keeper(budget=1.0, loss=torch.sum, repeats=1).attach(model) if with_budget else None
        for _ in range(3):
            with nullcontext() if keeper is None else keeper.step():
                model(x, by=2.0).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([(model.calls, model.history), model.mean, model.turned, *gradients])
    assert keeper.plan is not None
    assert results[0][0] == results[1][0] == (3, [1, 2, 3])
    assert same(results[0][1:], results[1][1:])


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Momentum(nn.Module):
    """Its forward moves the weights of one half towards those of the other, as momentum encoders do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.online, self.slow = (nn.ModuleList(Block() for _ in range(3)) for _ in "ab")
        self.slow.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, slow in zip(self.online.parameters(), self.slow.parameters()):
                if self.how == "replaced":
                    slow.data = 0.9 * slow.data + 0.1 * own.data
                else:
                    (slow.data if self.how == "through data" else slow).mul_(0.9).add_(own, alpha=0.1)
        y = z = x
        for own, slow in zip(self.online, self.slow):
            y, z = own(y), slow(z)
        return (y - z).square().mean()


@pytest.mark.parametrize("how", ["in place", "through data", "replaced"])
def test_weights_that_forward_writes_to_are_written_once_a_step(how):
    plain, model = made(Momentum, how=how), made(Momentum, how=how)
    keeper = budgeted(model, 0.9)
    assert same(train(model, keeper), train(plain, None))
    assert keeper.plan is not None


@pytest.mark.slow
def test_the_first_budget_of_a_process_draws_no_random_number():
    code = (
        "import random, torch, pagestash as ps\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))\n"
        "random.seed(0)\n"
        "before = random.getstate()\n"
        "keeper = ps.Keeper(budget=0.85, repeats=1).attach(model)\n"
        "for _ in range(2):\n"
        "    with keeper.step():\n"
        "        model(torch.randn(64, 64)).square().mean().backward()\n"
        "assert keeper.plan is not None and random.getstate() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
