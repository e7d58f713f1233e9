"""Models whose forwards do what recompute does not promise to repeat."""

import numpy as np
import torch
from torch import nn

WIDTH = 16


class Layer(nn.Module):
    """An ordinary one: a buffer that forward updates, and draws from torch's generator."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.dropout(self.norm(self.linear(x)).tanh(), 0.3, True)


class Net(nn.Module):
    def __init__(self, kind=Layer, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class GrowsASet(Layer):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, x):
        self.seen.add(len(self.seen))
        return super().forward(x) * (1 + 0.1 * len(self.seen))


class HasAGenerator(Layer):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) * (-1.0 if self.rng.random() < 0.03 else 1.0)


class Seeds(Layer):
    """Leaves the generator as it found it, if a module of its kind ran before."""

    def forward(self, x):
        torch.manual_seed(42)
        y = (self.linear(x) * torch.rand(WIDTH)).tanh()
        return y * (1 + torch.rand(()).item())


class Given(Layer):
    """Runs a module that is handed in."""

    def forward(self, x, norm):
        return norm(self.linear(x)).tanh()


class HandsIn(Net):
    def __init__(self):
        super().__init__(Given)
        self.shared = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, self.shared)
        return x.square().mean()


class Steered(Net):
    """From the second step on a hook changes what a region gives, registered and removed inside of the step."""

    def __init__(self, prepend):
        super().__init__()
        self.prepend, self.calls = prepend, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            return super().forward(x)
        hook = self.layers[0].linear.register_forward_hook(lambda *args: args[2] * 2.0, prepend=self.prepend)
        try:
            return super().forward(x)
        finally:
            hook.remove()


class Counts(Net):
    """Raises in a call of forward, counted over all models."""

    ever = 0

    def __init__(self, fails_in, error=None):
        super().__init__()
        self.calls, self.fails_in, self.error = [0], fails_in, error
        self.tally = None

    def forward(self, x):
        self.calls[0] += 1
        Counts.ever += 1
        if Counts.ever == self.fails_in:
            raise self.error
        self.tally = x.sum()
        return super().forward(x)
