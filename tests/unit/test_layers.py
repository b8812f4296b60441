"""The layer rule: who may import whom, no cycles, and no torch on the controller's side."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "a3po_megatron"
# A room imports only from rooms further down. Rooms of one line do not import each other.
ORDER = [
    {"recipes", "tools"},
    {"launch"},
    {"controller"},
    {"evaluate"},
    {"observe"},
    {"convert"},
    {"rollout", "actor"},
    {"batching"},
    {"reward"},
    {"data"},
    {"objective"},
    {"wire", "run_token", "checkpoint_folder", "estimate"},
    {"records"},
    {"config"},
    {"errors"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The actor asks the controller through its link and sends weights through rollout's sender: the two ends of a wire.
WIRE_ENDS = {
    ("actor", f"{PACKAGE}.controller.link"),
    ("actor", f"{PACKAGE}.controller.messages"),
    ("actor", f"{PACKAGE}.rollout.buckets"),
    ("actor", f"{PACKAGE}.rollout.nccl_group"),
    ("actor", f"{PACKAGE}.rollout.rendezvous"),
    ("actor", f"{PACKAGE}.rollout.transfer_group"),
    ("actor", f"{PACKAGE}.rollout.transfer_messages"),
    ("actor", f"{PACKAGE}.rollout.weight_sender"),
}
ENGINES = {"torch", "megatron", "vllm", "transformers"}
ALLOWED_ENGINES = {
    "actor": {"torch", "megatron"},
    "objective": {"torch"},
    "rollout": {"torch", "vllm"},
    "launch": {"torch"},
    "convert": {"torch", "transformers"},
}
MAX_LINES_OF_A_FILE = 310
MAX_LINES_OF_A_FUNCTION = 65
TORCH_FREE = [
    "config.schema",
    "config.load",
    "config.check",
    "records",
    "batching.packing",
    "data.arithmetic",
    "actor.hf_folder",
    "actor.weights_folder",
    "evaluate.build",
    "estimate.plan",
]


def sources() -> list[Path]:
    return [*sorted((ROOT / PACKAGE).rglob("*.py")), *sorted((ROOT / "recipes").glob("*.py"))]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != PACKAGE else parts[1]


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, also inside functions; `from a import b` counts as a.b where b is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in names}
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_below(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(path):
        if not name.startswith(PACKAGE + "."):
            continue
        other = name.split(".")[1]
        assert other in LEVEL, f"{other}: name the new room in ORDER"
        assert other == room or LEVEL[room] < LEVEL[other] or (room, name) in WIRE_ENDS, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_engines_stay_in_their_rooms(path: Path) -> None:
    used = {name.split(".")[0] for name in imports_of(path)} & ENGINES
    assert used <= ALLOWED_ENGINES.get(room_of(path), set()), f"{path.name} imports {used}"


@pytest.mark.parametrize("path", [*sources(), *sorted((ROOT / "tools").glob("*.py"))], ids=lambda path: path.stem)
def test_a_file_says_what_it_does_and_holds_no_function_that_fills_two_screens(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path}: what does it do?"
    assert len(path.read_text().splitlines()) <= MAX_LINES_OF_A_FILE, f"{path}: which second idea moved in?"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_LINES_OF_A_FUNCTION, f"{path}: {node.name}"


def test_there_is_no_import_cycle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()
    }
    graph = {module: imports_of(path) & modules.keys() for module, path in modules.items()}
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way, module])
        if module not in done:
            for other in graph[module]:
                walk(other, (*way, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_the_controller_side_imports_no_engine() -> None:
    names = ", ".join(f"{PACKAGE}.{name}" for name in TORCH_FREE)
    code = f"import sys, {names}; print([m for m in {sorted(ENGINES)} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
