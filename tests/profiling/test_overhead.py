"""What a keeper costs the host is measured on small regions."""

import torch

from pagestash.profiling.overhead import REGIONS, measure_overhead
from pagestash.saved.keeper import Keeper


def test_a_recomputed_region_and_a_moved_group_cost_more_than_a_tensor_that_stays():
    found = measure_overhead(torch.device("cpu"))
    assert 0 < found.pack < found.record
    assert 0 < found.pack < found.put
    assert found.record + found.replay + found.put + found.get < 0.1


def test_the_regions_are_really_recomputed_and_moved(monkeypatch):
    seen = {}
    original = Keeper.detach

    def detach(keeper):
        for home, stats in keeper.stats().homes.items():
            seen[home] = max(seen.get(home, 0), stats.peak)
        original(keeper)

    monkeypatch.setattr(Keeper, "detach", detach)
    measure_overhead(torch.device("cpu"))
    # All but the last group, which backward asks for at once.
    assert seen["offload"] == (REGIONS - 1) * 2 * 64 * 64 * 4
    assert seen["recompute"] > 0
