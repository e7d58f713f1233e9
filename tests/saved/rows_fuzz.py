"""Random graphs of row-wise and other operations over marked buffers: gradients with a keeper and without.

`python tests/saved/rows_fuzz.py FIRST LAST` runs the seeds between; `test_rows.py` runs a few.
"""

import random
import sys
import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import pagestash as ps


class Net(nn.Module):
    """A projection, and a body that a rule names. Weights have as many rows as buffers, here and there."""

    def __init__(self, seed: int, rows: int, width: int, *, legal: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed, self.rows, self.width, self.legal = seed, rows, width, legal
        self.inp, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.lin, self.back = nn.Linear(width, rows), nn.Linear(rows, width)
        self.wide = nn.Parameter(torch.randn(width, 2 * width) * 0.3)
        self.table = nn.Parameter(torch.randn(rows, width) * 0.3)
        self.vector, self.bias = (nn.Parameter(torch.randn(width) * 0.3) for _ in range(2))
        self.column = nn.Parameter(torch.randn(rows, 1) * 0.3)
        self.experts = nn.Parameter(torch.randn(2, width, width) * 0.3)
        self.index = torch.randint(0, rows, (rows,))
        self.body = Body()

    def forward(self, x, n):
        return self.body(self, self.inp(x), n)


class Squares(torch.autograd.Function):
    """Reads all rows of what it saved."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return grad * 2 * a + 0.01 * a.sum(0)


class SquaresOfRows(torch.autograd.Function):
    """Says that it reads valid rows alone."""

    @staticmethod
    def forward(ctx, a, n):
        ctx.save_for_backward(ps.rows(a, n))
        return a * a

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0], None


def gated(net, a, b, n):
    u, v = (a @ net.wide).chunk(2, -1)
    return F.silu(u) * v


def in_place(net, a, b, n):
    c = a * 1.0
    c += b
    return c.relu_() * a


def grouped(net, a, b, n):
    if net.width % 8:
        return a
    ends = torch.tensor([int(n) // 2, net.rows], dtype=torch.int32)
    return F.grouped_mm(a.bfloat16().contiguous(), net.experts.bfloat16(), offs=ends).float()


def declared(net, a, b, n):
    return SquaresOfRows.apply(a, n)


# What comes before these is not checked where it only hands rows on: their gradients may be garbage past the valid.
LEAVE_GARBAGE = [declared, grouped]

ROW_BY_ROW = [
    *LEAVE_GARBAGE,
    lambda net, a, b, n: a * b,
    lambda net, a, b, n: F.silu(a),
    lambda net, a, b, n: a @ net.wide[:, : net.width],
    lambda net, a, b, n: net.back(F.gelu(net.lin(a))),
    gated,
    lambda net, a, b, n: net.norm(a),
    lambda net, a, b, n: F.rms_norm(a, (net.width,), net.vector),
    lambda net, a, b, n: torch.tanh(a) / (b.abs() + 1),
    lambda net, a, b, n: a.softmax(-1),
    lambda net, a, b, n: torch.cat([a, b], -1)[:, ::2],
    lambda net, a, b, n: a * net.vector + net.bias,
    lambda net, a, b, n: (a.t() * b.t()).t(),
    lambda net, a, b, n: torch.exp(a.clamp(max=1.0)),
    lambda net, a, b, n: (a * a + 1).log(),
    lambda net, a, b, n: (a * a + 0.5).sqrt(),
    lambda net, a, b, n: (a.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * a,
    lambda net, a, b, n: (a * a + 0.5) ** -0.5,
    lambda net, a, b, n: a.double().sin().float(),
    lambda net, a, b, n: F.dropout(a, 0.2),
    lambda net, a, b, n: a.view(net.rows, 2, -1).transpose(1, 2).reshape(net.rows, -1).relu(),
    in_place,
    lambda net, a, b, n: a[None].mul(net.vector)[0],
    lambda net, a, b, n: a / (1 + b * b),
    lambda net, a, b, n: a.narrow(-1, 0, net.width // 2).repeat_interleave(2, -1),
    lambda net, a, b, n: torch.sigmoid(a) * torch.maximum(a, b),
    lambda net, a, b, n: F.glu(torch.cat([a, b], -1), -1),
    lambda net, a, b, n: F.leaky_relu(a) - F.softplus(b),
    lambda net, a, b, n: a + ps.rows(net.column * 1.0, n) * b,
    lambda net, a, b, n: torch.addmm(net.bias, a, net.wide[:, net.width :]),
    lambda net, a, b, n: torch.matmul(a[None], net.wide[:, ::2])[0].log_softmax(-1),
]


def masked(net, a, n):
    return torch.where((torch.arange(net.rows) < n)[:, None], a, 0.0)


def with_bias(net, a, b, f, n):
    z = a * (torch.arange(net.rows) < n)[:, None] + net.bias
    return (F.silu(z) * z).sum()


def of_valid(net, a, b, f, n):
    if not int(n):
        return a[:0].sum()
    chosen = net.index[: int(n)] % int(n)
    return (a[chosen] * b[chosen].tanh()).sum()


READS = [
    lambda net, a, b, f, n: (masked(net, a, n) + net.bias).square().sum(),
    with_bias,
    lambda net, a, b, f, n: (masked(net, a, n).square() @ net.wide).square().mean(),
    lambda net, a, b, f, n: (masked(net, a, n).cumsum(0) * masked(net, b, n)).mean(),
    lambda net, a, b, f, n: (a[: int(n)] * b[: int(n)]).sum(),
    lambda net, a, b, f, n: (masked(net, a, n).t() @ masked(net, b, n)).square().mean(),
    lambda net, a, b, f, n: (f * f).sum() * 0.1,
    lambda net, a, b, f, n: (a * masked(net, net.column, n)).sum(0).square().sum(),
    lambda net, a, b, f, n: (masked(net, a, n).sort(0)[0] * f).mean(),
    lambda net, a, b, f, n: torch.cat([masked(net, a, n), f]).square().mean(),
    lambda net, a, b, f, n: (masked(net, a, n)[net.index] * f).mean(),
    lambda net, a, b, f, n: (masked(net, a, n) @ f.t()).square().mean(),
    lambda net, a, b, f, n: (a[: int(n)].sum(0) * f).mean(),
    lambda net, a, b, f, n: Squares.apply(masked(net, a, n)).mean(),
    lambda net, a, b, f, n: Squares.apply(masked(net, a, n).sigmoid()).mean(),
    lambda net, a, b, f, n: torch.linalg.norm(masked(net, a, n) + net.bias),
    lambda net, a, b, f, n: (masked(net, a, n).flip(0) * f.tanh()).mean(),
    of_valid,
]

READS_THE_REST = [
    lambda net, a, f: (a * a).sum(),
    lambda net, a, f: (a * f).mean(),
    lambda net, a, f: (a.t() @ a).mean(),
    lambda net, a, f: a.cumsum(0).square().mean(),
    lambda net, a, f: (a.flip(0) * f).sum(),
    lambda net, a, f: F.silu(a @ net.wide).mean(),
    lambda net, a, f: a.exp().sum(0).sin().sum(),
    lambda net, a, f: Squares.apply(a).mean(),
]


class Body(nn.Module):
    def forward(self, net, x, n):
        draw = random.Random(net.seed)
        row_by_row = ROW_BY_ROW if net.legal else ROW_BY_ROW[len(LEAVE_GARBAGE) :]
        with ps.region():
            marked = [ps.rows(x, n)]
            free = [net.table * 1.0, x.flip(0), x[net.index]]  # of as many rows, which all count
            found = []
            for _ in range(draw.randint(3, 12)):
                a, b, f = draw.choice(marked), draw.choice(marked), draw.choice(free)
                kind = draw.random()
                if kind < 0.6:
                    marked.append(draw.choice(row_by_row)(net, a, b, n))
                elif kind < 0.95:
                    found.append(draw.choice(READS)(net, a, b, f, n))
                else:
                    free.append(torch.sigmoid(f) * f)
                if not net.legal and draw.random() < 0.15:
                    found.append(draw.choice(READS_THE_REST)(net, draw.choice(marked), f))
            last = draw.choice(marked)
        return sum((term.float() for term in found), masked(net, last, n).square().sum().float())


def run(net, inputs, keeper=None, *, amp: bool):
    results = []
    for number, (x, n) in enumerate(inputs):
        torch.manual_seed(number)
        net.zero_grad()
        x = x.clone().requires_grad_()
        cast = torch.autocast("cpu", torch.bfloat16, enabled=amp)
        with keeper.step() if keeper else nullcontext(), cast:
            loss = net(x, n)
            loss.backward()
        results += [loss.detach(), x.grad, *(p.grad for p in net.parameters())]
    return results


def outcome(seed: int, home: str) -> str:
    """`equal`, `refused`, or what went wrong."""
    draw = random.Random(seed)
    rows = draw.choice([4, 6, 8, 16])
    width = draw.choice([4, 8, 8, rows])
    legal, amp = draw.random() < 0.7, draw.random() < 0.3
    net = Net(seed, rows, width, legal=legal)
    inputs = [(torch.randn(rows, width), torch.tensor(draw.randint(0, rows))) for _ in range(2)]
    plain = run(net, inputs, amp=amp)
    pool = ps.PoolConfig(page=256, **draw.choice([{}, {"device": 1 << 18}]))
    policy = ps.Policy([ps.Rule("body", home, min_bytes=draw.choice([0, 0, 256]))], pool)
    keeper = ps.Keeper(policy, backend="torch", check=None if legal else True).attach(net)
    try:
        found = run(net, inputs, keeper, amp=amp)
    except RuntimeError as error:
        refused = not legal and "rows past the valid ones were read" in str(error)
        return "refused" if refused else f"raised: {error}"
    finally:
        keeper.detach()
    alike = (
        p is q or (p is not None and q is not None and torch.equal(p, q))
        for p, q in zip(plain, found, strict=True)
    )
    return "equal" if all(alike) else f"different: {legal=} {amp=} {rows=} {width=}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counts: dict[str, int] = {}
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for home in ("stash", "offload"):
            what = outcome(seed, home)
            if what not in ("equal", "refused"):
                print(seed, home, what[:300], flush=True)
                what = what.split(":")[0]
            counts[what] = counts.get(what, 0) + 1
    print(counts)
