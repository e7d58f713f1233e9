"""Expert parallelism of transformers over 2 and 4 processes gives, with our experts, what one process gives.

Each rank runs every case, and writes down what it got; the tests compare. transformers up to 5.18 has no dispatch,
only ids that mark the experts of other ranks (`marked`), which later ones have under another plan.
"""

import copy
import os
import sys
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", minversion="5.17")

from support import error, same  # noqa: E402
from support.processes import start_ranks  # noqa: E402
from support.tiers import slow  # noqa: E402
from support.uninitialised import filled_with_nan  # noqa: E402
from tiny import batch, tiny  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402
from pagestash.integrations.hf import experts as ours  # noqa: E402
from pagestash.integrations.hf.expert_parallel import (  # noqa: E402
    STYLE,
    DispatchedForward,
    DispatchStyle,
    _styles,
    register,
)
from pagestash.moe import overlap  # noqa: E402

VERSION = tuple(int(part) for part in version("transformers").split(".")[:2])
DISPATCHES = VERSION >= (5, 19)
dispatched = pytest.mark.skipif(not DISPATCHES, reason="transformers dispatches tokens from 5.19 on")
MODELS = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.gpt_oss.modeling_gpt_oss")
FAMILY, EXPERTS, CHOICES, WIDTH, INNER = "Qwen3-MoE", 8, 2, 32, 16
BATCH = {"tokens": 11, "sequences": 2}
TOKENS = 22
MARKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}

# The room of a padded dispatch; None: an exact one.
CASES = {
    "exact": None,
    "padded": {"max_tokens": TOKENS},
    "expected": {"max_tokens": TOKENS, "expected_rows": 5},
    "one_rank": {"max_tokens": TOKENS},
    "one_rank_exact": None,
}
POLICIES = {
    "stashed": [("model.layers.*.mlp.experts", "stash")],
    "parts": [("**.moe_act", "recompute"), ("**.expert_fc1", "stash")],
    "layers": [("model.layers.*", "recompute")],
}


def reference():
    return tiny(FAMILY, experts="eager", num_experts=EXPERTS, num_key_value_heads=4)


def choose_first(model):
    """Let every token choose the experts 0 and 1, with the weights of those that it would have chosen."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _, __, output: (*output[:2], torch.arange(CHOICES).expand_as(output[2]))
        )


def batch_of(rank):
    """The batch of a rank where each has its own: of different lengths."""
    torch.manual_seed(100 + rank)
    ids = torch.randint(3, 96, (2, 11 - 2 * rank))
    return {"input_ids": ids, "labels": ids.clone()}


def run(model, given):
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def whole(found):
    """With the gradients of divided parameters put together from all ranks."""
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in found.items()}


def local(found):
    return {name: getattr(value, "_local_tensor", value).clone() for name, value in found.items()}


# --- in the processes ---------------------------------------------------------------------------------------


class Rank:
    """One process's part of every case, in a world of some size."""

    def __init__(self, rank, world, folder):
        self.rank, self.world, self.folder = rank, world, folder

    def load(self, degrees, implementation="pagestash", *, kind=None, folder=None):
        """A model, divided as `degrees` says, and this rank's batch."""
        from transformers.distributed import DistributedConfig

        if degrees == "own":
            ranks = {"fsdp_size": self.world, "ep_size": self.world}
        elif VERSION >= (5, 23):
            # A plan without any rule is refused; this one adds a rule that does nothing to the model's own.
            ranks = {"tp_size": self.world, "ep_size": self.world, "tp_plan": {"model.norm": "replicate"}}
            ranks |= {"ep_implementation": "all_reduce"} if degrees == "marked" else {}
        elif degrees == "shared" or DISPATCHES:
            ranks = {"tp_size": self.world, "ep_size": self.world, "tp_plan": {}}
            ranks |= {"ep_plan": MARKED} if degrees == "marked" else {}
        else:
            ranks = {"tp_size": self.world, "enable_expert_parallel": True}
        model = (
            (kind or transformers.Qwen3MoeForCausalLM)
            .from_pretrained(
                folder or self.folder,
                experts_implementation=implementation,
                attn_implementation="eager",
                dtype=torch.float32,
                distributed_config=DistributedConfig(**ranks),
            )
            .train()
        )
        return model, batch_of(self.rank) if degrees == "own" else batch(**BATCH)

    def case(self, name):
        model, given = self.load("shared")
        if name.startswith("one_rank"):
            choose_first(model)
        if CASES[name] is not None:
            report = pagestash.hf.expert_parallel(model, **CASES[name])
            assert [each.by for each in report.replaced] == ["a padded all-to-all"] * 2
        report = pagestash.hf.optimize(model)
        assert [each.part for each in report.replaced].count("experts") == 2
        run(model, given)
        return whole(run(model, given)) | {"rows": self.rows(model)}

    def own(self, room):
        """A batch for each rank, and parameters sharded by FSDP."""
        model, given = self.load("own", "grouped_mm" if room == "transformers" else "pagestash")
        if room == "padded":
            pagestash.hf.expert_parallel(model, max_tokens=TOKENS)
        if room != "transformers":
            report = pagestash.hf.optimize(model)
            assert Counter(each.part for each in report.replaced)["norm"] == 9
        return whole(run(model, given))

    def biases(self):
        """gpt-oss: gates and linear parts in turns, transposed weights, biases."""
        model, given = self.load(
            "shared", kind=transformers.GptOssForCausalLM, folder=f"{self.folder}/gpt-oss"
        )
        pagestash.hf.expert_parallel(model, max_tokens=TOKENS)
        return whole(run(model, given))

    def rows(self, model):
        """What the first layer's experts got in a gradient of theirs: whether there were any rows."""
        gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
        return gradient._local_tensor.any()

    def policies(self, room=None):
        """Local gradients without a policy and with each."""
        model, given = self.load("shared")
        if room is not None:
            pagestash.hf.expert_parallel(model, **room)
        pagestash.hf.optimize(model)
        found = {"without": local(run(model, given))}
        for name, rules in POLICIES.items():
            rules = [ps.Rule(*rule, min_bytes=0) for rule in rules]
            keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
            for _ in range(3):
                with keeper.step():
                    found[name] = local(run(model, given))
            found[name + " stats"] = keeper.stats()
            keeper.detach()
        return found

    def in_pairs(self):
        """The backward of one batch and the forward of the next: one after the other, and as a pair."""
        model, given = self.load("shared")
        pagestash.hf.expert_parallel(model, max_tokens=TOKENS)
        pagestash.hf.optimize(model)
        after = {name: ids.flip(1) for name, ids in given.items()}

        def in_turn(forward, backward):
            backward()
            return forward(), None

        found = []
        for run_both in (in_turn, overlap):
            model.zero_grad()
            first = model(**given).loss
            second, _ = run_both(lambda: model(**after).loss, first.backward)
            second.backward()
            found.append(local({"loss": second.detach()} | {n: p.grad for n, p in model.named_parameters()}))
        return found

    def refused(self):
        model, _ = self.load("shared")
        pagestash.hf.optimize(model)
        rules = [ps.Rule("**.expert_fc1", "recompute", min_bytes=0)]
        with pytest.raises(ValueError, match="its input came from other ranks"):
            ps.Keeper(ps.Policy(rules=rules)).attach(model)
        return True

    def short(self):
        """Everything goes to rank 0, over pairs that have room for 3 rows."""
        model, given = self.load("shared")
        choose_first(model)
        report = pagestash.hf.expert_parallel(model, max_tokens=TOKENS, pair_capacity=3)
        with pytest.raises(pagestash.hf.OverCapacity, match="Run the batch again") as caught:
            run(model, given)
        again = whole(run(model, given))
        found = {"error": str(caught.value), "again": again, "pair": self.pair(model)}
        report.undo()
        assert not any(name.endswith("over_capacity") for name, _ in model.named_buffers())
        return found | {"undone": whole(run(model, given)), "exact": self.pair(model) is None}

    def pair(self, model):
        return model.model.layers[0].mlp.experts.__dict__[ours.HIDDEN].runs.dispatch.pair_capacity

    def steps(self, **room):
        """Two steps of an optimizer in a `GraphedStep`, which runs them eagerly here."""
        model, given = self.load("shared")
        choose_first(model)
        pagestash.hf.expert_parallel(model, max_tokens=TOKENS, **room)
        keeper = ps.Keeper(ps.Policy(rules=[ps.Rule("**.experts", "stash", min_bytes=0)])).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def train_step(input_ids, labels):
            loss = model(input_ids=input_ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ps.GraphedStep(train_step, keeper, optimizer=optimizer)
        losses = [step(**given).clone() for _ in range(2)]
        return {"losses": losses, "weights": local(dict(model.named_parameters())), "reruns": step.reruns}

    def chosen_rows(self):
        """Steps of which a keeper chooses how many rows are expected, and a step of that number given."""
        model, given = self.load("shared")
        run(model, given)  # a call before must not hide from the keeper what comes
        found = {}
        for expected in ("auto", "fixed"):
            rows = found["rows"] if expected == "fixed" else "auto"
            report = pagestash.hf.expert_parallel(model, max_tokens=TOKENS, expected_rows=rows)
            policy = ps.Policy([ps.Rule("**.experts", "stash", min_bytes=0)], ps.PoolConfig(page=256))
            keeper = ps.Keeper(policy).attach(model)
            for _ in range(3):
                with keeper.step():
                    step = run(model, given)
                found.setdefault("first", whole(step))
            found[expected] = local(step)
            chosen = keeper.stats().expected_rows
            if expected == "auto":
                found |= {"last": whole(step), "rows": chosen.rows, "head": chosen.head_bytes}
            else:
                assert chosen is None
            keeper.detach()
            report.undo()
            assert not hasattr(model.model.layers[0].mlp.experts, "received_rows")
        return found

    def other_implementation(self):
        model, given = self.load("shared", "grouped_mm")
        found = whole(run(model, given))
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts.forward, DispatchedForward)
        assert ours.HIDDEN not in experts.__dict__
        left = pagestash.hf.expert_parallel(model, max_tokens=TOKENS).left
        return found | {"left": {each.why for each in left}}

    def without_gradients(self):
        model, given = self.load("shared")
        with torch.no_grad():
            return model(**given).logits

    def marked(self):
        model, given = self.load("marked")
        pagestash.hf.optimize(model)
        return whole(run(model, given))

    def saved(self):
        """Bytes that a layer's experts save, of 256 tokens with 4 choices each among 16 experts."""
        found = {}
        for implementation in ("grouped_mm", "pagestash"):
            model, _ = self.load("marked", implementation, folder=f"{self.folder}/wide")
            experts = model.model.layers[0].mlp.experts
            x, ids, weights, valid = choices_of_tokens(self.rank, self.world)
            if implementation == "pagestash":
                pagestash.hf.optimize(model)
                rules = [ps.Rule("**.moe_act", "stash", min_bytes=0)]
                keeper = ps.Keeper(ps.Policy(rules=rules)).attach(model)
                for _ in range(2):
                    with keeper.step():
                        experts(x, ids, weights).sum().backward()
                found["stash"] = keeper.stats().homes["stash"].peak
            kept = {}  # with a pool, without the bytes in it
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
            ):
                experts(x, ids, weights)
            held = {p._local_tensor.untyped_storage().data_ptr() for p in experts.parameters()}
            held.add(x.untyped_storage().data_ptr())
            found[implementation] = sum(
                t.untyped_storage().nbytes() for at, t in kept.items() if at not in held
            )
        return found | {"valid": valid, "slots": ids.numel()}


WIDE = {
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 48,
}


def choices_of_tokens(rank, world):
    """Tokens, choices and weights as the experts take them, and how many of the choices are this rank's."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, WIDTH, generator=generator).requires_grad_()
    ids = torch.rand(256, 16, generator=generator).argsort(1)[:, :4]
    weights = torch.rand(256, 4, generator=generator)
    here = 16 // world
    mine = ids // here == rank
    if VERSION < (5, 23):
        # The router has marked those of other ranks, by the id that is no expert's and no weight.
        ids, weights = torch.where(mine, ids % here, here), weights.masked_fill(~mine, 0.0)
    return x, ids, weights.requires_grad_(), int(mine.sum())


@contextmanager
def world_of(rank, world, store):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=20),  # only ever waited for in full by ranks that hang
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def work(number, world, folder):
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found = {}
    with world_of(number, world, f"{folder}/store{world}"), filled_with_nan():
        me = Rank(number, world, f"{folder}/model")
        found["marked"] = me.marked()
        if world == 4:
            found["saved"] = me.saved()
        if DISPATCHES:
            for name in CASES:
                found[name] = me.case(name)
            for room in ("exact", "padded", "transformers"):
                found["own", room] = me.own(room)
            found["policies"] = me.policies({"max_tokens": TOKENS})
            found["policies exact"] = me.policies()
            for name in (
                "short",
                "other_implementation",
                "without_gradients",
                "refused",
                "biases",
                "in_pairs",
                "chosen_rows",
            ):
                found[name] = getattr(me, name)()
            found["steps"] = me.steps()
            found["steps short"] = me.steps(pair_capacity=3)
    torch.save(found, f"{folder}/{world}-{number}.pt")


# --- the tests ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    reference().save_pretrained(made / "model")
    tiny(FAMILY, **WIDE).save_pretrained(made / "model" / "wide")
    tiny("gpt-oss").save_pretrained(made / "model" / "gpt-oss")
    return made


@pytest.fixture(scope="module", params=[2, *slow(4)], ids=lambda world: f"{world} ranks")
def ranks(request, folder):
    """What each rank found, in order."""
    world = request.param
    start_ranks(work, (world, str(folder)), world, imports=MODELS)
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]


def alone(name="shared"):
    """What one process with all experts gives."""
    model = reference()
    if name.startswith("one_rank"):
        choose_first(model)
    return run(model, batch(**BATCH))


def check(got, wanted):
    assert wanted.keys() <= got.keys()
    for name in wanted:
        assert error(got[name], wanted[name]) < 2e-6, name


@dispatched
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(ranks, name):
    for rank in ranks:
        check(rank[name], alone(name))


@dispatched
def test_a_pair_of_batches_has_the_bits_of_one_after_the_other(ranks):
    for rank in ranks:
        in_turn, paired = rank["in_pairs"]
        assert same(list(in_turn.values()), list(paired.values()))


@dispatched
@pytest.mark.parametrize("room", ["exact", "padded"])
def test_where_each_rank_has_a_batch_of_its_own_gradients_are_their_mean(ranks, room):
    model = reference()
    found = [run(model, batch_of(rank)) for rank in range(len(ranks))]
    mean = {name: sum(each[name] for each in found) / len(ranks) for name in found[0]}
    for rank, own in zip(ranks, found):
        got, theirs = rank["own", room], rank["own", "transformers"]
        # (How FSDP scales what it has only one copy of, differs between versions of torch.)
        wanted = {name: theirs[name] if ".experts." in name else value for name, value in mean.items()}
        check(got, wanted | {"loss": own["loss"]})
        for name in wanted:
            assert error(got[name] / got[name].norm(), mean[name] / mean[name].norm()) < 2e-6, name


@dispatched
def test_biases_and_gates_in_turns_give_what_one_process_gives(ranks):
    wanted = run(tiny("gpt-oss"), batch(**BATCH))
    for rank in ranks:
        check(rank["biases"], wanted)


def test_marked_choices_of_other_ranks_give_what_one_process_gives(ranks):
    for rank in ranks:
        check(rank["marked"], alone())


@dispatched
def test_one_rank_alone_gets_rows_where_all_tokens_choose_its_experts(ranks):
    """That what the case is for happens in it."""
    for name in ("one_rank", "one_rank_exact"):
        assert [bool(rank[name]["rows"]) for rank in ranks] == [True] + [False] * (len(ranks) - 1)


@dispatched
@pytest.mark.parametrize("kind", ["policies", "policies exact"])
def test_a_policy_changes_no_bit_of_any_rank(ranks, kind):
    for rank in ranks:
        found = rank[kind]
        for name in POLICIES:
            assert same(found[name], found["without"]), name


@dispatched
@pytest.mark.parametrize("kind", ["policies", "policies exact"])
def test_the_valid_rows_of_all_ranks_are_stashed_and_no_weights(ranks, kind):
    """The experts' weights, 48 KiB of all ranks and a layer, would show."""
    world, rows = len(ranks), 2 * TOKENS * CHOICES  # of two layers
    slots = rows if kind == "policies exact" else 2 * world**2 * -(-TOKENS // world) * CHOICES
    bytes_of_rows = rows * (WIDTH + 2 * INNER) * 4
    found = sum(rank[kind]["stashed stats"].homes["stash"].peak for rank in ranks)
    assert bytes_of_rows <= found < bytes_of_rows + 20 * (rows + slots)  # and their indices


@dispatched
def test_a_keeper_chooses_how_many_rows_to_expect_and_they_give_what_one_process_gives(ranks):
    wanted = alone()
    for rank in ranks:
        found = rank["chosen_rows"]
        assert found["rows"] > 0
        assert found["head"] == 2 * found["rows"] * (WIDTH + 2 * INNER) * 4  # of two layers
        assert same(found["auto"], found["fixed"])
        check(found["first"], wanted)
        check(found["last"], wanted)


@dispatched
def test_more_rows_than_a_pair_holds_are_refused_on_all_ranks_and_run_again(ranks):
    wanted = alone("one_rank")
    for rank in ranks:
        found = rank["short"]
        assert "the buffers have grown" in found["error"]
        assert found["pair"] >= -(-TOKENS // len(ranks)) * CHOICES
        check(found["again"], wanted)
        check(found["undone"], wanted)
        assert found["exact"]


@dispatched
def test_a_step_that_had_no_room_is_run_again_as_if_it_had(ranks):
    for rank in ranks:
        short, ample = rank["steps short"], rank["steps"]
        assert ample["reruns"] == 0
        assert short["reruns"] == 1
        assert same(short["losses"], ample["losses"])
        assert same(short["weights"], ample["weights"])
        assert short["losses"][0] != short["losses"][1]


@dispatched
def test_another_implementation_has_transformers_own_dispatch(ranks):
    for rank in ranks:
        found = rank["other_implementation"]
        assert found.pop("left") == {"transformers' own implementation runs its experts"}
        check(found, alone())


@dispatched
def test_without_gradients_the_dispatch_is_transformers_own(ranks):
    wanted = reference()(**batch(**BATCH)).logits
    for rank in ranks:
        assert error(rank["without_gradients"], wanted) < 2e-6


@dispatched
def test_rows_of_other_ranks_cannot_be_recomputed(ranks):
    assert all(rank["refused"] for rank in ranks)


@pytest.mark.parametrize("ranks", slow(4), indirect=True, ids=["4 ranks"])
def test_of_marked_choices_only_those_of_this_rank_are_saved(ranks):
    """Of 1,024 choices about 256 are for a rank. transformers saves buffers for all of them."""
    for rank in ranks:
        found = rank["saved"]
        assert found["slots"] == 1024
        assert 220 < found["valid"] < 300
        row = 2 * WIDE["moe_intermediate_size"] * 4
        assert found["stash"] == found["valid"] * row
        # The rest of what our block saves, besides the tokens: 20 bytes of indices for each choice, and few more.
        assert found["pagestash"] < 21 * found["slots"]
        assert found["grouped_mm"] > 8 * (found["stash"] + found["pagestash"])


# --- the registry, without processes ---


@dispatched
def test_registering_stands_before_transformers_style_once():
    style = _styles()[STYLE]
    assert isinstance(style, DispatchStyle)
    assert not isinstance(style.theirs, DispatchStyle)
    register()
    assert _styles()[STYLE] is style


@pytest.mark.skipif(DISPATCHES, reason="transformers dispatches tokens from 5.19 on")
def test_where_transformers_dispatches_nothing_nothing_is_registered():
    assert STYLE not in _styles()


class OneRank:
    """What stands for a mesh, and for transformers' style, where nothing travels."""

    def size(self):
        return 1

    def get_group(self):
        pytest.fail("asked for the process group")

    def install_forward(self, module, ep_mesh, tp_mesh):
        module.forward = lambda *arguments: "theirs"


def test_an_exchange_of_exact_sizes_is_refused_in_a_capture(monkeypatch):
    model = tiny(FAMILY, experts="pagestash")
    experts = model.model.layers[0].mlp.experts
    one = OneRank()
    DispatchStyle(one).install_forward(experts, one)
    monkeypatch.setattr(sys.modules[DispatchStyle.__module__], "capturing", lambda: True)
    arguments = torch.randn(5, WIDTH), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    with pytest.raises(RuntimeError, match=r"call pagestash.hf.expert_parallel\(model, max_tokens=...\)"):
        experts(*arguments)
    with torch.no_grad():
        assert experts(*arguments) == "theirs"
    assert copy.deepcopy(model).model.layers[0].mlp.experts.forward is experts.forward


def test_a_model_that_is_not_divided_is_refused_by_name():
    with pytest.raises(ValueError, match="no layer of the model sends tokens to other ranks"):
        pagestash.hf.expert_parallel(tiny(FAMILY, experts="pagestash"), max_tokens=8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ({"max_tokens": 8, "pair_capacity": 0}, "pair_capacity=0: expected at least 1"),
        ({"max_tokens": 8, "expected_rows": -1}, "expected_rows=-1: expected 0 or more, or 'auto'"),
        ({"max_tokens": 8, "expected_rows": "all"}, "expected_rows='all': expected 0 or more, or 'auto'"),
    ],
)
def test_rooms_without_room_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        pagestash.hf.expert_parallel(tiny(FAMILY, experts="pagestash"), **options)
