"""Runs of which a test looks at the layers alone."""

from typing import Any

from pagestash.models.config import DecoderConfig
from pagestash.simulation.cluster.cluster import load_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.model.run import Run


def one_batch(
    config: DecoderConfig, layout: Layout, *, cluster: str = "h100", microbatch: int = 1, **more: Any
) -> Run:
    """A step of one microbatch."""
    return Run(
        config=config,
        cluster=load_cluster(cluster, layout.devices),
        layout=layout,
        global_batch=microbatch * layout.dp,
        microbatch=microbatch,
        **more,
    )
