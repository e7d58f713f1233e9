"""The pictures of a plan: what is drawn is what is predicted."""

import sys
from dataclasses import replace

import pytest
from test_plans import MB, made_up

import pagestash as ps
from pagestash.planning import plan_profile, predict
from pagestash.planning.budget import HELD_BY
from pagestash.planning.plot import draw_curve, draw_memory
from pagestash.sizes import format_bytes

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module", autouse=True)
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def profile():
    return made_up(4, (40 * MB, 4.0), (20 * MB, 10.0), workspace=7 * MB)


@pytest.fixture(scope="module")
def plan(profile):
    return plan_profile(profile, budget=0.5, host="1GiB")


def curve_of(plan):
    return draw_curve(
        curve=plan.curve,
        alternatives=plan.alternatives,
        chosen=plan.predicted,
        budget_bytes=plan.budget_bytes,
    )


def memory_of(plan):
    return draw_memory(
        before=plan.unplanned, after=plan.predicted, budget_bytes=plan.budget_bytes, turn=plan.turn
    )


def labelled(axis):
    return dict(zip(*reversed(axis.get_legend_handles_labels())))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_alternatives_are_predicted_as_policies_by_hand(profile, plan):
    by_hand = {
        "keep all": ps.Policy(),
        "recompute layers": ps.Policy([ps.Rule("layers.*", "recompute")]),
        "offload all": ps.Policy([ps.Rule(name, "offload", min_bytes=1) for name in ("layers.*", "head")]),
    }
    assert list(plan.alternatives) == list(by_hand)
    for name, policy in by_hand.items():
        predicted = predict(profile, policy, base_bytes=profile.model_bytes or 0)
        assert plan.alternatives[name] == predicted


def test_no_alternative_is_below_the_curve(plan):
    for item in plan.alternatives.values():
        assert any(size <= item.peak_bytes and seconds <= item.seconds for size, seconds in plan.curve)


def test_without_host_memory_offload_is_no_alternative(profile):
    assert list(plan_profile(profile, budget=0.7, host=0).alternatives) == ["keep all", "recompute layers"]
    least = plan_profile(profile, budget=0.5, host="1GiB").alternatives["offload all"].host_bytes
    assert "offload all" not in plan_profile(profile, budget=0.7, host=least - 1).alternatives


def test_the_line_has_the_time_of_the_fastest_plan_for_every_budget(plan):
    axis = curve_of(plan).axes[0]
    line = labelled(axis)["fastest plan for each budget"]
    assert len(plan.curve) > 3
    for (size, seconds), x, y in zip(reversed(plan.curve), line.get_xdata(), line.get_ydata()):
        assert (x, y) == (size / MIB, 1e3 * seconds)
    # It goes on to the right: more memory makes no plan faster.
    assert line.get_drawstyle() == "steps-post"
    assert line.get_xdata()[-1] == axis.get_xlim()[1] > plan.unplanned.peak_bytes / MIB
    assert line.get_ydata()[-1] == 1e3 * plan.curve[0][1]


def test_the_points_are_the_alternatives_and_the_plan(plan):
    figure = curve_of(plan)
    axis = figure.axes[0]
    points = labelled(axis)
    assert list(points) == legend(figure)
    for name, item in {**plan.alternatives, "this plan": plan.predicted}.items():
        told = f"{name}: {format_bytes(item.peak_bytes)}, {1e3 * item.seconds:.1f} ms"
        assert points[told].get_offsets().tolist() == [[item.peak_bytes / MIB, 1e3 * item.seconds]]
    budget = points[f"budget: {format_bytes(plan.budget_bytes)}"]
    assert set(budget.get_xdata()) == {plan.budget_bytes / MIB}
    left, right = axis.get_xlim()
    bottom, top = axis.get_ylim()
    for item in (*plan.alternatives.values(), plan.predicted):
        assert left < item.peak_bytes / MIB < right
        assert bottom < 1e3 * item.seconds < top


def test_the_axes_of_the_curve_have_units_and_the_ratio_to_keep(plan):
    figure = curve_of(plan)
    axis = figure.axes[0]
    assert axis.get_xlabel() == "device memory at the peak of the step, MiB"
    assert axis.get_ylabel() == "predicted step, ms"
    (ratio,) = axis.child_axes
    assert ratio.get_ylabel() == "relative to keep all"
    figure.draw_without_rendering()
    keep = 1e3 * plan.unplanned.seconds
    assert ratio.get_ylim() == pytest.approx([edge / keep for edge in axis.get_ylim()])


def test_memory_is_stacked_to_the_sum_of_every_segment(plan):
    figure = memory_of(plan)
    for axis, item in zip(figure.axes, (plan.unplanned, plan.predicted), strict=True):
        drawn = [patch for patch in axis.patches if patch.get_label()[0] != "_"]
        total = [0] * len(item.starts)
        shown = [
            name for name in item.memory if any(plan.predicted.memory[name]) or name in ("other", "keep")
        ]
        for name, patch in zip(shown, drawn, strict=True):
            total = [one + other for one, other in zip(total, item.memory[name])]
            data = patch.get_data()
            assert data.values == pytest.approx([size / MIB for size in total])
            assert data.edges.tolist() == [1e3 * start for start in (*item.starts, item.seconds)]
        assert max(total) == item.peak_bytes
        # Each part is in front of those above it.
        orders = [patch.get_zorder() for patch in drawn]
        assert orders == sorted(orders, reverse=True)


def test_segments_too_short_to_see_are_joined_with_the_most_of_their_bytes(profile):
    segments = [replace(own, seconds=1e-9 if "layers.2" in own.path else 1.0) for own in profile.segments]
    plan = plan_profile(
        replace(profile, segments=segments, plain_seconds=sum(s.seconds for s in segments)), budget=0.5
    )
    for axis, item in zip(memory_of(plan).axes, (plan.unplanned, plan.predicted)):
        data = [patch.get_data() for patch in axis.patches][-1]
        assert len(data.values) < len(item.starts)
        assert min(data.edges[1:] - data.edges[:-1]) >= 1
        assert data.edges[-1] == 1e3 * item.seconds
        assert max(data.values) == item.peak_bytes / MIB


def test_both_panels_show_budget_peak_and_where_backward_begins(profile, plan):
    figure = memory_of(plan)
    forward = sum(segment.way == "forward" for segment in profile.segments)
    for axis, item, name in zip(
        figure.axes, (plan.unplanned, plan.predicted), ("without a policy", "planned")
    ):
        title = axis.get_title(loc="left")
        assert title == f"{name}: {format_bytes(item.peak_bytes)} at the peak, {1e3 * item.seconds:.1f} ms"
        lines = [(set(line.get_xdata()), set(line.get_ydata())) for line in axis.lines]
        assert ({1e3 * item.starts[forward]}, {0, 1}) in lines
        assert any(ys == {plan.budget_bytes / MIB} for _, ys in lines)
        assert [text.get_text() for text in axis.texts] == ["forward", "backward"]
        assert axis.get_ylabel() == "device memory, MiB"
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.axes[0].get_ylim()[1] > plan.unplanned.peak_bytes / MIB
    assert figure.axes[0].get_xlim() == (0, 1e3 * plan.predicted.seconds)
    assert figure.axes[-1].get_xlabel() == "time of the step, ms"


def test_an_axis_that_hides_weights_says_so(profile):
    small = plan_profile(profile, budget=0.5, optimizer_bytes=10 * MB)
    assert memory_of(small).axes[0].get_ylim()[0] == 0
    large = plan_profile(profile, budget=0.5, optimizer_bytes=100 * GIB)
    figure = memory_of(large)
    assert 0 < figure.axes[0].get_ylim()[0] < 100 < figure.axes[0].get_ylim()[1]
    assert figure.axes[0].get_ylabel() == "device memory, GiB"
    assert legend(figure)[0].endswith(f": {format_bytes(large.predicted.memory['base'][0])}, not shown whole")


@pytest.mark.parametrize(("words", "columns"), [(1, 3), (15, 2), (19, 1)])
def test_a_legend_stays_inside_the_picture(plan, words, columns, monkeypatch):
    monkeypatch.setitem(HELD_BY, "keep", "long " * words)
    figure = memory_of(plan)
    (found,) = figure.legends
    assert len(found.get_texts()) == len(labelled(figure.axes[0]))
    figure.draw_without_rendering()
    assert len({round(text.get_window_extent().x0) for text in found.get_texts()}) == columns
    assert found.get_window_extent().x1 <= figure.bbox.x1


def test_a_step_that_fits_has_points_and_one_panel(profile):
    plan = plan_profile(profile, budget="8GiB", host="1GiB")
    assert plan.is_empty
    axis = curve_of(plan).axes[0]
    assert len(axis.collections) == 4
    assert "fastest plan for each budget" not in labelled(axis)
    (panel,) = memory_of(plan).axes
    assert panel.get_title(loc="left").startswith("without a policy: ")
    # The budget is far above, and does not flatten the picture.
    assert panel.get_ylim()[1] < 2 * plan.unplanned.peak_bytes / MIB


def test_a_plan_writes_its_pictures(plan, tmp_path):
    for draw, name in ((plan.plot_curve, "curve"), (plan.plot_memory, "memory")):
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        draw(str(tmp_path / "first.svg"))
        draw(str(tmp_path / "second.svg"))
        text = (tmp_path / "first.svg").read_text()
        assert f">budget: {format_bytes(plan.budget_bytes)}<" in text
        assert text == (tmp_path / "second.svg").read_text()
    assert "matplotlib.pyplot" not in sys.modules


def test_a_picture_without_matplotlib_says_what_to_install(plan, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plan.plot_curve, plan.plot_memory):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'pagestash\[plot\]'"):
            draw(tmp_path / "p.png")
