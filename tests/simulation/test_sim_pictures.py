"""The picture and the trace of a replayed step."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from support.tiers import slow
from test_sim_replay import Amount, HostLink, LayerCosts, replay, step

from pagestash.profiling.picture import write
from pagestash.simulation.replay.played import Replay
from pagestash.simulation.replay.trace import events, write_trace

GIB = 1 << 30
LINK = HostLink(out=55e9, back=55e9, both=50e9)


def played(name: str = "InterleavedZeroBubble", microbatches: int = 8) -> Replay:
    own = LayerCosts(
        name="moe",
        forward=Amount(2e-3, 2e-3),
        backward_input=Amount(2e-3, 2e-3),
        backward_weight=Amount(2e-3, 2e-3),
        recompute=5e-4,
        dispatch_seconds=8e-4,
        saved={"keep": Amount(0.2 * GIB), "offload": Amount(0.1 * GIB, 0.1 * GIB)},
    )
    return replay(step(name, 4, microbatches, lambda _: [own, own], host=LINK))


@pytest.mark.parametrize("microbatches", [8, *slow(64)])
def test_the_picture_names_all_it_shows(microbatches, tmp_path: Path):
    pytest.importorskip("matplotlib")
    from pagestash.simulation.replay.plot import draw_step

    shown = played(microbatches=microbatches)
    path = tmp_path / "step.svg"
    write(draw_step(shown, title="a model", capacity_bytes=8 * GIB), path)
    texts = {element.text for element in ElementTree.parse(path).iter() if element.tag.endswith("text")}
    assert {"forward", "backward", "weight gradient", "recompute", "dispatch, combine, gather"} <= texts
    assert {"copy to the host", "copy back", "rank 0", "rank 3", "device memory 8.0 GiB"} <= texts
    assert any(text and text.startswith("a model: ") for text in texts)
    assert ("enlarged" in texts) == (microbatches == 64)
    assert path.stat().st_size < 4 << 20


@pytest.mark.slow
def test_a_picture_of_the_same_step_is_the_same_file(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from pagestash.simulation.replay.plot import draw_step

    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        write(draw_step(played("1F1B")), path)
    assert first.read_bytes() == second.read_bytes()


def test_the_trace_has_every_span_and_the_bytes(tmp_path: Path):
    shown = played()
    path = tmp_path / "trace.json"
    write_trace(shown, path)
    found = json.loads(path.read_text())["traceEvents"]
    assert found == list(events(shown))
    spans = [event for event in found if event["ph"] == "X"]
    assert len(spans) == sum(len(rank.spans) for rank in shown.ranks)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * shown.seconds)
    for number, rank in enumerate(shown.ranks):
        sizes = [e["args"]["allocated"] for e in found if e["ph"] == "C" and e["pid"] == number]
        assert max(sizes) == rank.peak_bytes
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for own in lanes.values():  # a lane does one thing at a time
        own.sort()
        assert all(a + b <= c + 1e-3 for (a, b), (c, _) in pairwise(own))
