"""The part of a page that a tool writes: what stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from dataclasses import dataclass
from pathlib import Path

from a3po_megatron.errors import UserError


@dataclass(frozen=True)
class PagePart:
    """A part by its page and name. Everything here raises UserError where the two marks are not there, once and in order."""

    page: Path
    name: str

    def read(self) -> str:
        """Return what stands between the marks, without their line ends."""
        return self._split()[1].strip("\n")

    def write(self, text: str) -> None:
        """Put `text` between the marks in place of what was there."""
        before, _, after = self._split()
        self.page.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")

    def _split(self) -> tuple[str, str, str]:
        """Return the page up to its first mark, what follows, and the page from its second mark on."""
        begin, end = f"<!-- {self.name} -->", f"<!-- end of {self.name} -->"
        try:
            text = self.page.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.page}: cannot read the page: {error.strerror}") from None
        before, _, rest = text.partition(begin)
        inside, _, after = rest.partition(end)
        if text.count(begin) != 1 or text.count(end) != 1 or end not in rest:
            raise UserError(f"{self.page}: no place for the table: expected one {begin} and, further down, one {end}")
        return before + begin, inside, end + after
