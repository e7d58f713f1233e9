"""`docs/compatibility.md`: each cell is what its test finds."""

import re

import pytest
import torch
from compatibility import one_rank, table, two_ranks
from compatibility.table import HOMES
from support.compare import same
from support.processes import start_ranks
from support.tiers import slow

CELLS = [(row, home) for row in table.ONE_RANK for home in HOMES]


@pytest.fixture(scope="module", autouse=True)
def _compile_anew():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("row", "home"), CELLS, ids=lambda each: each if isinstance(each, str) else each.test
)
def test_one_rank(row, home):
    if row.test == "lora":
        pytest.importorskip("peft")
    feature = getattr(one_rank, row.test)
    if home in row.refused:
        with pytest.raises(ValueError, match=row.refused[home]):
            feature(home)
        return
    plain, _ = feature(None)
    kept, keeper = feature(home)
    assert same(kept, plain)
    assert keeper.stats().homes[home].peak > 0


SOME = ("stash", "recompute")
OTHERS = tuple(home for home in HOMES if home not in SOME)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What two ranks have found, of each (feature, home), for some homes."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(
        two_ranks.work, (str(folder), dict.fromkeys([r.test for r in table.TWO_RANKS], request.param)), 2
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("found", "home"),
    [*((SOME, home) for home in SOME), *slow(*((OTHERS, home) for home in OTHERS))],
    indirect=["found"],
    scope="module",
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.parametrize("row", table.TWO_RANKS, ids=lambda row: row.test)
def test_two_ranks(found, row, home):
    results = [each[row.test, home] for each in found]
    if home in row.refused:
        assert all(re.search(row.refused[home], said) for said in results)
        return
    assert [equal for equal, _ in results] == [True, True]
    assert any(peak > 0 for _, peak in results)  # the last stage of a pipeline may move nothing


@pytest.mark.parametrize("row", table.FRAMEWORKS, ids=lambda row: row.title)
def test_a_row_of_another_file_names_a_test_that_is_there(row):
    file, name = row.test.split()
    assert f"def {name}" in (table.ROOT / "tests" / file).read_text()


def test_the_page_is_what_the_table_says():
    assert table.PAGE.read_text() == table.page(), "python tests/compatibility/table.py writes it"
