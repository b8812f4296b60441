"""The documentation says what is so: commands parse, files, settings and messages exist, generated pages are up to date."""

import argparse
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from a3po_megatron.config.data import DataConfig
from a3po_megatron.config.evaluation import EvaluateConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import PretrainConfig, TrainConfig
from tests.unit.docs.pages import (
    PAGES,
    ROOT,
    Command,
    anchors,
    blocks,
    commands,
    exists,
    links,
    messages,
    settings,
    shows,
)
from tests.unit.test_layers import ORDER
from tools import config_reference, third_party_notices

COMMANDS = sorted(set(map(str, commands())))
BY_TEXT = {str(command): command for command in commands()}
SCHEMAS: dict[str, Any] = {"evaluate": EvaluateConfig, "pretrain": PretrainConfig, "prepare_data": DataConfig}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def each_command(part: str) -> pytest.MarkDecorator:
    """Run a test for each command that has `part` in it."""
    return pytest.mark.parametrize("text", [text for text in COMMANDS if part in text], ids=lambda text: text[:90])


class Parsed(BaseException):
    """A script has read its command line; it is not to go on."""


def test_the_reference_of_settings_is_what_the_dataclasses_say() -> None:
    page = config_reference.PAGE.read_text(encoding="utf-8")
    assert page == config_reference.reference(), "run python tools/config_reference.py"


def test_the_notices_name_every_installed_package_and_its_licence() -> None:
    page = third_party_notices.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| (.+) \|$", page, re.MULTILINE)[1:]
    assert [name for name, _ in rows] == third_party_notices.packages(), "run python tools/third_party_notices.py"
    assert third_party_notices.licence_of("torch") == dict(rows)["torch"]


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@each_page
def test_every_file_that_is_named_is_there(page: Path) -> None:
    folders = "a3po_megatron|recipes|tools|tests|configs|slurm|docs|containers|requirements"
    rooms = "|".join(path.parent.name for path in (ROOT / "a3po_megatron").glob("*/__init__.py"))
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.\-])((?:{folders})/[\w./\-]*\w(?:\*|/)?)", text)
    named += [f"a3po_megatron/{name}" for name in re.findall(rf"(?<![\w/.\-])((?:{rooms})/\w+\.py)", text)]
    missing = {
        name for name in named if not any(ROOT.glob(name.rstrip("/"))) and not re.search(r"[A-Z]{3}|/models/", name)
    }
    assert missing <= {"slurm/site.env"}


@each_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    assert [name for name in settings(page.read_text(encoding="utf-8")) if not exists(name)] == []


@each_page
def test_every_block_of_settings_loads(page: Path, tmp_path: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
        (tmp_path / "config.yaml").write_text(block)
        load_config(TrainConfig, tmp_path / "config.yaml")


def test_every_message_of_the_troubleshooting_page_can_be_said() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    told = [code for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for code in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip(" ;,'=") for code in told if " " in code for part in code.split("...")]
    said = messages()
    assert len(parts) > 40
    assert [part for part in parts if part not in said] == []


def test_the_layers_on_the_page_are_those_that_are_tested() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = blocks(page.split("## Layers")[1], "")
    assert [set(line.split("  ")[0].split(", ")) for line in table.splitlines()] == ORDER


def test_what_a_command_says_is_shown_right_below_it_or_not_at_all() -> None:
    """As tests/system/test_docs.py asks where a command ends with exit code 2."""
    page = "```\n$ python one.py \\\n    --two\nerror: no\nsuch file\n```\n\n```\npython three.py\n```\n"
    one, three = (Command("page.md", line, {}, ()) for line in ("python one.py  --two", "python three.py"))
    assert shows(page, one, "error: no such\nfile\n")
    assert not shows(page, one, "error: no file\n")
    assert not shows(page, one, "")
    assert not shows(page, three, "error: no such file\n")


@each_command("python")
def test_every_python_command_parses_and_its_settings_load(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = BY_TEXT[text]
    words = [{"N": "4"}.get(word, word) for word in command.words[1:]]
    if words[:1] == ["-m"]:
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    if not words[0].startswith(("recipes/", "tools/")):
        return
    options = parse(words, monkeypatch)
    given = getattr(options, "overrides", getattr(options, "settings", []))
    file = getattr(options, "config", None) or getattr(options, "what", None)
    is_there = file is not None and str(file).endswith(".yaml") and not re.search(r"[A-Z]{3}", str(file))
    schema = SCHEMAS.get(Path(words[0]).stem, TrainConfig)
    load_config(schema, ROOT / file if is_there else None, given)


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return what a script understands of its command line; it does not come to do anything."""

    def and_stop(method: Any) -> Any:
        def parse_and_stop(*arguments: Any) -> None:
            raise Parsed(method(*arguments))

        return parse_and_stop

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, and_stop(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    return parsed.value.args[0]


@each_command("slurm/")
def test_every_job_of_a_page_exists_with_its_variables_and_settings(text: str) -> None:
    command = BY_TEXT[text]
    variables = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in variables for name in command.variables)
    script, *arguments = [word for word in command.words if word not in ("bash", "sbatch", "source", "cp")]
    assert (ROOT / script).is_file() or script == "slurm/site.env"
    default = re.search(r'CONFIG:=([^}"]+)', (ROOT / script).read_text()) if script.endswith(".sh") else None
    if default:
        config = command.variables.get("CONFIG", default[1])
        load_config(TrainConfig, ROOT / config, [word for word in arguments if word != "--dry-run"])


@each_command(": make ")
def test_every_target_of_make_exists(text: str) -> None:
    targets = {word for word in BY_TEXT[text].words[1:] if "=" not in word}
    makefile = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    known |= {f"test-{part}" for part in re.findall(r"^PARTS := (.*)", makefile, re.MULTILINE)[0].split()}
    assert targets <= known


def test_the_readme_is_finished_and_its_reading_order_has_six_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"^@\w+@$", readme, re.MULTILINE)
    order = readme.split("## Six files")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d\. \[`[\w/]+\.py`\]", order, re.MULTILINE)) == 6
    assert {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"} <= set(links(readme))
