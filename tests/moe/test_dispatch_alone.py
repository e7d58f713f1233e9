"""Dispatches of one rank alone, in this process: the kernels, arguments, growth, host reads, the docs' example."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pagestash.moe import AllGather, AllToAll, MoE

sys.path.insert(0, str(Path(__file__).parent))
from test_dispatch import (
    CASES,
    KINDS,
    MAX_TOKENS,
    D,
    E,
    check,
    load,
    make_config,
    make_dispatch,
    one_thread,
    problem,
    run,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank", "interpreted_kernels")
def test_one_rank_alone_with_the_kernels_interpreted(kind):
    given = problem("uneven", 2)
    config = make_config(CASES["uneven"])
    local = MoE(config)
    spread = MoE(config, dispatch=make_dispatch(kind, config))
    for moe in (local, spread):
        load(moe, given["parameters"])
    given = [given[part][:MAX_TOKENS] for part in ("x", "weights", "ids", "dy")]
    check(run(spread, *given), run(local, *given), {"y", "x", "up", "down", "weights"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank", "backend")
def test_gradients_of_biases_read_no_padding(kind):
    """Four tokens where the wire has room for fourteen: the gradients of the other slots are NaN here."""
    given = problem("bias", 2)
    config = make_config(CASES["bias"])
    local, spread = MoE(config), MoE(config, dispatch=make_dispatch(kind, config))
    for moe in (local, spread):
        load(moe, given["parameters"])
    given = [given[part][:4] for part in ("x", "weights", "ids", "dy")]
    check(run(spread, *given), run(local, *given), {"up", "down", "up_bias", "down_bias"})


@pytest.mark.usefixtures("lone_rank")
def test_bad_arguments_are_named():
    config = make_config(CASES["random"])
    for make, match in [
        (lambda: AllGather(config, max_tokens=0), "max_tokens=0"),
        (lambda: AllToAll(config), "max_tokens=None"),
        (lambda: AllToAll(config, max_tokens=4, pair_capacity=0), "pair_capacity=0"),
        (lambda: AllToAll(config, padded=False, pair_capacity=3), "pair_capacity=3"),
    ]:
        with pytest.raises(ValueError, match=match):
            make()
    for dispatch in (AllGather(config, max_tokens=4), AllToAll(config, max_tokens=4)):
        with pytest.raises(ValueError, match="5 tokens on rank 0: max_tokens=4"):
            MoE(config, dispatch=dispatch)(torch.randn(5, D))


@pytest.mark.usefixtures("lone_rank")
def test_a_grown_capacity_has_headroom_is_aligned_and_stops_at_the_worst_case():
    for kind, dispatched in [*((kind, True) for kind in KINDS), ("local", False)]:
        config = make_config(CASES["random"], capacity=5)
        experts = MoE(config, dispatch=make_dispatch(kind, config) if dispatched else None).experts
        x, weights, ids = torch.randn(10, D), torch.rand(10, 3), torch.rand(10, E).argsort(1)[:, :3].int()
        assert not experts.grow_capacity(), kind  # nothing was wanted yet
        experts(x, weights, ids)
        assert experts.over_capacity == 1, kind
        assert experts.grow_capacity(headroom=1.1, alignment=4), kind
        # 30 rows and a tenth are 33, in fours 36; ten tokens (or what any rank may bring) want no more.
        most = {"local": 30, "exact": 30, "gather": 3 * MAX_TOKENS, "padded": 3 * MAX_TOKENS}[kind]
        assert experts.capacity == min(36, most), kind
        experts.clear_over_capacity()
        experts(x, weights, ids)
        assert experts.over_capacity == 0, kind
        assert not experts.grow_capacity(), kind


class HostReads(TorchDispatchMode):
    """Raises where a value on the device would have to be known on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("lone_rank", "interpreted_kernels")
def test_only_the_exact_dispatch_reads_a_value_on_the_host(kind, monkeypatch):
    """With the kernels, as on a GPU: the references read counts, and so do the experts' products on a CPU."""

    def refuse(*_):
        raise AssertionError("waits for the device")

    config = make_config(CASES["random"], capacity=20)
    dispatch = make_dispatch(kind, config, **({"pair_capacity": 9} if kind == "padded" else {}))
    x, weights = torch.randn(5, D, requires_grad=True), torch.rand(5, 3, requires_grad=True)
    ids, over = torch.rand(5, E).argsort(1)[:, :3].int(), torch.zeros(())

    def there_and_back():
        received = dispatch.send(x, ids, weights, over)
        y = dispatch.collect(received.slots * received.weights.sum(1, keepdim=True), received)
        with HostReads():
            y.backward(torch.ones_like(y))

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    with HostReads():
        if kind == "exact":
            with pytest.raises(AssertionError, match="waits for the device"):
                there_and_back()
            return
        there_and_back()
    assert x.grad is not None
    assert weights.grad is not None
    assert over == (kind == "padded")


@pytest.mark.usefixtures("lone_rank")
def test_the_example_in_the_docs_runs(monkeypatch, capsys):
    """On one rank here; `torchrun` runs it on more."""
    page = Path(__file__).parents[2] / "docs" / "expert-parallel.md"
    (example,) = re.findall(r"```python\n(import .*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_, **__: None)
    with one_thread():
        exec(compile(example, str(page), "exec"), {"__name__": "__main__"})
    assert "loss" in capsys.readouterr().out
