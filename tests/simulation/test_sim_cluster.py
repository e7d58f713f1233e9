"""Cluster files: read whole, refused in one sentence, and rates that behave."""

from importlib.resources import files

import pytest

from pagestash.simulation.cluster.cluster import SHIPPED, load_cluster, parse_cluster, read_cluster
from pagestash.toml import read_toml

FOLDER = files("pagestash.simulation.cluster").joinpath("files")


@pytest.fixture
def tables():
    return read_toml(str(FOLDER.joinpath("h100.toml")))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_clusters_are_read_and_every_number_has_a_source(name):
    cluster = read_cluster(f"{name}:64")
    assert (cluster.name, cluster.devices) == (name, 64)
    lines = FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8").splitlines()
    group_source = False
    for line in lines:
        if line.startswith("["):
            group_source = "#" in line
        if "=" in line and not line.startswith(("name", "#")):
            assert (
                "#" in line or group_source or line.startswith(("devices", "nvlink_devices", "back", "both"))
            ), line


def test_a_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    shipped = FOLDER.joinpath("h100.toml").read_text(encoding="utf-8")
    path.write_text(shipped.replace("989.4e12", "500e12"))
    assert load_cluster(path, 8).matmul.bf16 == 500e12
    assert read_cluster(f"{path}:8").devices == 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h100", "expected a name and a number of devices"),
        ("h100:many", "'many' is no number of devices"),
        ("h100:0", "expected 1 to"),
        ("h1000:8", "expected h100, h200, b200 or gb200, or a TOML file"),
        ("nowhere.toml:8", "No such file"),
    ],
)
def test_a_wrong_cluster_is_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        read_cluster(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("node"), r"\[node\] is missing"),
        (lambda t: t["node"].pop("nvlink"), r"\[node\] lacks nvlink"),
        (lambda t: t["node"].update(nvlinks=1), r"\[node\] has an unknown key 'nvlinks'"),
        (lambda t: t.update(gpu={}), "unknown key 'gpu'"),
        (lambda t: t["matmul"].update(bf16="fast"), r"\[matmul\] bf16='fast': expected a number"),
        (lambda t: t["matmul"].update(efficiency=1.5), "efficiency=1.5: expected a part of 1"),
        (lambda t: t["host"].update(out=-1), "out=-1: expected more than 0"),
        (lambda t: t["node"].update(devices=7.5), "devices=7.5: expected a whole number"),
        (lambda t: t["device"].update(memory="lots"), "memory='lots': expected a number with a unit"),
    ],
)
def test_a_malformed_file_is_one_sentence(tables, change, sentence):
    change(tables)
    with pytest.raises(ValueError, match=sentence) as error:
        parse_cluster(tables, 8, "mine.toml")
    assert str(error.value).startswith("mine.toml")
    assert "\n" not in str(error.value)


def test_what_a_file_leaves_out_can_be_written_out(tables):
    optional = {
        "device": ["kernel"],
        "host": ["launch", "region"],
        "node": ["dispatch_processors", "beside_compute"],
    }
    for table, names in optional.items():
        for name in names:
            tables[table].pop(name)
    short = parse_cluster(tables, 8, "mine.toml")
    for table, names in optional.items():
        tables[table] |= {name: getattr(getattr(short, table), name) for name in names}
    assert parse_cluster(tables, 8, "mine.toml") == short


def test_products_are_never_faster_than_the_peak_or_than_memory():
    cluster = read_cluster("h100:8")
    for m, n, k, groups in (
        (8192, 8192, 8192, 1),
        (1, 128, 7168, 1),
        (128, 4096, 7168, 8),
        (130, 100, 64, 3),
    ):
        seconds = cluster.product_seconds(m, n, k, "bf16", groups)
        assert seconds >= 2 * groups * m * n * k / cluster.matmul.bf16
        assert seconds >= 2 * groups * k * n / cluster.device.memory_bandwidth


def test_an_odd_shape_wastes_part_of_its_tiles():
    cluster = read_cluster("h100:8")
    assert cluster.shape(129, 4096, 4096) < 0.6 * cluster.shape(128, 4096, 4096) * 2
    assert cluster.shape(4096, 4096, 65536) > cluster.shape(4096, 4096, 256)


def test_a_group_beyond_nvlink_is_slower():
    h100, gb200 = read_cluster("h100:256"), read_cluster("gb200:256")
    assert h100.all_to_all_seconds(1e9, 16) > 3 * h100.all_to_all_seconds(1e9, 8)
    assert gb200.all_to_all_seconds(1e9, 16) == gb200.all_to_all_seconds(1e9, 8)
    assert h100.all_to_all_seconds(1e9, 1) == h100.gather_seconds(1e9, 1) == 0
    assert h100.send_rate(8) < h100.send_rate(4)
