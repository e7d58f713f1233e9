"""Expert parallelism over 2 and 4 processes gives what one process with all experts gives.

A module-wide spawn for each number of ranks runs every case under every dispatch and writes down what it got;
the tests compare. Cases, tensors and expectations come from the same seeds on both sides.
"""

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import error
from support.processes import start_ranks
from support.tiers import slow
from support.uninitialised import filled_with_nan

from pagestash.kernels import backend
from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig
from pagestash.pages.pool import PagePool

# Rows are multiples of 64 bytes: a BLAS may add in another order where alignment differs.
D, N, E = 32, 32, 8
MAX_TOKENS = 14
WORLDS = [2, *slow(4)]
KINDS = ["gather", "padded", "exact"]

# Routing, and what is special about a case. `tokens` are cut to the number of ranks.
CASES = {
    "random": {"choose": "random", "top_k": 3},
    "two_choices": {"choose": "random", "top_k": 2},
    "skewed": {"choose": "skewed", "top_k": 3},
    "one_hot": {"choose": "one_hot", "top_k": 1},
    "first_rank_only": {"choose": "first", "top_k": 2},
    "uneven": {"choose": "random", "top_k": 3, "tokens": [14, 0, 5, 9]},
    "bias": {"choose": "random", "top_k": 2, "bias": True, "activation": "clamped", "tokens": [3, 11, 14, 1]},
    # (The last by name: seeds are counted by it.)
    "without_expert": {"choose": "without_expert", "top_k": 3},
    "without_expert_bias": {"choose": "without_expert", "top_k": 2, "bias": True},
}


def make_config(case, **changes):
    made = {"width": D, "expert_width": N, "experts": E, "top_k": case["top_k"]}
    made |= {key: case[key] for key in ("bias", "activation") if key in case}
    return MoEConfig(**made | changes)


def problem(name, world):
    """Tokens of each rank, their choices, the weights of all experts, and the gradient of the result."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(sorted(CASES).index(name) * 10 + world)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = case.get("tokens", [12] * 4)[:world]
    total, choices = sum(tokens), case["top_k"]
    likely = torch.ones(E)
    if case["choose"] == "skewed":
        likely = torch.tensor([100.0, 50.0, 10.0, 1.0] + [1e-3] * (E - 4))
    elif case["choose"] == "one_hot":
        likely = torch.tensor([0.0] * 3 + [1.0] + [0.0] * (E - 4))
    elif case["choose"] == "first":
        likely = torch.tensor([1.0] * (E // world) + [0.0] * (E - E // world))
    ids = torch.multinomial(likely.expand(total, -1), choices, generator=generator).to(torch.int32)
    if case["choose"] == "without_expert":  # dropped tokens, and dropped choices
        for number, token in enumerate(range(0, total, 3)):
            ids[token, number % (choices + 1) :] = torch.tensor([-1, E, E + 3, -E])[number % 4]
    parameters = {"up": normal(E, 2 * N, D) / D**0.5, "down": normal(E, D, N) / N**0.5}
    if case.get("bias"):
        parameters |= {"up_bias": normal(E, 2 * N), "down_bias": normal(E, D)}
    weights = torch.rand(total, choices, generator=generator)
    return {
        "tokens": tokens, "x": normal(total, D), "ids": ids, "weights": weights, "dy": normal(total, D),
        "parameters": parameters,
    }  # fmt: skip


PARTS = {"up": "expert_fc1.weight", "down": "expert_fc2.weight"} | {
    "up_bias": "expert_fc1.bias", "down_bias": "expert_fc2.bias"
}  # fmt: skip


def run(moe, x, weights, ids, dy, *, retain=False):
    """Result and gradients of the experts alone, by name."""
    moe.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = moe.experts(x, weights, ids)
    if retain:
        y.backward(dy, retain_graph=True)
        moe.zero_grad()
        x.grad = weights.grad = None
    y.backward(dy)
    found = dict(moe.named_parameters())
    grads = {name: found[full].grad.clone() for name, full in PARTS.items() if full in found}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | grads


def load(moe, parameters, rank=0, world=1):
    with torch.no_grad():
        for name, value in parameters.items():
            moe.get_parameter(PARTS[name]).copy_(value.chunk(world)[rank])


@contextmanager
def one_thread():
    """As in the processes: then the products have the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def alone(name, world, weights=None, ids=None):
    """What one process with all experts gives."""
    given = problem(name, world)
    moe = MoE(make_config(CASES[name]))
    load(moe, given["parameters"])
    with one_thread():
        return run(
            moe,
            given["x"],
            given["weights"] if weights is None else weights,
            given["ids"] if ids is None else ids,
            given["dy"],
        )


# --- in the processes ---------------------------------------------------------------------------------------


def make_dispatch(kind, config, **changes):
    if kind == "gather":
        return AllGather(config, max_tokens=MAX_TOKENS)
    if kind == "padded":
        return AllToAll(config, max_tokens=MAX_TOKENS, **changes)
    return AllToAll(config, padded=False)


class Rank:
    """One process's part of every case."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def setup(self, name, kind, *, pair_capacity=None, **changes):
        config = make_config(CASES[name], **changes)
        pair = {"pair_capacity": pair_capacity} if pair_capacity and kind == "padded" else {}
        moe = MoE(config, dispatch=make_dispatch(kind, config, **pair))
        given = problem(name, self.world)
        load(moe, given["parameters"], self.rank, self.world)
        mine = [given[part].split(given["tokens"])[self.rank] for part in ("x", "weights", "ids", "dy")]
        return moe, mine

    def plain(self, name, kind):
        moe, mine = self.setup(name, kind)
        first = run(moe, *mine)
        assert moe.over_capacity == 0
        return first | {"again": run(moe, *mine, retain=True)}

    def stashed(self, kind):
        """Through a pool that has room for all, for the received rows alone, and for less."""
        moe, mine = self.setup("skewed", kind)
        given, here = problem("skewed", self.world), E // self.world
        rows = int((given["ids"] // here == self.rank).sum())
        rows_pages, all_pages = -(-rows * D * 4 // 256), -(-rows * D * 4 // 256) + -(-rows * 2 * N * 4 // 256)
        found = {"rows": rows, "plain": run(moe, *mine)}
        for label, pages in (("all", all_pages), ("received", rows_pages), ("less", rows_pages - 1)):
            moe.experts.pool = PagePool("cpu", 256, max(pages, 1))
            found[label] = run(moe, *mine)
            stats = moe.experts.pool.stats()
            found[label + "_stats"] = (
                stats.overflow,
                stats.device.in_use,
                stats.device.peak,
                stats.given_up_groups,
            )
        moe.experts.pool = PagePool("cpu", 256, all_pages + 1)
        with torch.no_grad():
            found["no_grad"] = moe.experts(*mine[:3])
        found["no_grad_peak"] = moe.experts.pool.stats().device.peak
        moe, mine = self.setup("skewed", kind, expected_rows=5)
        found["expected"] = run(moe, *mine)
        moe.experts.pool = PagePool("cpu", 256, all_pages + 1)
        found["beyond"] = run(moe, *mine)
        found["beyond_peak"] = moe.experts.pool.stats().device.peak
        return found

    def over_rows(self, kind):
        """Everything goes to rank 0, which has room for fewer."""
        moe, mine = self.setup("first_rank_only", kind, capacity=7)
        short = run(moe, *mine)
        found = {"short": short, "flag": float(moe.over_capacity), "before": moe.experts.capacity}
        found["grew"] = moe.grow_capacity(headroom=1.0, alignment=1)
        found["after"] = moe.experts.capacity
        found["again"] = moe.grow_capacity(headroom=1.0, alignment=1)
        found["still"] = float(moe.over_capacity)
        moe.clear_over_capacity()
        found["run"] = run(moe, *mine)
        found["cleared"] = float(moe.over_capacity)
        return found

    def over_pair(self):
        """The pair capacity is short on rank 1 alone: the others choose evenly among the ranks."""
        moe, (x, weights, ids, dy) = self.setup("one_hot", "padded", pair_capacity=5, capacity=8)
        if self.rank != 1:
            ids = (torch.arange(ids.numel()) % E).to(torch.int32).view(ids.shape)
        run(moe, x, weights, ids, dy)
        dispatch = moe.experts.dispatch
        found = {"flag": float(moe.over_capacity), "before": (dispatch.pair_capacity, dispatch.capacity)}
        found["grew"] = moe.grow_capacity(headroom=1.0, alignment=1)
        found["after"] = (dispatch.pair_capacity, dispatch.capacity)
        moe.clear_over_capacity()
        found["run"] = run(moe, x, weights, ids, dy) | {"ids": ids}
        found["cleared"] = float(moe.over_capacity)
        return found

    def repeated(self, kind):
        """Every token chooses expert 0 three times, and no other."""
        moe, (x, weights, ids, dy) = self.setup("random", kind)
        return {"run": run(moe, x, weights, torch.zeros_like(ids), dy), "flag": float(moe.over_capacity)}

    def dropping(self, kind):
        moe, mine = self.setup("first_rank_only", kind, capacity=7, drop=True)
        found = {"run": run(moe, *mine), "flag": float(moe.over_capacity)}
        return found | {"grew": moe.grow_capacity(), "capacity": moe.experts.capacity}

    def errors(self):
        found = []
        config = MoEConfig(width=D, expert_width=N, experts=self.world * 3 + 1, top_k=1)
        for make in (
            lambda: AllGather(config, max_tokens=4),
            lambda: AllToAll(config, max_tokens=4),
            lambda: AllToAll(config, padded=False),
        ):
            with pytest.raises(ValueError, match="experts=") as caught:
                make()
            found.append(str(caught.value))
        return found

    def whole_layer(self, kind):
        """Router, shared experts and auxiliary losses around the dispatch, in bf16 too."""
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            moe, x, dy = whole(dtype, self.world, self.rank, kind)
            x.requires_grad_()
            y, aux = moe(x)
            (y.float() * dy).sum().backward()
            grads = {name: p.grad for name, p in moe.named_parameters()}
            found[dtype] = {"y": y.detach(), "x": x.grad, "aux": aux.detach()} | grads
        return found


def whole(dtype, world, rank=None, kind=None):
    """The layer of one rank with its tokens, or (rank None) of a single process with all."""
    torch.manual_seed(5)
    extras = {"shared_experts": 1, "score": "sigmoid", "balance_loss": 0.1, "z_loss": 0.1}
    config = MoEConfig(width=D, expert_width=N, experts=E, top_k=3, **extras)
    moe = MoE(config, dtype=dtype)
    tokens = [14, 9, 0, 12][:world]
    x, dy = torch.randn(sum(tokens), D).to(dtype), torch.randn(sum(tokens), D)
    if rank is None:
        return moe, x, dy
    part = MoE(config, dtype=dtype, dispatch=make_dispatch(kind, config))
    state = moe.state_dict()
    for name in ("expert_fc1.weight", "expert_fc2.weight"):
        state[name] = state[name].chunk(world)[rank]
    part.load_state_dict(state)
    return part, x.split(tokens)[rank].clone(), dy.split(tokens)[rank]


def work(rank, world, folder):
    torch.set_num_threads(1)
    assert not backend.interpreted()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=20),  # only ever waited for in full by ranks that hang
    )
    me, found = Rank(rank, world), {}
    with filled_with_nan():
        for kind in KINDS:
            for name in CASES:
                found[name, kind] = me.plain(name, kind)
            for name in ("stashed", "over_rows", "repeated", "dropping", "whole_layer"):
                found[name, kind] = getattr(me, name)(kind)
        found["over_pair"], found["errors"] = me.over_pair(), me.errors()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


# --- the tests ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def ranks(request, tmp_path_factory):
    """What each rank found, in order."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    start_ranks(work, (world, str(folder)), world)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def joined(parts):
    """Tokens by rank, experts by rank: both are the single process's order."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "again"}


def same_bits(kind, name):
    """The parts of a case whose sums have the same order as on a single process.

    A row goes through the same products whoever holds its expert, and all-to-all adds a token's rows at the
    token, in the order of its choices. AllGather adds by rank first: the same for up to two choices.
    """
    everything = {"y", "x", "weights", "up", "down", "up_bias", "down_bias"}
    if kind == "gather" and CASES[name]["top_k"] > 2:
        everything -= {"y", "x"}
    if CASES[name].get("bias"):
        # A single process sums the biases of a token in another place.
        everything -= {"y", "x", "weights"}
    return everything


def check(got, wanted, bits):
    assert got.keys() == wanted.keys()
    for part in wanted:
        assert error(got[part], wanted[part]) < 1e-5, part
        if part in bits:
            assert torch.equal(got[part], wanted[part]), part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_one_process(ranks, name, kind):
    wanted = alone(name, len(ranks))
    parts = [rank[name, kind] for rank in ranks]
    check(joined(parts), wanted, same_bits(kind, name))
    # A second backward through a kept graph, and a second run, give the same bits.
    for part in parts:
        for key, value in part["again"].items():
            assert torch.equal(value, part[key]), key


@pytest.mark.parametrize("name", ["without_expert", "without_expert_bias"])
def test_a_choice_that_no_expert_has_is_none(name):
    given = problem(name, 2)
    nobody = (given["ids"] < 0) | (given["ids"] >= E)
    assert nobody.all(1).any()
    assert (nobody.any(1) & ~nobody.all(1)).any()
    got = alone(name, 2)
    weights, ids = given["weights"].masked_fill(nobody, 0), given["ids"].masked_fill(nobody, 0)
    wanted = alone(name, 2, weights, ids)
    wanted["weights"].masked_fill_(nobody, 0)
    check(got, wanted, {"weights"})


def test_the_cases_leave_ranks_without_rows_and_without_tokens(ranks):
    """That what the cases are for happens in them."""
    world = len(ranks)
    owners = problem("one_hot", world)["ids"] // (E // world)
    assert owners.unique().tolist() == [3 // (E // world)]
    for rank in ranks[1:]:
        for part in ("up", "down"):
            assert not rank["first_rank_only", "gather"][part].any()
    assert ranks[1]["uneven", "padded"]["y"].shape == (0, D)


@pytest.mark.parametrize("kind", KINDS)
def test_received_rows_go_to_pages_and_cannot_be_had_again(ranks, kind):
    for rank in ranks:
        found = rank["stashed", kind]
        rows_pages, h_pages = -(-found["rows"] * D * 4 // 256), -(-found["rows"] * 2 * N * 4 // 256)
        for label, peak in (("all", rows_pages + h_pages), ("received", rows_pages)):
            for part, value in found["plain"].items():
                assert torch.equal(found[label][part], value), (label, part)
            overflow, in_use, most, given_up = found[label + "_stats"]
            assert not overflow
            assert in_use == 0
            assert most == peak
            assert given_up == (label == "received" and found["rows"] > 0)
        assert found["less_stats"][0] == (found["rows"] > 2)
        assert torch.equal(found["no_grad"], found["plain"]["y"])
        assert found["no_grad_peak"] == 0
        # Rows that were expected stay where they are. Only the sum of two products has another order then.
        beyond = max(found["rows"] - 5, 0)
        assert found["beyond_peak"] == -(-beyond * D * 4 // 256) + -(-beyond * 2 * N * 4 // 256)
        check(found["expected"], found["plain"], set(found["plain"]) - {"up"})
        check(found["beyond"], found["expected"], set(found["plain"]))


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_capacity_raise_the_flag_there_and_growing_mends_it(ranks, kind):
    world = len(ranks)
    wanted_rows = problem("first_rank_only", world)["ids"].numel()
    for number, rank in enumerate(ranks):
        found = rank["over_rows", kind]
        assert found["before"] == 7
        assert found["flag"] == found["still"] == (1.0 if number == 0 else 0.0)
        assert found["grew"]
        assert not found["again"]
        assert found["after"] == wanted_rows
        assert found["cleared"] == 0.0
        for value in found["short"].values():
            assert value.isfinite().all()
    got = joined([rank["over_rows", kind]["run"] for rank in ranks])
    check(got, alone("first_rank_only", world), same_bits(kind, "first_rank_only"))


def test_more_rows_than_a_pair_holds_raise_the_senders_flag(ranks):
    world = len(ranks)
    given = problem("one_hot", world)
    owner = 3 // (E // world)
    pairs = [torch.bincount(rank["over_pair"]["run"]["ids"].view(-1) // (E // world), minlength=world)
             for rank in ranks]  # fmt: skip
    # Rank 1 has all its rows for one rank; elsewhere no pair has more than it may, except among two ranks.
    for number, rank in enumerate(ranks):
        found = rank["over_pair"]
        rows_here = sum(int(pair.clamp(max=5)[number]) for pair in pairs)
        assert found["flag"] == float(pairs[number].max() > 5 or rows_here > 8)
        assert found["before"] == (5, 8)
        assert found["grew"]
        # One growth is enough: rows that a pair had no room for were counted where they were going.
        rows = max(int(sum(pair[w] for pair in pairs)) for w in range(world))
        assert found["after"] == (int(torch.stack(pairs).max()), rows)
        assert found["cleared"] == 0.0
    assert pairs[1][owner] == given["tokens"][1]
    moe = MoE(make_config(CASES["one_hot"]))
    load(moe, given["parameters"])
    ids = torch.cat([rank["over_pair"]["run"].pop("ids") for rank in ranks])
    with one_thread():
        wanted = run(moe, given["x"], given["weights"], ids, given["dy"])
    check(joined([rank["over_pair"]["run"] for rank in ranks]), wanted, set(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_chosen_several_times_counts_as_often_or_raises_the_flag(ranks, kind):
    """Distinct ids are what the worst case is reckoned from. With 2 experts on each of 4 ranks it holds
    2 · 14 rows of a rank's tokens, and here are 3 · 12."""
    world = len(ranks)
    found = [rank["repeated", kind] for rank in ranks]
    if world == 4 and kind != "exact":
        # Where the rows have no room: on every sender, or on the rank of expert 0.
        assert [part["flag"] for part in found] == ([1.0] * 4 if kind == "padded" else [1.0, 0.0, 0.0, 0.0])
        return
    assert not any(part["flag"] for part in found)
    wanted = alone("random", world, ids=torch.zeros_like(problem("random", world)["ids"]))
    check(joined([part["run"] for part in found]), wanted, same_bits(kind, "random"))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_dropped_only_by_name(ranks, kind):
    world = len(ranks)
    given = problem("first_rank_only", world)
    # The first seven in the order of experts and tokens stay; without its weight a row adds nothing.
    flat = given["ids"].view(-1)
    kept = torch.zeros(flat.shape, dtype=torch.bool)
    kept[torch.argsort(flat, stable=True)[:7]] = True
    kept = kept.view(given["ids"].shape)
    wanted = alone("first_rank_only", world, torch.where(kept, given["weights"], 0.0))
    wanted["weights"] = torch.where(kept, wanted["weights"], 0.0)
    got = joined([rank["dropping", kind]["run"] for rank in ranks])
    check(got, wanted, {"weights"})
    for rank in ranks:
        assert rank["dropping", kind]["flag"] == 0.0
        assert not rank["dropping", kind]["grew"]
        assert rank["dropping", kind]["capacity"] == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_whole_layer_trains_alike(ranks, kind, dtype, most):
    moe, x, dy = whole(dtype, len(ranks))
    x.requires_grad_()
    with one_thread():
        y, _ = moe(x)
        (y.float() * dy).sum().backward()
    parts = [rank["whole_layer", kind][dtype] for rank in ranks]
    assert all(part["aux"].isfinite() for part in parts)  # also of the rank that has no tokens
    for name, wanted in {"y": y, "x": x.grad, "expert_fc1.weight": moe.expert_fc1.weight.grad}.items():
        assert error(torch.cat([part[name] for part in parts]), wanted.detach()) < most, name
    for name in ("router.weight", "shared_experts.up", "shared_experts.down"):
        # Replicated parameters: data parallelism adds these up.
        total = sum(part[name].double() for part in parts)
        assert error(total, moe.get_parameter(name).grad) < most, name


def test_experts_that_ranks_do_not_divide_are_named(ranks):
    world = len(ranks)
    for rank in ranks:
        for message in rank["errors"]:
            assert f"experts={world * 3 + 1}" in message
            assert f"{world} ranks" in message
