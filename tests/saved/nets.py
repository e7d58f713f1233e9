"""Random nets, policies and ways to train, for a comparison with training without a keeper."""

import random
import threading

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagestash as ps

F = torch.nn.functional
WIDTH, ROWS = 8, 6
HOMES = ("recompute", "recompute", "recompute", "keep", "stash", "offload")


class Leaf(nn.Module):
    """One of many small operations, chosen by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.seen = kind, 0, 1.0
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.batch = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, mask=None, *, scale=1.0, more=None):
        y = getattr(self, "_" + self.kind)(x)
        if mask is not None:
            y = torch.where(mask, y, y * 0.5)
        if more is not None:
            y = y + more["shift"][0].sin()
            more["shift"].append(y)
        return y * scale

    def _linear(self, x):
        return self.linear(x)

    def _gelu(self, x):
        return F.gelu(self.linear(x))

    def _gated(self, x):
        gate, value = self.other(self.norm(x)).chunk(2, dim=-1)
        return self.linear(F.silu(gate) * value)

    def _tanh(self, x):
        return torch.tanh(x)

    def _dropout(self, x):
        return F.dropout(self.linear(x), 0.3, self.training)

    def _rrelu(self, x):
        return F.rrelu(x, training=self.training)

    def _norm(self, x):
        return self.norm(x)

    def _batch(self, x):
        return self.batch(x)

    def _attention(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def _softmax(self, x):
        return (x @ x.t()).softmax(-1) @ self.linear(x)

    def _in_place(self, x):
        y = self.linear(x)
        y.mul_(2).relu_()
        z = torch.empty_like(y)
        z[:, : WIDTH // 2] = y[:, WIDTH // 2 :]
        z[:, WIDTH // 2 :] = y[:, : WIDTH // 2].detach()
        return z + y

    def _views(self, x):
        a, b = x.t().reshape(2, -1).unbind(0)
        return (a * b.sin()).view(-1, 1).expand(-1, 2).reshape(WIDTH, -1).t() + x.flip(0).narrow(1, 0, 1)

    def _choice(self, x):
        order = x.detach().sum(1).argsort()
        return x.sin().index_select(0, order).masked_fill(x > 1, 0.1)

    def _routed(self, x):
        values, ids = ps.once(lambda: (self.linear(x) + torch.rand(WIDTH)).topk(2, dim=-1))
        return x.cos().gather(1, ids).sum(1, keepdim=True) * values.softmax(-1).sum(1, keepdim=True) + x

    def _counts(self, x):
        self.calls += 1
        self.count += 1
        self.seen = self.seen * 0.5 + self.calls
        return x.sin() * self.seen * self.count.clone()

    def _random(self, x):
        return x.cos() * random.random() * float(np.random.rand()) * torch.rand(WIDTH)  # noqa: NPY002

    def _custom(self, x):
        return Cube.apply(x.tanh())

    def _checkpoint(self, x):
        return checkpoint(lambda y: self.linear(y).sin().cos(), x, use_reentrant=False)

    def _constant(self, x):
        return x * torch.arange(WIDTH).sin() + x.detach().exp()

    def _sorted(self, x):
        return x.sort(dim=0).values * x.cumsum(0)


KINDS = [
    name[1:] for name, value in vars(Leaf).items() if name[0] == "_" and name[1] != "_" and callable(value)
]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx, grad):
        x, square = ctx.saved_tensors
        return grad * (square + 2 * x * x)


class Branch(nn.Module):
    """Calls its children in one of several ways."""

    def __init__(self, kind: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)

    def forward(self, x):
        children = list(self._modules.values())
        if self.kind == "residual":
            return x + _all(children, x)
        if self.kind == "twice":
            return children[0](_all(children, x)) * 0.5
        if self.kind == "pair":
            pair = pair_of(children[0], x)
            return pair[0] * pair[1].sin() + _all(children[1:], pair[0])
        if self.kind == "keywords":
            for child in children:
                more = {"scale": 0.5, "more": {"shift": [x, "text"]}} if isinstance(child, Leaf) else {}
                x = child(x, x > 0, **more) if more else child(x)
            return x
        return _all(children, x)


def pair_of(module, x):
    y = module(x)
    return y, y.cos()


def _all(children, x):
    for child in children:
        x = child(x)
    return x


BRANCHES = ("plain", "residual", "twice", "pair", "keywords")


def random_net(choose: random.Random, depth: int) -> nn.Module:
    if depth == 0 or choose.random() < 0.25:
        return Leaf(choose.choice(KINDS))
    children = [random_net(choose, depth - 1) for _ in range(choose.randint(1, 3))]
    if choose.random() < 0.2:
        children.append(children[0])  # one module in two places
    return Branch(choose.choice(BRANCHES), children)


def random_policy(choose: random.Random, names: list[str]) -> ps.Policy:
    often = choose.choice((0.2, 0.5, 0.9))
    named = [name for name in names if choose.random() < often] or names[:1]
    rules = [ps.Rule(name, choose.choice(HOMES), min_bytes=choose.choice((0, 0, 100))) for name in named]
    return ps.Policy(rules, ps.PoolConfig(page=64))


def train(net: nn.Module, keeper: ps.Keeper, choose: random.Random, steps: int = 2) -> list:
    """Gradients, buffers and what the generators give next, after some steps in a way that `choose` picks."""
    way = choose.choice(("plain", "microbatches", "retained", "split", "thread", "eval", "functional"))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    generator = torch.Generator().manual_seed(2)
    found: list = []
    for _ in range(steps):
        net.zero_grad()
        xs = [torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True) for _ in range(3)]
        with keeper.step():
            if way == "functional":
                weights = {name: (p.detach() * 1.5).requires_grad_() for name, p in net.named_parameters()}
                losses = [torch.func.functional_call(net, weights, (x,)).square().sum() for x in xs[:2]]
                for loss in losses[::-1]:
                    loss.backward()
                found += [weight.grad for weight in weights.values()]
            elif way == "microbatches":
                losses = [net(x).square().sum() for x in xs]
                for number in choose.sample(range(3), 3):
                    losses[number].backward()
            else:
                loss = net(xs[0]).square().sum()
                if way == "split":
                    (dx,) = torch.autograd.grad(loss, xs[0], retain_graph=True)
                    wanted = [p for p in net.parameters() if p.requires_grad]
                    found += [dx, *torch.autograd.grad(loss, wanted, allow_unused=True)]
                elif way == "thread":
                    thread = threading.Thread(target=loss.backward)
                    thread.start()
                    thread.join()
                else:
                    if way == "retained":
                        loss.backward(retain_graph=True)
                    if way == "eval":
                        net.eval()
                    loss.backward()
                    net.train()
                del loss
        found += [x.grad for x in xs]
        found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        found += [buffer.clone() for buffer in net.buffers()]
    counted = [(leaf.calls, leaf.seen) for leaf in net.modules() if isinstance(leaf, Leaf)]
    found.append(torch.tensor([*torch.rand(2), random.random(), *np.random.rand(1)]))  # noqa: NPY002
    found.append(torch.tensor(counted))
    return found


def compare(seed: int, steps: int = 2) -> str:
    """Empty if a random net under a random policy gives what it gives without; else what differs."""
    results = []
    for kept in (False, True):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        net = nn.Sequential(random_net(choose, 3), random_net(choose, 2))
        names = [name for name, _ in net.named_modules() if name]
        policy = random_policy(choose, names)
        keeper = ps.Keeper(policy if kept else ps.Policy(), backend="torch").attach(net)
        results.append(train(net, keeper, choose, steps))
        if kept and any(home.bytes for home in keeper.stats().homes.values()):
            return f"{seed}: bytes are left"
    for number, (plain, found) in enumerate(zip(*results, strict=True)):
        if (plain is None) != (found is None) or (plain is not None and not _equal(plain, found)):
            return f"{seed}: value {number} of {len(results[0])} differs"
    return ""


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left, right) or torch.equal(left.nan_to_num(7), right.nan_to_num(7))
