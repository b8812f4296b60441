"""A tool's part of a page: only what stands between its marks is replaced, and a page without them is refused."""

from pathlib import Path

import pytest

from a3po_megatron.errors import UserError
from tools.page_part import PagePart

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    part = PagePart(tmp_path / "page.md", "figures")
    part.page.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n<!-- other -->\n")
    assert part.read() == "old"
    part.write("new\nlines")
    assert part.page.read_text() == f"a\n{BEGIN}\nnew\nlines\n{END}\nb\n<!-- other -->\n"
    assert part.read() == "new\nlines"


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_page_without_its_marks_once_and_in_order_is_refused_and_left_alone(text: str, tmp_path: Path) -> None:
    part = PagePart(tmp_path / "page.md", "figures")
    part.page.write_text(text)
    for use in (part.read, lambda: part.write("new")):
        with pytest.raises(
            UserError, match=f"page.md: no place for the table: expected one {BEGIN} and, further down,"
        ):
            use()
    assert part.page.read_text() == text


def test_a_page_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.md: cannot read the page: No such file"):
        PagePart(tmp_path / "none.md", "figures").read()
