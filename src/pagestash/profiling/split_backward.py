"""Gradients that wait between the halves of a split backward.

A schedule that splits backward computes the gradients of a stage's inputs first, and those of its weights later.
The second half begins at the nodes where both paths part: a linear layer's, a norm's. Torch holds the gradient that
each of these nodes received until then (`torch.distributed.pipelining`, `stage_backward_input`).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from pagestash.profiling.timeline import Path, Timeline, nodes_of
from pagestash.torch_internals import StorageWeakRef, key_of_storage

LEAF = "torch::autograd::AccumulateGrad"


class WaitingGradients:
    """Notes, in a backward that is not split, what a split one would hold. It holds nothing itself."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._seen: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}

    def watch(self, loss: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
        """Before backward of `loss` begins; without an input that wants a gradient there is nothing to split."""
        leaves = {id(tensor) for tensor in inputs if tensor.is_leaf and tensor.requires_grad}
        if leaves:
            for node in parting_nodes(loss, leaves):
                # (A hook that had the node itself would never be freed.)
                node.register_prehook(partial(self._received, self._timeline.path_of(node)))

    def by_segment(self, count: int) -> list[int]:
        """Bytes that begin to wait in each of so many segments."""
        return [self._bytes.get(at, 0) for at in range(count)]

    def _received(self, path: Path, gradients: Sequence[torch.Tensor | None]) -> None:
        at = self._timeline.coming(path)
        for gradient in gradients:
            if gradient is None or gradient.layout != torch.strided:
                continue
            storage = gradient.untyped_storage()
            key = key_of_storage(storage)
            known = self._seen.get(key)
            if known is None or known.expired():
                self._seen[key] = StorageWeakRef(storage)
                self._bytes[at] = self._bytes.get(at, 0) + storage.nbytes()


def parting_nodes(loss: torch.Tensor, leaves: set[int]) -> list[Any]:
    """Nodes on the way to these leaves, by their `id`, that have another way to a leaf beside it."""
    nodes = list(nodes_of(loss))
    behind: dict[Any, list[Any]] = {}
    """By node: those that pass their gradient on to it."""
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                behind.setdefault(following, []).append(node)
    ends = [node for node in nodes if node.name() == LEAF]
    given = [node for node in ends if id(node.variable) in leaves]
    on_the_way = _before(given, behind, set())
    weights = [node for node in ends if node not in on_the_way]
    aside = _before(weights, behind, on_the_way)
    return [
        node
        for node in nodes
        if node in on_the_way and any(following in aside for following, _ in node.next_functions)
    ]


def _before(ends: Iterable[Any], behind: dict[Any, list[Any]], without: set[Any]) -> set[Any]:
    """The ends, and all nodes from which one of them is reached, but for those of `without` and beyond."""
    found, waiting = set(), list(ends)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in without:
            found.add(node)
            waiting += behind.get(node, ())
    return found
