"""The README is finished: no placeholder is left in it, and every file that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"^@\w+@$", README, re.MULTILINE)


def test_every_linked_file_is_there() -> None:
    links = re.findall(r"\]\((?!https?://)([^)]+)\)", README)
    assert len(links) >= 6
    assert all((ROOT / link).exists() for link in links)
