"""Write docs/configuration.md, the reference of all settings, from the dataclasses in a3po_megatron/config/.

    python tools/config_reference.py

A setting's meaning is the comment above and beside its field, so it is written in one place only. A test holds the page to
what this file writes.
"""

import argparse
import ast
import dataclasses
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, from whichever folder it is started
from a3po_megatron.config.evaluation import EvaluateConfig
from a3po_megatron.config.schema import PretrainConfig, TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
RECIPES = (TrainConfig, PretrainConfig, EvaluateConfig)
HEAD = """# Configuration: every setting

<!-- Written by tools/config_reference.py from a3po_megatron/config/*.py. Change a comment there, then run it again. -->

A run is a YAML file and `section.name=value` on the command line, which comes on top. `recipe` in the file says which of the
three kinds below it is. An unknown name, a value of the wrong type, and values that contradict each other are one line and exit
code 2, before anything starts. `--print-config` prints all settings of a run; the run's folder keeps them as `config.yaml`.
"""


def main() -> int:
    """Write the page."""
    argparse.ArgumentParser(prog="config_reference.py", description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(reference(), encoding="utf-8")
    print(PAGE)
    return 0


def reference() -> str:
    """Return the page: a chapter a recipe, a table a section. A section that stands in several recipes is shown once."""
    shown: dict[type, str] = {}  # section -> where it stands
    for schema in RECIPES:
        for path, section in _sections(schema(), ""):
            shown.setdefault(type(section), path)
    lines = [HEAD]
    for schema in RECIPES:
        lines += [f"## `recipe: {schema().recipe}`", "", str(inspect.getdoc(schema)), "", *_table(schema(), shown)]
        for path, section in _sections(schema(), ""):
            if shown.get(type(section)) == path and f"### `{path}`" not in lines:
                lines += [f"### `{path}`", "", str(inspect.getdoc(type(section))), "", *_table(section, shown)]
    return "\n".join(lines).rstrip() + "\n"


def _sections(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, dataclass) of all sections below `config`, each before those inside it."""
    for field in dataclasses.fields(config):
        name, value = f"{path}.{field.name}".lstrip("."), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield name, value
            yield from _sections(value, name)
        elif get_origin(field.type) is dict:  # of sections by name, empty by default
            entry = get_args(field.type)[1]()
            yield f"{name}.NAME", entry
            yield from _sections(entry, f"{name}.NAME")


def _table(config: Any, shown: dict[type, str]) -> list[str]:
    """Return the table of one section."""
    rows, comments = [], comments_of(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            kind, default = f"section {_link(shown[type(value)])}", _changes(value)
        elif get_origin(field.type) is dict:
            kind, default = f"sections by name: {_link(shown[get_args(field.type)[1]])}", "none"
        else:
            kind, default = _kind(field.type), _value(value)
        rows.append(f"| `{field.name}` | {kind} | {default} | {_text(comments[field.name])} |")
    return ["| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def comments_of(schema: type) -> dict[str, str]:
    """Return the comment of each field: the lines directly above it, then what stands beside it."""
    source = inspect.getsource(schema)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    alone = {line for line in comments if source.splitlines()[line - 1].lstrip().startswith("#")}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = _join(comments[line] for line in lines if line in comments)
    return found


def _join(lines: Iterable[str]) -> str:
    """Return the lines of a comment as one. A line that begins with a choice, `name: ...`, is a part of its own."""
    text = ""
    for line in lines:
        begins_choice = re.match(r"\w+: ", line) and text and text[-1] not in ".,;:"
        text += ("; " if begins_choice else " ") + line
    return text.strip()


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(_value(choice) for choice in get_args(annotation))
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else f"`{annotation}`"


def _value(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else "empty"


def _changes(section: Any) -> str:
    """Return where a section's default differs from that of its own class."""
    own = type(section)()
    names = [field.name for field in dataclasses.fields(section)]
    return ", ".join(
        f"`{name}: {getattr(section, name)}`" for name in names if getattr(section, name) != getattr(own, name)
    )


def _link(path: str) -> str:
    return f"[`{path}`](#{path.replace('.', '').lower()})"


def _text(comment: str) -> str:
    """Return a comment as a cell: bars and angle brackets, which Markdown would take for its own, are escaped."""
    parts = comment.split("`")
    parts[::2] = [part.replace("<", "\\<") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
