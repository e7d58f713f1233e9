"""Schedules whose pairs are overlapped: plans that every rank can run, and the bits of those without overlap."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import same
from torch.distributed.pipelining import PipelineStage

sys.path.insert(0, str(Path(__file__).parent))
from gloo import RUN_HERE, make_schedule, spawn, stages_of

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.moe import AllToAll
from pagestash.moe.parallel import overlap as pairs
from pagestash.pipeline import in_flight, plans, read_plan
from pagestash.pipeline.overlapped import OVERLAPPED, overlapped_schedule
from pagestash.pipeline.split_backward import delay_weight_gradients
from pagestash.schedules.plan import orders_of_pairs

PIPELINE = 2
ROWS, LENGTH = 2, 8
CONFIG = preset(
    "tiny", layers=4, vocab=64, width=32, heads=2, kv_heads=1, dense_layers=1, dense_width=32, expert_width=16
)
LAYERS = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
CUTS = {2: [0, 3, 6], 4: [0, 2, 3, 4, 6]}
POLICIES = {
    "plain": [],
    "all": [("layers.*.attn", "offload"), ("layers.*.moe.experts", "stash"), ("layers.*.*norm", "recompute")],
}
NAMES = [name for name in OVERLAPPED if name in RUN_HERE]


# --- plans ---


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_1f1b_begins_as_many_forwards_as_let_every_rank_run_a_pair_at_a_time(ranks, times):
    """Ticks of a pair each: nobody waits between the first pair and the last."""
    orders = orders_of_pairs("1F1B", ranks, times * ranks, 1)
    done, at = {}, [0] * ranks
    idle = [0] * ranks
    while any(place < len(order) for place, order in zip(at, orders)):
        now = []
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            needs = [("F", rank - 1, a.microbatch) for a in order[at[rank]] if a.kind == "F" and rank] + [
                ("B", rank + 1, a.microbatch) for a in order[at[rank]] if a.kind == "B" and rank < ranks - 1
            ]
            if all(each in done for each in needs):
                now.append(rank)
            elif any(len(each) == 2 for each in order[: at[rank]]) and any(
                len(each) == 2 for each in order[at[rank] :]
            ):
                idle[rank] += 1
        assert now, "every rank waits for another"
        for rank in now:
            done |= dict.fromkeys((a.kind, a.stage, a.microbatch) for a in orders[rank][at[rank]])
            at[rank] += 1
    assert idle == [0] * ranks


@pytest.mark.parametrize("name", OVERLAPPED)
def test_the_plan_without_a_process_group_says_what_is_held(name):
    for plan, plain in zip(
        plans(name, ranks=4, microbatches=16, overlap=True), plans(name, ranks=4, microbatches=16)
    ):
        assert sorted(plan.actions) == sorted(plain.actions)
        for stage, most in in_flight(plan).items():
            more = in_flight(plain)[stage]
            assert most == (more if name == "DualPipeV" else most) >= more
    if name == "1F1B":
        # One more than are begun before the first pair, which holds its forward beside its backward.
        found = [
            in_flight(plan)[rank]
            for rank, plan in enumerate(plans(name, ranks=4, microbatches=16, overlap=True))
        ]
        assert found == [8, 6, 4, 2]


def test_a_schedule_without_pairs_is_refused():
    with pytest.raises(ValueError, match="GPipe has no pairs"):
        overlapped_schedule("GPipe", [], 4, loss_fn=None)


# --- runs ---


def groups(rank, world):
    """The group of this rank's pipeline, and that of the ranks which share its experts."""
    sharing = world // PIPELINE
    found = []
    for members in [[p * sharing + e for p in range(PIPELINE)] for e in range(sharing)] + [
        [p * sharing + e for e in range(sharing)] for p in range(PIPELINE)
    ]:
        group = dist.new_group(members)
        if rank in members:
            found.append(group)
    return found


def run(name, rank, world, pipeline, experts, policy, *, overlapped, microbatches=6):
    sharing = world // PIPELINE
    numbers = stages_of(name, rank // sharing, PIPELINE)
    total = PIPELINE * len(numbers)

    def example(stage):
        if stage == 0:
            return torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
        shape = () if stage == total else (ROWS, LENGTH, CONFIG.width)
        return torch.empty(shape, device="meta", requires_grad=True)

    models, stages = [], []
    for number in numbers:
        part = LAYERS[CUTS[total][number] : CUTS[total][number + 1]]
        model = Decoder(
            CONFIG,
            part=part,
            make_dispatch=lambda config: AllToAll(config, experts, max_tokens=ROWS * LENGTH),
        )
        model.initialise(0, (rank % sharing) * CONFIG.experts // sharing)
        models.append(model)
        stages.append(
            PipelineStage(
                model,
                number,
                total,
                torch.device("cpu"),
                example(number),
                example(number + 1),
                group=pipeline,
            )
        )

    def loss(output, target):
        return output

    make = overlapped_schedule if overlapped else make_schedule
    schedule = make(name, stages, microbatches, loss)
    rules = [ps.Rule(*rule, min_bytes=0) for rule in POLICIES[policy]]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256)))
    others = [name for name, _ in Decoder(CONFIG, device="meta").named_modules()]
    for model in models:
        keeper.attach(model, others=others)
    keeper.follow(schedule)
    delay_weight_gradients(schedule)
    losses = []
    for step in range(2):
        for model in models:
            model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank % sharing)
        tokens = torch.randint(64, (microbatches * ROWS, LENGTH + 1), generator=generator)
        ends = {}
        if numbers[-1] == total - 1 or (0 in numbers and total - 1 in numbers):
            ends = {"target": tokens[:, 1:], "labels": tokens[:, 1:].contiguous(), "losses": losses}
        first = (tokens[:, :-1].contiguous(),) if 0 in numbers else ()
        with keeper.step():
            schedule.step(*first, return_outputs=False, **ends)
    gradients = [p.grad for model in models for p in model.parameters()]
    return [each.detach() for each in losses] + gradients, str(read_plan(schedule))


def work(rank, world, few):
    pipeline, experts = groups(rank, world)
    found, ran = {}, []
    inner = pairs.overlap

    def counted(*halves):
        ran.append(1)
        return inner(*halves)

    sys.modules["pagestash.pipeline.overlapped"].overlap = counted
    for name in NAMES:
        for policy in POLICIES if not few else ["plain"] if name == "1F1B" else ["all"]:
            plain, _ = run(name, rank, world, pipeline, experts, policy, overlapped=False)
            ran.clear()
            ours, plan = run(name, rank, world, pipeline, experts, policy, overlapped=True)
            found[name, policy] = plain, ours, plan, len(ran)
    return found


RANKS = [
    pytest.param((2, True), id="2 ranks, few"),
    pytest.param((2, False), id="2 ranks", marks=pytest.mark.slow),
    pytest.param((4, False), id="4 ranks", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RANKS)
def ranks(request):
    world, few = request.param
    return spawn(work, world, few)


def test_the_bits_are_those_of_the_schedule_without_overlap(ranks):
    for rank in ranks:
        assert {name for name, _ in rank} == set(NAMES)
        for case, (plain, ours, _, count) in rank.items():
            assert count > 0, case
            assert all(each is None or each.isfinite().all() for each in plain), case
            assert same(ours, plain), case


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_is_what_the_plan_says(ranks, name):
    sharing = len(ranks) // PIPELINE
    wanted = plans(name, ranks=PIPELINE, microbatches=6, overlap=True)
    for number, rank in enumerate(ranks):
        planned = [plan for (at, _), (_, _, plan, _) in rank.items() if at == name]
        assert set(planned) == {str(wanted[number // sharing])}
