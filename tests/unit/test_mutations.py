"""The mutations still fit the code, the page lists them all, and the command tells a test that notices from one that does not."""

import ast
import re
from pathlib import Path

import pytest

from tools import mutations
from tools.mutations import Mutation

ALL = mutations.read_mutations()
each_mutation = pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)


@each_mutation
def test_a_mutation_has_one_place_and_leaves_a_module_that_can_be_read(mutation: Mutation) -> None:
    text = (mutations.ROOT / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.mutated(text)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
    assert mutation.tests
    assert all(names_a_test(test) for test in mutation.tests)


def names_a_test(test: str) -> bool:
    """Whether a file, or a function in it, is there."""
    file, _, function = test.partition("::")
    path = mutations.ROOT / file
    return path.is_file() and (not function or f"def {function}(" in path.read_text(encoding="utf-8"))


def test_the_page_lists_every_mutation_and_a_test_that_noticed_it() -> None:
    rows = mutations.PAGE_PART.read().splitlines()
    noticed = [re.search(r"`([^`]+)` \|$", row) for row in rows[2:]]
    tests = [f"tests/{found[1]}" if found else None for found in noticed]
    assert rows == mutations.table(dict(zip(ALL, tests, strict=True))), "run python tools/mutations.py --write"
    for mutation, test in zip(ALL, tests, strict=True):
        assert test is not None, mutation.name
        assert names_a_test(test), mutation.name
        its_tests = [chosen.partition("[")[0] for chosen in mutation.tests]
        assert {test, test.partition("::")[0]} & {*its_tests}, f"{mutation.name}: {test} is none of its tests"


def test_names_are_unique_and_every_room_of_the_objectives_way_is_broken_often() -> None:
    assert len({mutation.name for mutation in ALL}) == len(ALL)
    rooms = [Path(mutation.file).parts[1] for mutation in ALL]
    assert all(rooms.count(room) >= 10 for room in ("objective", "batching", "controller", "rollout"))


@pytest.mark.parametrize(
    ("claim", "noticed"), [("add(1, 2) == 3", "test_adder.py::test_of_two"), ("add(1, 2) > 0", None)]
)
def test_a_break_is_noticed_by_the_first_test_that_fails(tmp_path: Path, claim: str, noticed: str | None) -> None:
    copy = tmp_path / "checkout"
    copy.mkdir()
    (copy / "adder.py").write_text("def add(a, b):\n    return a + b\n")
    (copy / "test_adder.py").write_text(
        "from adder import add\n\ndef test_of_none():\n    assert add(0, 0) < 2\n\n"
        f"def test_of_two():\n    assert {claim}\n"
    )
    mutation = Mutation("name", "adder.py", "a + b", "a + b + 1", "in words", ("test_adder.py",))
    with mutations.applied(mutation, copy):
        assert mutations.first_failure(copy, mutation.tests) == noticed
    assert mutations.first_failure(copy, mutation.tests) is None, "the code is whole again"


def test_tests_that_cannot_be_run_are_an_error_and_not_a_break_that_was_noticed(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    with pytest.raises(RuntimeError, match="ended with 4"):
        mutations.first_failure(tmp_path / "checkout", ["test_missing.py"])


@pytest.mark.parametrize(("text", "found"), [("a - b", 0), ("a + b; a + b", 2)])
def test_a_text_without_exactly_one_place_is_refused(text: str, found: int) -> None:
    with pytest.raises(ValueError, match=f"name: its text stands {found} times in adder.py, not once"):
        Mutation("name", "adder.py", "a + b", "a", "in words", ()).mutated(text)
