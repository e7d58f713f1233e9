"""A keeper among others: other keepers, threads, copies of the model, other devices, other people's hooks."""

import copy
import io
import pickle
import threading

import pytest
import torch
from stack import Stack, batch, policy, run
from support import same
from torch import nn

import pagestash as ps
from pagestash.moe import MoE, MoEConfig
from pagestash.saved.names import named_modules

HOMES = ["keep", "stash", "offload", "recompute"]


def keeper(home, match="*", **pool):
    pool = {"page": 64} | pool
    return ps.Keeper(ps.Policy([ps.Rule(match, home, min_bytes=0)], ps.PoolConfig(**pool)), backend="torch")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.inside = None

    def forward(self, x):
        y = torch.tanh(self.a(x)) ** 2
        if self.inside is not None:
            self.inside()
        return y


def net():
    return nn.Sequential(Part(), Part(), nn.Linear(8, 8))


def gradients(model, x=None, *steps):
    x = torch.ones(4, 8).cumsum(0) / 7 if x is None else x
    model.zero_grad()
    for step in steps:
        step.__enter__()
    try:
        model(x).square().sum().backward()
    finally:
        for step in reversed(steps):
            step.__exit__(None, None, None)
    return [p.grad.clone() for p in model.parameters()]


# --- two of them ---


@pytest.mark.parametrize("home", HOMES)
def test_attaching_twice_is_refused_by_name(home):
    model = net()
    plain = gradients(model)
    kept = keeper(home).attach(model)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(ValueError, match="attached to the model already"):
        kept.attach(model)
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    assert same(gradients(model, None, kept.step()), plain)


@pytest.mark.parametrize("inner", HOMES)
@pytest.mark.parametrize("outer", HOMES)
def test_two_keepers_of_one_model_in_one_step(outer, inner):
    model = net()
    plain = gradients(model)
    first, second = keeper(outer).attach(model), keeper(inner).attach(model)
    for _ in range(3):
        assert same(gradients(model, None, first.step(), second.step()), plain)
        assert same(gradients(model, None, second.step(), first.step()), plain)
        assert same(gradients(model, None, first.step()), plain)


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_steps_of_two_models_inside_each_other_both_move_their_own(home):
    """Torch asks the innermost hooks only, which hand on what belongs to the other keeper."""
    left, right = net(), net()
    both = nn.Sequential(left, right)
    plain = gradients(both)
    kept = [keeper(home).attach(left), keeper(home).attach(right)]
    assert same(gradients(both, None, kept[0].step(), kept[1].step()), plain)
    for each in kept:
        assert each.stats().homes[home].peak > 0
        assert each.stats().homes[home].bytes == 0
    for _ in range(2):
        assert same(gradients(both, None, kept[0].step(), kept[1].step()), plain)


@pytest.mark.parametrize("home", HOMES)
def test_a_module_shared_by_two_attached_models(home):
    shared = Part()
    left, right = nn.Sequential(shared, Part()), nn.Sequential(shared, Part())
    both = nn.ModuleList([left, right])
    both.forward = lambda x: left(x) + right(x)
    plain = gradients(both)
    kept = keeper(home).attach(left).attach(right)
    for _ in range(3):
        assert same(gradients(both, None, kept.step()), plain)


def test_a_shared_module_whose_names_have_different_rules_is_refused_by_name():
    shared = Part()
    rules = [ps.Rule("0", "stash", min_bytes=0), ps.Rule("1", "offload", min_bytes=0)]
    kept = ps.Keeper(ps.Policy(rules)).attach(nn.Sequential(shared, Part()))
    with pytest.raises(ValueError, match=r"'1' is '0' of another model"):
        kept.attach(nn.Sequential(Part(), shared))


# --- threads ---


@pytest.mark.parametrize("home", HOMES)
def test_another_thread_inside_the_same_module(home):
    """An evaluation thread is in the middle of a module when training runs it, from its beginning to its end."""
    model = net()
    plain = gradients(model)
    kept = keeper(home).attach(model)
    inside, done = threading.Event(), threading.Event()

    def evaluate():
        with torch.no_grad():
            model(torch.ones(4, 8))

    thread = threading.Thread(target=evaluate)

    def meet():
        if threading.current_thread() is thread:
            inside.set()
            done.wait(60)
        elif not thread.ident:
            thread.start()
            inside.wait(60)

    model[0].inside = meet
    with kept.step():
        model.zero_grad()
        loss = model(torch.ones(4, 8).cumsum(0) / 7).square().sum()
        done.set()
        thread.join()
        loss.backward()
    assert same([p.grad for p in model.parameters()], plain)


@pytest.mark.parametrize("home", HOMES)
def test_a_module_inside_itself_without_gradients(home):
    """The inner call opens nothing, and must not close what the outer one has opened."""
    model = net()
    plain = gradients(model)
    kept = keeper(home).attach(model)
    deep = []

    def again():
        if not deep:
            deep.append(1)
            with torch.no_grad():
                model[0](torch.ones(4, 8))
            deep.clear()

    model[0].inside = again
    for _ in range(2):
        assert same(gradients(model, None, kept.step()), plain)


class Sudden(BaseException):
    pass


@pytest.mark.parametrize("home", HOMES)
def test_a_module_that_catches_an_interrupt_of_its_part(home):
    """Torch calls no hook when a forward ends by what is no Exception; the part's region is over all the same."""

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            try:
                return self.part(x)
            except Sudden:
                return self.b(self.kept[0])

    def fail():
        raise Sudden

    model = nn.Sequential(Catches(), nn.Linear(8, 8))
    part, seen = model[0].part, []
    model[0].kept = seen
    part.a.register_forward_hook(lambda module, args, out: seen.append(torch.tanh(out) ** 2))
    part.inside = fail
    plain = gradients(model)
    for match in ("*.part", "*", "**"):
        kept = keeper(home, match).attach(model)
        for _ in range(2):
            seen.clear()
            if (
                home == "recompute" and match == "*.part"
            ):  # what never came to its end cannot be run to it again
                with pytest.raises(RuntimeError, match="under recompute"):
                    gradients(model, None, kept.step())
                continue
            assert same(gradients(model, None, kept.step()), plain)
        kept.detach()


# --- copies ---


@pytest.mark.parametrize("home", HOMES)
def test_an_attached_model_can_be_pickled_and_the_copy_belongs_to_nobody(home, tmp_path):
    model = net()
    plain = gradients(model)
    kept = keeper(home).attach(model)
    gradients(model, None, kept.step())
    torch.save(model, tmp_path / "model.pt")
    copies = [
        torch.load(tmp_path / "model.pt", weights_only=False),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ]
    before = kept.stats().homes[home].peak
    kept.reset_peaks()
    for each in copies:
        assert b"Keeper" not in pickle.dumps(each)
        assert same(gradients(each), plain)
        assert same(gradients(each, None, kept.step()), plain)
        assert kept.stats().homes["stash"].peak == kept.stats().homes["offload"].peak == 0
        other = keeper(home).attach(each)
        assert same(gradients(each, None, other.step()), plain)
        assert other.stats().homes[home].peak == before
    assert same(gradients(model, None, kept.step()), plain)


def test_a_pickled_moe_layer_leaves_its_pool_behind():
    model = nn.Sequential(MoE(MoEConfig(width=16, expert_width=16, experts=4, top_k=2)))
    kept = ps.Keeper(
        ps.Policy([ps.Rule("0.**", "stash", min_bytes=0)], ps.PoolConfig(page=64, device="1MiB"))
    )
    kept.attach(model)
    assert any(getattr(module, "pool", None) is not None for module in model.modules())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(getattr(module, "pool", None) is None for module in each.modules())
    assert any(getattr(module, "pool", None) is not None for module in model.modules())
    ps.GraphedStep(lambda: None, kept)  # which counts forwards of the experts
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert len(buffer.getvalue()) < 1 << 19


# --- devices ---


def test_a_model_that_is_moved_after_attach_is_followed():
    model = net()
    kept = keeper("stash", device="64KiB").attach(model)
    old = kept.pool
    assert old is not None
    model.to_empty(device="meta")
    assert kept.device == torch.device("meta")
    with pytest.raises(RuntimeError, match="meta device"), kept.step():
        pass
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    plain = gradients(model)
    assert same(gradients(model, None, kept.step()), plain)
    assert kept.pool is not None
    assert kept.pool is not old
    assert kept.stats().homes["stash"].peak > 0


def test_a_model_on_the_meta_device_can_be_attached():
    with torch.device("meta"):
        model = net()
    kept = keeper("offload", device="64KiB").attach(model)
    assert kept.pool is None
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    plain = gradients(model)
    for _ in range(2):
        assert same(gradients(model, None, kept.step()), plain)


def test_a_model_that_is_moved_while_its_tensors_wait_is_refused():
    model = net()
    kept = keeper("stash").attach(model)
    gradients(model, None, kept.step())
    with kept.step():
        loss = model(torch.ones(4, 8)).sum()
    model.to_empty(device="meta")
    with pytest.raises(RuntimeError, match="moved from cpu to meta"), kept.step():
        pass
    del loss


# --- names ---


def test_names_are_those_that_the_author_of_a_model_knows(lone_rank):
    model = net()
    names = list(named_modules(model))
    assert names == ["0", "0.a", "1", "1.a", "2"]
    assert list(named_modules(torch.compile(model))) == names
    assert list(named_modules(nn.parallel.DistributedDataParallel(model))) == names
    assert list(named_modules(nn.parallel.DistributedDataParallel(torch.compile(model)))) == names
    model[1] = torch.compile(model[1])
    assert list(named_modules(model)) == names
    assert named_modules(model)["1"] is model[1]


@pytest.mark.parametrize("kind", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("home", HOMES)
def test_rules_hold_under_data_parallelism(lone_rank, home, kind):
    model = net()
    plain = gradients(model)
    parallel = nn.parallel.DistributedDataParallel(model, **kind)
    kept = keeper(home, "0").attach(parallel)
    assert same(gradients(parallel, None, kept.step()), plain)
    assert home == "keep" or kept.stats().homes[home].peak > 0
    for _ in range(2):
        assert same(gradients(parallel, None, kept.step()), plain)


# --- no rules ---


def test_a_keeper_without_rules_does_nothing_at_all(monkeypatch):
    model = net()
    plain = gradients(model)
    kept = ps.Keeper(ps.Policy()).attach(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", None)
    assert same(gradients(model, None, kept.step()), plain)


def test_detaching_in_a_step_is_refused():
    model = net()
    kept = keeper("stash").attach(model)
    with kept.step(), pytest.raises(RuntimeError, match="detach when it is over"):
        kept.detach()
    kept.detach()
    kept.attach(model)
    assert same(gradients(model, None, kept.step()), gradients(model))


def test_stats_after_the_measured_step_show_what_was_measured():
    model = Stack()
    kept = ps.Keeper(policy(), backend="torch").attach(model)
    run(model, *batch(20), kept)
    first = kept.stats()
    run(model, *batch(20), kept)
    assert kept.stats().regions == first.regions
    assert kept.stats().homes == first.homes
    assert first.homes["stash"].peak > 0
    assert first.regions["layers.0.experts"].peak > 0
    kept.reset_peaks()
    assert kept.stats().homes["stash"].peak == 0
    assert same(run(model, *batch(20), kept), run(model, *batch(20)))
    assert kept.stats().homes == first.homes


def test_stats_after_the_measured_step_show_what_was_offloaded():
    model = net()
    kept = keeper("offload").attach(model)
    gradients(model, None, kept.step())
    assert kept.stats().homes["offload"].peak > 0
    assert kept.stats().regions["0"].peak > 0
    gradients(model, None, kept.step())
    assert kept.stats().homes["offload"].peak == 0  # it all fits in the window


# --- a step that fails ---


def failing(model, kept, how):
    """A step that ends in mid-backward, or between forward and backward."""

    def fail(grad):
        raise KeyError("mid-backward")

    losses = []

    def step():
        with kept.step():
            losses.append(model(*batch(20)))
            if how == "backward":
                losses[0].backward()
            fail(None)

    hook = model.layers[1].experts.down.weight.register_hook(fail)
    with pytest.raises(KeyError, match="mid-backward"):
        step()
    hook.remove()
    return losses[0]


def waiting(kept):
    stats = kept.stats()
    pages = 0 if stats.pool is None else stats.pool.device.in_use + stats.pool.host.in_use
    return sum(home.bytes for home in stats.homes.values()) + pages


@pytest.mark.parametrize("how", ["backward", "forward"])
@pytest.mark.parametrize("measured", [True, False], ids=["measured", "planned"])
@pytest.mark.parametrize("home", HOMES)
def test_a_failed_step_gives_up_its_pages_at_once(home, measured, how):
    """Autograd holds the failed graph until the thread's next backward, and here we hold it, too."""
    model = Stack()
    plain = run(model, *batch(20))
    rule = ps.Rule(
        "layers.*.experts", home, min_bytes=0, **({"prefetch_bytes": 0} if home == "offload" else {})
    )
    pool = ps.PoolConfig(page=256, headroom=1.0, on_overflow="raise")
    kept = ps.Keeper(ps.Policy([rule], pool), backend="torch").attach(model)
    if not measured:
        assert same(run(model, *batch(20), kept), plain)
    for _ in range(3):
        loss = failing(model, kept, how)
        assert waiting(kept) == 0
        assert same(run(model, *batch(20), kept), plain)  # in a pool that has room for one step
    if how == "backward" or home in ("stash", "offload"):
        with pytest.raises(RuntimeError, match=r"ended by an exception|second time"):
            loss.backward()
    del loss
    assert waiting(kept) == 0
    assert same(run(model, *batch(20), kept), plain)


def test_what_an_earlier_step_holds_outlives_a_failed_one():
    model = Stack()
    run(model, *batch(20))
    plain = run(model, *batch(20))
    kept = ps.Keeper(policy(device="1MiB"), backend="torch").attach(model)
    model.zero_grad()
    torch.manual_seed(1)
    with kept.step():
        early = model(*batch(20))
    failing(model, kept, "forward")
    model.zero_grad()
    early.backward()
    assert same([p.grad for p in model.parameters()], plain[1])
    del early
    assert waiting(kept) == 0


def test_a_failed_step_gives_up_the_pages_that_a_layer_took_itself():
    model = nn.Sequential(MoE(MoEConfig(width=16, expert_width=16, experts=4, top_k=2)))
    pool = ps.PoolConfig(page=64, device="1MiB")
    kept = ps.Keeper(ps.Policy([ps.Rule("0.**", "stash", min_bytes=0)], pool), backend="torch").attach(model)
    x = torch.randn(8, 16, requires_grad=True)
    losses = []

    def fail():
        with kept.step():
            losses.append(model(x)[0].sum())
            assert kept.pool.leases
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert waiting(kept) == 0
    with pytest.raises(RuntimeError, match="ended by an exception"):
        losses[0].backward()
    with kept.step():
        model(x)[0].sum().backward()
    assert waiting(kept) == 0


def test_a_graphed_step_of_a_model_that_was_moved_is_refused_by_name():
    model = net()
    step = ps.GraphedStep(lambda: model(torch.ones(4, 8)).sum().backward(), keeper("stash").attach(model))
    step()
    step._guard.flag = torch.zeros((), device="meta")  # as if the model had been there
    with pytest.raises(ValueError, match="the model is on cpu, but was on meta when GraphedStep was made"):
        step._guard.begin(eager=True)
