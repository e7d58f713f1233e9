"""Valid rows: what a mark says is cut, what inherits it, and what is kept whole."""

from contextlib import nullcontext

import pytest
import torch
from rows_fuzz import outcome
from support import same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.moe import MoE, MoEConfig

ROWS, WIDTH, COUNT = 16, 8, 5
VALID = (torch.arange(ROWS) < COUNT)[:, None]


class Net(nn.Module):
    """A layer whose saved tensors are kept, then one under the rule that does `work` with its result."""

    def __init__(self, work, inner: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = Part(work, inner)

    def forward(self, x, n):
        return self.part(self.first(x), n)


class Part(nn.Module):
    def __init__(self, work, inner: int) -> None:
        super().__init__()
        self.work = work
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.table = nn.Parameter(torch.rand(ROWS, WIDTH))

    def forward(self, x, n):
        return self.work(self, x, n)


def rule(home: str) -> ps.Policy:
    return ps.Policy([ps.Rule("part", home, min_bytes=0)], ps.PoolConfig(page=64, device=1 << 18))


def step(net: nn.Module, keeper: ps.Keeper | None = None, amp: bool = False, x=None):
    """Gradients of one step, and the bytes that were stashed when forward was over."""
    net.zero_grad()
    if x is None:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with (
        keeper.step() if keeper else nullcontext(),
        torch.autocast("cpu", torch.bfloat16, enabled=amp),
    ):
        loss = net(x, torch.tensor(COUNT))
        held = keeper.stats().homes["stash"].bytes if keeper else 0
        loss.backward()
    return [p.grad for p in net.parameters()], held


def stashed(work, *, inner: int = 12, amp: bool = False, **keeper) -> int:
    """Bytes stashed by `work`, whose gradients are those without a keeper, also offloaded."""
    torch.manual_seed(0)
    net = Net(work, inner)
    plain, _ = step(net, amp=amp)
    for home in ("offload", "stash"):
        watching = ps.Keeper(rule(home), backend="torch", **keeper).attach(net)
        for _ in range(2):
            found, held = step(net, watching, amp)
            assert same(found, plain), home
        watching.detach()
    return held


def floats(rows: int, width: int) -> int:
    return rows * width * 4


# --- what inherits a mark ---


def gated(part, x, n):
    x = ps.rows(x, n)
    gate, value = part.up(x).chunk(2, dim=-1)
    return (F.silu(gate) * value)[:COUNT].square().sum()


def test_only_valid_rows_of_marked_buffers_are_stashed():
    # The input, the first projection, and the activation; of the rows that are summed, the square saves its own.
    assert stashed(gated) == floats(COUNT, WIDTH + 12 + 6 + 6)


@pytest.mark.parametrize(
    "made",
    [
        lambda part, x, n: F.rms_norm(x, (WIDTH,), part.scale),
        lambda part, x, n: F.layer_norm(x, (WIDTH,), part.scale),
        lambda part, x, n: x * part.scale + 1,
        lambda part, x, n: torch.cat([x, x.tanh()], dim=-1),
        lambda part, x, n: x.softmax(-1),
        lambda part, x, n: x.t().sigmoid().t(),
        lambda part, x, n: x[None].exp()[0],
        lambda part, x, n: x.bfloat16(),
        lambda part, x, n: x * ps.rows(x.mean(-1, keepdim=True).flip(0), n),
        lambda part, x, n: (x * 2).add_(1),
    ],
)
def test_what_is_computed_row_by_row_inherits_the_mark(made):
    def work(part, x, n):
        return F.silu(made(part, ps.rows(x, n), n))[:COUNT].float().square().sum()

    whole = stashed(lambda part, x, n: F.silu(made(part, x, n))[:COUNT].float().square().sum())
    assert stashed(work) <= whole - 2 * (ROWS - COUNT) * WIDTH


# --- what does not ---


@pytest.mark.parametrize(
    "made",
    [
        lambda x, n: torch.where(VALID, x, 0.0),
        lambda x, n: x * VALID,
        lambda x, n: x.masked_fill(~VALID, 0.0),
        lambda x, n: x * 0.0,
    ],
)
def test_rows_that_were_masked_are_no_garbage_and_are_kept(made):
    """What is computed from zeros counts, here for the gradient of `scale`."""

    def work(part, x, n):
        y = made(ps.rows(x, n), n) + part.scale
        return (y * y).sum()

    assert stashed(work) >= floats(ROWS, WIDTH)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, part: (x[:COUNT].cumsum(0) * part.table[:COUNT]).sum(),
        lambda x, part: (torch.where(VALID, x, 0.0).flip(0) * part.table).sum(),
        lambda x, part: (x[torch.arange(ROWS) % COUNT] * part.table).sum(),
        lambda x, part: (torch.where(VALID, x, 0.0).sort(0)[0] * part.table).sum(),
        lambda x, part: torch.cat([torch.where(VALID, x, 0.0), part.table]).square().sum(),
        lambda x, part: (torch.where(VALID, x, 0.0).t() @ part.table).square().sum(),
        lambda x, part: torch.where(VALID, x.abs() + 1, 1.0).log().sum(),
        lambda x, part: (part.table / (x.abs() + 1))[:COUNT].sum(),
        lambda x, part: (x.abs() + 1).log()[:COUNT].sum() + (x.abs() + 1).sqrt()[:COUNT].sum(),
        lambda x, part: ((x.abs() + 1) ** -0.5)[:COUNT].sum(),
    ],
)
def test_operations_that_are_not_row_by_row_have_what_they_need(read):
    stashed(lambda part, x, n: read(ps.rows(x, n) * 1.0, part))


class Outside(torch.autograd.Function):
    """Its backward reads all rows of what it saved; with `n`, it says that it does not."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x if n is None else ps.rows(x, n))
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x + (0 if ctx.needs_input_grad[1] else torch.where(VALID, 0.0, x).sum()), None


def test_a_custom_function_has_all_rows_unless_its_forward_says_otherwise():
    def whole(part, x, n):
        return Outside.apply(ps.rows(x, n), None)[:COUNT].sum()

    assert stashed(whole) == floats(ROWS, WIDTH)

    class Said(Outside):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 * x, None

    assert stashed(lambda part, x, n: Said.apply(x * 1.0, n)[:COUNT].sum()) == floats(COUNT, WIDTH)

    # The word of one function is not that of another.
    def both(part, x, n):
        y = x * 1.0
        return Said.apply(y, n)[:COUNT].sum() + Outside.apply(y, None)[:COUNT].sum()

    assert stashed(both) >= floats(ROWS, WIDTH)


class Apart(Outside):
    """Saves in `setup_context`, which runs after forward."""

    @staticmethod
    def forward(x, n):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, n = inputs
        ctx.save_for_backward(x if n is None else ps.rows(x, n))


class Unseen(torch.autograd.Function):
    """Runs no operation in forward, and reads all rows of its input in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad + torch.where(VALID, 0.0, x.isnan().float())


class Result(torch.autograd.Function):
    """Saves what its forward's last operation made, and reads all of it."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y) + torch.where(VALID, 0.0, y).sum()


FUNCTIONS = {
    "its input": lambda x: Outside.apply(x, None),
    "its input, apart from forward": lambda x: Apart.apply(x, None),
    "its result": Result.apply,
    "an input that it hands on": lambda x: Unseen.apply(x * 1.0),
}


@pytest.mark.parametrize("saves", FUNCTIONS)
@pytest.mark.parametrize(
    "read",
    [
        lambda x, y: y[:COUNT].sum(),
        lambda x, y: (x.tanh() + y)[:COUNT].sum(),  # the next operation takes the same tensor in
        lambda x, y: (x.detach() * 2 + y)[:COUNT].sum(),  # and has no node
        lambda x, y: (y * 2 + y.detach())[:COUNT].sum(),
    ],
)
def test_no_operation_is_taken_for_a_custom_function(saves, read):
    def work(part, x, n):
        x = ps.rows(x, n) * 1.0
        return read(x, FUNCTIONS[saves](x))

    assert stashed(work) >= floats(ROWS, WIDTH)


def test_functions_and_operations_in_turn_each_have_what_they_need():
    class Masked(Outside):
        """As it is promised, with no gradient past the valid rows."""

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return torch.where(VALID, grad * 2 * x + torch.where(VALID, 0.0, x).sum(), 0.0), None

    def work(part, x, n):
        y = ps.rows(x, n) * 1.0
        for apply in (torch.tanh, lambda y: Masked.apply(y, None), torch.tanh, torch.sigmoid):
            y = apply(y)
        return y[:COUNT].sum()

    # What the first tanh saves is the function's input, too.
    assert stashed(work) == floats(ROWS + 2 * COUNT, WIDTH)


def test_a_function_that_saves_apart_from_forward_may_mark_there():
    class Said(Apart):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 * x, None

    assert stashed(lambda part, x, n: Said.apply(x * 1.0, n)[:COUNT].sum()) == floats(COUNT, WIDTH)


class Within(Outside):
    """Applies a function that marks what this one saves, and reads all of it."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x)
        return Outside.apply(x, n)


def checkpointed(x, n):
    def segment(x, n):
        return x[COUNT:].square().sum() * 1.0 + Outside.apply(x, n).sum()

    return checkpoint(segment, x, n, use_reentrant=True)


@pytest.mark.parametrize(
    ("applies", "node"), [(Within.apply, "Within"), (checkpointed, "CheckpointFunction")]
)
@pytest.mark.parametrize("home", ["stash", "offload"])
def test_a_function_is_refused_what_one_that_it_applies_has_marked(applies, node, home):
    torch.manual_seed(0)
    net = Net(lambda part, x, n: applies(x * 1.0, n).sum())
    keeper = ps.Keeper(rule(home), backend="torch").attach(net)
    with pytest.raises(RuntimeError, match=rf"{node}Backward saved a tensor .* applies no other"):
        step(net, keeper)


def test_a_function_that_makes_a_graph_inside_is_refused_where_it_saves_a_result_of_it():
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                y = torch.tanh(x.detach().requires_grad_())
            ctx.save_for_backward(y)
            return y.detach()

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * (1 - y * y) + torch.where(VALID, 0.0, y).sum()

    torch.manual_seed(0)
    net = Net(lambda part, x, n: Inside.apply(ps.rows(x, n) * 1.0)[:COUNT].sum())
    keeper = ps.Keeper(rule("stash"), backend="torch").attach(net)
    with pytest.raises(RuntimeError, match=r"InsideBackward saved a tensor .* not known to read row by row"):
        step(net, keeper)


def test_integers_are_never_cut():
    def work(part, x, n):
        index = torch.arange(ROWS).flip(0)
        ps.rows(index, n)
        return (ps.rows(x, n)[index] * part.table)[-COUNT:].sum()

    stashed(work)


def test_a_buffer_changed_after_it_was_marked_is_whole():
    def work(part, x, n):
        y = ps.rows(x * 1.0, n)
        y.sub_(0.5)
        return (y * y).sum()

    assert stashed(work) >= floats(ROWS, WIDTH)


# --- where the rows stand ---


def test_square_buffers_are_cut_by_their_rows_and_not_by_their_columns():
    def work(part, x, n):
        h = F.silu(part.up(ps.rows(x, n)))  # [ROWS, ROWS]
        mixed = (h[:COUNT] @ torch.where(VALID, h, 0.0)).sum()
        return mixed + (h.t() * 1.5).tanh().t()[:COUNT].sum() + part.down(h)[:COUNT].square().sum()

    stashed(work, inner=ROWS)


def test_a_mark_made_outside_holds_for_the_buffer_and_not_for_what_follows():
    class Wide(Net):
        def forward(self, x, n):
            y = ps.rows(self.first(x), n)
            return self.part(y * 1.0, n) + self.part(y, n)

    torch.manual_seed(0)
    net = Wide(lambda part, x, n: part.up(x)[:COUNT].square().sum())
    plain, _ = step(net)
    keeper = ps.Keeper(rule("stash"), backend="torch").attach(net)
    found, held = step(net, keeper)
    assert same(found, plain)
    assert held == floats(ROWS + COUNT, WIDTH) + 2 * floats(COUNT, 12)


def test_buffers_of_one_region_have_row_counts_of_their_own():
    def work(part, x, n):
        other = n - 2
        a, b = ps.rows(x * 1.0, n), ps.rows(x * 2.0, other)
        return a.exp()[:COUNT].sum() + b.exp()[: COUNT - 2].sum() + x.tanh().square().sum()

    # Of the exponentials their valid rows; what tanh made is unmarked and whole.
    assert stashed(work) == floats(COUNT, WIDTH) + floats(COUNT - 2, WIDTH) + floats(ROWS, WIDTH)


# --- the fused experts ---


@pytest.mark.parametrize("home", ["keep", "stash", "offload", "recompute"])
def test_tokens_are_not_taken_for_rows_where_each_has_one_expert(home):
    def run(policy):
        torch.manual_seed(0)
        moe = MoE(MoEConfig(width=WIDTH, expert_width=4, experts=2, top_k=1))
        model = nn.ModuleDict({"moe": moe})
        keeper = None if policy is None else ps.Keeper(policy, backend="torch").attach(model)
        found = []
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(8, WIDTH, generator=generator).requires_grad_()
            weights = torch.rand(8, 1, generator=generator)
            ids = torch.tensor([-1, -1, -1, 0, 1, 0, -1, 1])[:, None]  # valid tokens are not the first
            moe.zero_grad()
            with keeper.step() if keeper else nullcontext():
                moe.experts(x * 1.0, weights, ids).sum().backward()
            found += [x.grad, moe.expert_fc1.weight.grad]
        return found

    policy = ps.Policy([ps.Rule("moe.experts", home, min_bytes=0)], ps.PoolConfig(page=64))
    assert same(run(policy), run(None))


# --- the check ---


@pytest.mark.parametrize(
    "read",
    [
        lambda part, y: part.up(y).square().sum(),
        lambda part, y: F.silu(y).sum(),
        lambda part, y: (y * part.scale).sum(),
        lambda part, y: F.layer_norm(y, (WIDTH,), part.scale).square().sum(),
        lambda part, y: F.silu(y).flip(0)[:COUNT].sum(),
        lambda part, y: F.silu(y).cumsum(0)[-1].sum(),
    ],
)
@pytest.mark.parametrize("home", ["stash", "offload"])
def test_a_gradient_that_reaches_dropped_rows_is_refused_by_name(read, home):
    net = Net(lambda part, x, n: read(part, ps.rows(x, n)))
    keeper = ps.Keeper(rule(home), backend="torch").attach(net)
    with pytest.raises(RuntimeError, match=r"\w+Backward0 saved .* in region 'part' without rows 5 to 15"):
        step(net, keeper)


def test_the_check_is_made_in_the_first_step_in_every_step_or_never():
    reads = []

    def work(part, x, n):
        y = F.silu(ps.rows(x, n))
        return y.sum() if reads else y[:COUNT].sum()

    for check, later in ((None, True), (True, False), (False, True)):
        reads.clear()
        net = Net(work)
        keeper = ps.Keeper(rule("stash"), backend="torch", check=check).attach(net)
        if check is False:
            reads.append(True)
        step(net, keeper)
        reads.append(True)
        with nullcontext() if later else pytest.raises(RuntimeError, match="valid ones were read"):
            step(net, keeper)


def test_garbage_that_a_grouped_product_leaves_in_gradients_is_not_taken_for_a_read():
    offsets = torch.tensor([2, COUNT], dtype=torch.int32)

    def work(part, x, n):
        weights = torch.stack([part.table, part.table * 2]).view(2, WIDTH, ROWS).bfloat16()
        h = F.grouped_mm(ps.rows(torch.where(VALID, x, 0.0), n).bfloat16(), weights, offs=offsets)
        a = F.silu(h) * h
        return (
            F.grouped_mm(a, weights.transpose(1, 2).contiguous(), offs=offsets)[:COUNT].float().square().sum()
        )

    assert stashed(work, check=True) < 2 * COUNT * (
        WIDTH + 3 * ROWS
    ) + 2 * 2 * ROWS * WIDTH * 2 + 256 + floats(COUNT, WIDTH)


# --- living with others ---


def test_marks_inside_checkpoints_and_other_modes():
    from torch.utils.flop_counter import FlopCounterMode

    def work(part, x, n):
        with FlopCounterMode(display=False):
            y = ps.rows(x, n)  # a mode of the caller's that ends before the region: nothing is handed on
            h = part.up(y)
        h = h + checkpoint(part.up, ps.rows(x, n), use_reentrant=False)
        return F.silu(h)[:COUNT].sum()

    before = torch._C._len_torch_dispatch_stack()
    stashed(work)
    assert torch._C._len_torch_dispatch_stack() == before


def test_an_exception_leaves_no_mode_behind():
    def work(part, x, n):
        F.silu(ps.rows(x, n))
        raise ZeroDivisionError

    net = Net(work)
    keeper = ps.Keeper(rule("stash"), backend="torch").attach(net)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            step(net, keeper)
        assert torch._C._len_torch_dispatch_stack() == 0


def test_a_compiled_part_is_one_unknown_operation():
    torch.manual_seed(0)
    net = Net(lambda part, x, n: part.act(part.up(ps.rows(x, n)))[:COUNT].sum())
    plain_act = lambda h: F.silu(h).square()  # noqa: E731
    net.part.act = plain_act
    plain, _ = step(net)
    net.part.act = torch.compile(plain_act, backend="aot_eager")
    keeper = ps.Keeper(rule("stash"), backend="torch").attach(net)
    for _ in range(2):
        found, _ = step(net, keeper)
        assert same(found, plain)


def test_rows_outside_a_step_changes_nothing_and_checks_its_arguments():
    x = torch.randn(4, 2)
    assert ps.rows(x, torch.tensor(2)) is x
    for wrong in (2, torch.tensor([1, 2]), torch.tensor(2.0), torch.tensor(True)):
        with pytest.raises(ValueError, match="expected an integer tensor on the device"):
            ps.rows(x, wrong)
    with pytest.raises(ValueError, match="no rows"):
        ps.rows(torch.tensor(1.0), torch.tensor(1))


@pytest.mark.parametrize("home", ["stash", "offload"])
@pytest.mark.filterwarnings("ignore:ps.region")
def test_random_graphs_give_the_same_gradients_or_are_refused(home):
    found = {seed: outcome(seed, home) for seed in range(24)}
    assert set(found.values()) == {"equal", "refused"}, found
