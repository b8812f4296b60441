"""What the documentation holds: pages, links, fenced blocks, commands, names of settings."""

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from a3po_megatron.config.schema import TrainConfig

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNERS = re.compile(
    r"((?:\.venv/bin/)?python|make|bash|sbatch|torchrun|source|cp|ls|head|tail|git|scancel)$|tools/|slurm/"
)
INLINE = r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?python|torchrun|make) [^`]+)`"
SECTIONS = [field.name for field in dataclasses.fields(TrainConfig) if dataclasses.is_dataclass(field.type)]


@dataclass(frozen=True)
class Command:
    """One command as a page shows it: as a shell reads it, and as words without comment and what stands for more."""

    page: str
    line: str
    variables: dict[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def text(self) -> str:
        """Variables and words, without the page."""
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])


def commands() -> Iterator[Command]:
    """Yield every command of all pages: lines of fenced or indented blocks, and inline code."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line for block in blocks(text, "") for line in block.splitlines()]
        for name, value in re.findall(r'^([A-Z])="?([^"\n]+)"?$', text, re.MULTILINE):  # what a page gives a short name
            text = text.replace(f"${name} ", f"{value} ")
        lines += [line for block in blocks(text, "sh") for line in block.splitlines()]
        lines += re.findall(r"^    (.+)", text, re.MULTILINE)
        lines += [" ".join(code.split()) for code in re.findall(INLINE, text)]
        for line in lines:
            command = _command(page.name, line.removeprefix("$ "))
            if command and RUNNERS.match(command.words[0]):
                yield command


def _command(page: str, line: str) -> Command | None:
    line = re.sub(r"\[(-[^\]]*?)(?: \|[^\]]*)?\]", r"\1", line)  # what is optional is taken, of alternatives the first
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a picture or a sentence
        return None
    variables = {}
    while words and re.match(r"[A-Z]\w*=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    words = [word for word in words if word not in ("...", "|")]
    return Command(page, line, variables, tuple(words)) if words else None


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language; "": those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def shows(page: str, command: Command, said: str) -> bool:
    """Whether a page shows, right after a command, what the command said; however either is broken into lines."""
    shown = " ".join(page.replace("\\\n", " ").split())
    return bool(said) and " ".join([*command.line.split(), *said.split()]) in shown


def links(text: str) -> list[str]:
    """Return the targets of a page's links within the repository."""
    return re.findall(r"\]\((?!https?://)([^)\s]+)\)", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def settings(text: str) -> set[str]:
    """Return the dotted names of settings, such as `run.dir`, wherever they stand on a page."""
    names = re.findall(rf"(?<![\w./\-])((?:{'|'.join(SECTIONS)})(?:\.\w+)+)", text)
    return {name for name in names if not re.search(r"^model\.layers|\.(py|sh|md|yaml|safetensors)$", name)}


def exists(name: str) -> bool:
    """Whether a dotted name is a setting or a section of a reinforcement learning run."""
    where: Any = TrainConfig
    for part in name.split("."):
        if get_origin(where) is dict:  # sections by name: any name will do
            where = get_args(where)[1]
            continue
        fields = getattr(where, "__dataclass_fields__", {})
        if part not in fields and not isinstance(getattr(where, part, None), property):
            return False
        where = fields[part].type if part in fields else None
    return True


def messages() -> str:
    """Return all text that the code can say: Python's strings, with a blank for what varies, and the shell scripts."""
    files = [*(ROOT / "a3po_megatron").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    strings = [" ".join(_strings(ast.parse(file.read_text(encoding="utf-8")))) for file in files]
    return " ".join([*strings, *(file.read_text(encoding="utf-8") for file in (ROOT / "tools").glob("*.sh"))])


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
