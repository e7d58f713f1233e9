"""A forward and a backward interleaved at their exchanges have the bits that they have one after the other."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import same
from support.processes import start_ranks
from support.uninitialised import filled_with_nan
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.moe import AllGather, AllToAll, MoE, MoEConfig, overlap, step_in_halves
from pagestash.moe.parallel import collectives
from pagestash.moe.parallel import overlap as pairs

CONFIG = preset(
    "tiny",
    layers=3,
    vocab=64,
    width=32,
    heads=2,
    kv_heads=1,
    dense_layers=1,
    dense_width=32,
    expert_width=16,
    shared_experts=1,
)
ROWS, LENGTH, MICROBATCHES = 2, 8, 3
POLICIES = {
    "plain": [],
    "stash": [("layers.*.moe.experts", "stash")],
    "offload": [("layers.*", "offload")],
    "recompute": [("layers.*.moe.experts", "recompute"), ("layers.*.attn", "recompute")],
    "recomputed layers": [("layers.*", "recompute")],
    "all": [("layers.*.attn", "offload"), ("layers.*.moe.experts", "stash"), ("layers.*.*norm", "recompute")],
}
DISPATCHES = ["gather", "padded", "exact"]
CASES = [(policy, "padded") for policy in POLICIES] + [
    ("plain", "gather"),
    ("plain", "exact"),
    ("all", "exact"),
]
FEW = [("plain", "gather"), ("all", "padded"), ("all", "exact")]
OTHERS = ["retained", "checkpointed", "halves", "interleaved", "errors", "overflowed"]


def dispatch(kind, config):
    if kind == "gather":
        return AllGather(config, max_tokens=ROWS * LENGTH)
    if kind == "padded":
        return AllToAll(config, max_tokens=ROWS * LENGTH)
    return AllToAll(config, padded=False)


class Dropping(torch.nn.Module):
    """Draws numbers, and may run its layer again in backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.checkpointed = False

    def forward(self, x, by):
        x = torch.nn.functional.dropout(x, 0.1, training=True)
        if self.checkpointed:
            return checkpoint(self.block, x, by, use_reentrant=False)
        return self.block(x, by)


def make_model(rank, world, kind):
    model = Decoder(CONFIG, make_dispatch=lambda config: dispatch(kind, config))
    model.initialise(0, rank * CONFIG.experts // world)
    return model


def in_sequence(forward, backward):
    """In the order of a pair: its backward begins."""
    backward()
    return forward(), None


def train(model, keeper, pair, rank, steps=2, *, retain=False):
    """Losses, and the gradients of the last step."""
    losses = []
    torch.manual_seed(5)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        batches = [torch.randint(64, (ROWS, LENGTH + 1), generator=generator) for _ in range(MICROBATCHES)]

        def forward(tokens):
            return sum(model(tokens[:, :-1], tokens[:, 1:]))

        def back(loss):
            if retain:
                loss.backward(retain_graph=True)
            loss.backward()

        model.zero_grad()
        with keeper.step():
            before = forward(batches[0])
            losses.append(before.detach())
            for tokens in batches[1:]:
                last = before
                before, _ = pair(lambda tokens=tokens: forward(tokens), lambda last=last: back(last))
                losses.append(before.detach())
                del last
            back(before)
    return [*losses, *(p.grad.clone() for p in model.parameters())]


def make_keeper(model, policy):
    rules = [ps.Rule(*rule, min_bytes=0) for rule in POLICIES[policy]]
    return ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256))).attach(model)


class Log:
    """The halves that start and finish collectives, in order."""

    def __enter__(self):
        self.events, self.inner = [], (collectives.UnderWay.__init__, collectives.UnderWay.finish)
        log = self

        def start(self, *args):
            log.events.append(("start", log.half(), self))
            log.inner[0](self, *args)

        def finish(self):
            log.events.append(("finish", log.half(), self))
            return log.inner[1](self)

        collectives.UnderWay.__init__, collectives.UnderWay.finish = start, finish
        return self

    def __exit__(self, *_):
        collectives.UnderWay.__init__, collectives.UnderWay.finish = self.inner

    @staticmethod
    def half():
        running = pairs._running.get()
        return None if running is None else running[1]

    def covered(self):
        """Of collectives in a half: how many there were, and during how many the other half started some."""
        starts = {each: at for at, (what, _, each) in enumerate(self.events) if what == "start"}
        halves = [
            (half, self.events[starts[each] : at])
            for at, (what, half, each) in enumerate(self.events)
            if what == "finish" and half is not None
        ]
        others = [
            any(what == "start" and other not in (half, None) for what, other, _ in between)
            for half, between in halves
        ]
        return len(others), sum(others)


class Rank:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def bits(self, policy, kind):
        found = []
        for pair in (in_sequence, overlap):
            model = make_model(self.rank, self.world, kind)
            found.append(train(model, make_keeper(model, policy), pair, self.rank))
        return found

    def retained(self):
        found = []
        for pair in (in_sequence, overlap):
            model = make_model(self.rank, self.world, "padded")
            found.append(train(model, make_keeper(model, "all"), pair, self.rank, retain=True))
        return found

    def checkpointed(self):
        found = []
        for pair in (in_sequence, overlap):
            model = make_model(self.rank, self.world, "padded")
            model.layers = torch.nn.ModuleList(Dropping(block) for block in model.layers)
            for number, block in enumerate(model.layers):
                block.checkpointed = number % 2 == 0
            found.append(train(model, make_keeper(model, "plain"), pair, self.rank))
        return found

    def interleaved(self):
        model = make_model(self.rank, self.world, "padded")
        with Log() as log:
            train(model, make_keeper(model, "plain"), overlap, self.rank, steps=1)
        halves = "".join("fb"[half == "backward"] for what, half, _ in log.events if what == "start" and half)
        return (*log.covered(), halves)

    def errors(self):
        """Both ranks raise at the same place; what they saved is given up, and the next step is right."""
        found = {}
        for where in ("forward", "backward"):
            model = make_model(self.rank, self.world, "padded")
            keeper = make_keeper(model, "all")
            wanted = train(model, keeper, in_sequence, self.rank)

            def fail(*_, where=where):
                if (where == "backward") == (Log.half() == "backward"):
                    raise KeyError(where)

            module = model.layers[2]
            hook = module.register_forward_hook(fail) if where == "forward" else None
            if hook is None:
                hook = module.register_full_backward_pre_hook(fail)
            try:
                train(model, keeper, overlap, self.rank)
            except KeyError as error:
                found[where] = str(error)
            hook.remove()
            found[where, "threads"] = [t.name for t in pairs.threading.enumerate() if "pagestash" in t.name]
            found[where, "again"] = train(model, keeper, overlap, self.rank), wanted
        return found

    def halves(self):
        """Three parts of a batch, beside the same ones after each other."""
        tokens = torch.randint(64, (6, LENGTH + 1), generator=torch.Generator().manual_seed(self.rank))
        found = []
        for own in (False, True):
            model = make_model(self.rank, self.world, "padded")

            def loss_of(inputs, labels, model=model):
                return sum(model(inputs, labels))

            if own:
                total = step_in_halves(loss_of, tokens[:, :-1], tokens[:, 1:], parts=3)
            else:
                total = 0
                for part in tokens.chunk(3):
                    loss = loss_of(part[:, :-1], part[:, 1:]) / 3
                    loss.backward()
                    total = total + loss.detach()
            found.append([total, *(p.grad for p in model.parameters())])
        return found

    def overflowed(self):
        """Rank 1 alone has more rows for another than there is room, in the forward of a pair; all repeat it."""
        config = MoEConfig(width=32, expert_width=16, experts=8, top_k=2)
        torch.manual_seed(self.rank)
        layer = MoE(config, dispatch=AllToAll(config, max_tokens=16, pair_capacity=32 // self.world + 2))
        x = torch.randn(16, 32)
        ids = torch.arange(32).view(16, 2) % 8
        if self.rank == 1:
            ids = torch.tensor([[0, 1]]).expand(16, 2)
        ids = ids.to(torch.int32)

        def step(pair):
            layer.zero_grad()
            first, _ = layer(torch.ones(4, 32) * 0.1)
            y, _ = pair(lambda: layer.experts(x, torch.ones(16, 2), ids), first.sum().backward)
            y.sum().backward()
            over = layer.over_capacity.clone()
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            return (
                float(layer.over_capacity),
                float(over),
                [y.detach(), *(p.grad for p in layer.parameters())],
            )

        mine, all_of_them, _ = step(overlap)
        grew = layer.grow_capacity()
        layer.clear_over_capacity()
        _, again, results = step(overlap)
        return mine, all_of_them, grew, again, results, step(in_sequence)[2]


def work(rank, world, cases, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=20),
    )
    me, found = Rank(rank, world), {}
    with filled_with_nan():
        for case in cases:
            found[case] = me.bits(*case)
        for name in OTHERS:
            found[name] = getattr(me, name)()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


RANKS = [
    pytest.param((2, FEW), id="2 ranks, few"),
    pytest.param((2, CASES), id="2 ranks", marks=pytest.mark.slow),
    pytest.param((4, CASES), id="4 ranks", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, tmp_path_factory):
    (world, cases), folder = request.param, tmp_path_factory.mktemp("ranks")
    start_ranks(work, (world, cases, str(folder)), world)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def test_the_bits_are_those_of_one_after_the_other(ranks):
    for rank in ranks:
        for case in [*(each for each in CASES if each in rank), "retained", "checkpointed", "halves"]:
            plain, overlapped = rank[case]
            assert all(each.isfinite().all() for each in plain), case
            assert same(overlapped, plain), case


def test_exchanges_of_one_half_are_under_way_while_the_other_starts_its_own(ranks):
    for rank in ranks:
        count, covered, halves = rank["interleaved"]
        # Two pairs of two layers; in each half three collectives, two of which go to the experts.
        assert count == 2 * 2 * 2 * 3
        # All but those of a half that is alone: at the end of a pair the other is over.
        assert count - covered <= 2 * 2
        assert halves == ranks[0]["interleaved"][2]  # in the same order on all ranks


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_one_half_ends_both_and_nothing_is_left_open(ranks, where):
    for rank in ranks:
        assert rank["errors"][where] == f"'{where}'"
        assert rank["errors"][where, "threads"] == ["pagestash-backward_0"]  # which waits for the next pair
        assert same(*rank["errors"][where, "again"])


def test_an_overflow_of_one_rank_in_a_pair_is_repeated_by_all(ranks):
    for number, rank in enumerate(ranks):
        mine, everywhere, grew, again, results, plain = rank["overflowed"]
        assert (mine, everywhere) == (float(number == 1), 1.0)
        assert grew
        assert again == 0.0
        assert same(results, plain)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="parts=2"):
        step_in_halves(torch.sum, torch.ones(1, 4))


def test_a_pair_inside_a_pair_is_refused():
    with pytest.raises(RuntimeError, match="inside of one half"):
        overlap(lambda: overlap(int, int), int)


def test_halves_without_exchanges_run_one_after_the_other():
    order = []
    assert overlap(lambda: order.append("forward") or 1, lambda: order.append("backward") or 2) == (1, 2)
    assert order == ["backward", "forward"]
