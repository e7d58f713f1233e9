"""Rows that a fused expert layer permutes early in its backward, if its first projection was not saved.

Such a layer saves its T tokens of width D and the first projection of R rows, one for each choice of an expert. If
the projection is recomputed or comes from pages, backward permutes the tokens to R rows of width D before it does
anything else, and holds them until the gradient of the first weight. With the projection in place they are permuted
only then. So of the two moments of its backward where memory may peak,

    activation:   gradients of the R rows, value and gradient of the activation (each half of the projection)
    weight:       the rows, and the gradient of the first weight

the first has the rows, too. A profile has the larger of both.
"""

from math import prod

from pagestash.profiling.profiled import ProfiledStep
from pagestash.profiling.records import SavedTensor


def permuted_bytes(profile: ProfiledStep) -> dict[str, int]:
    """What the peak of such a backward grows by, by the region whose projection it is."""
    layers = {region.name: region.within for region in profile.regions if region.within != region.name}
    saved: dict[str, list[SavedTensor]] = {}
    weights: dict[str, list[SavedTensor]] = {}
    for tensor in profile.tensors:
        if tensor.kind == "weight":
            weights.setdefault(tensor.region, []).append(tensor)
        elif tensor.region in layers and "float" in tensor.dtype and len(tensor.shape) == 2 and tensor.bytes:
            saved.setdefault(layers[tensor.region], []).append(tensor)
    found = {}
    for layer, tensors in saved.items():
        projection, tokens = (most(tensors, key=lambda tensor: tensor.shape[0]) for most in (max, min))
        if tokens.shape[0] < projection.shape[0] and not projection.shape[0] % tokens.shape[0]:
            width = tokens.shape[1]
            rows = projection.shape[0] * width * (tokens.bytes // prod(tokens.shape))
            own = [tensor.bytes for tensor in weights.get(layer, ()) if tensor.shape[-1] == width]
            activation, weight = rows + projection.bytes, rows + max(own, default=0)
            found[projection.region] = max(activation + rows, weight) - max(activation, weight)
    return found
