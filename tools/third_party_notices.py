"""Write THIRD_PARTY_NOTICES.md: the packages that requirements/cpu.txt installs, with the licences that they state.

    python tools/third_party_notices.py

Reads the metadata of the packages in this Python's environment; run it after `make lock` has changed the list.
"""

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "THIRD_PARTY_NOTICES.md"
MAX_CHARS = 60  # a longer `License` field is a licence's text, not its name
HEAD = """# Third-party notices

<!-- Written by tools/third_party_notices.py from the metadata of the installed packages. -->

This repository contains none of the packages below; `make setup` installs them. Each comes with its own licence, named here as the
package's metadata names it; the text lies in the package's `*.dist-info` folder. Packages for GPUs (`requirements/gpu.txt`), which
include software of NVIDIA under licences of its own, are installed by `tools/setup_gpu.sh` and not listed.

Quoted in this repository: the instructions around the problems of DAPO-Math-17k and GSM8K (`a3po_megatron/data/text.py`,
`a3po_megatron/data/gsm8k.py`), which published models are trained on. No data set and no model weights are part of it.

| package | licence |
|---|---|
"""


def main() -> int:
    """Write the page."""
    argparse.ArgumentParser(prog="third_party_notices.py", description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(HEAD + "".join(f"| {name} | {licence_of(name)} |\n" for name in packages()), encoding="utf-8")
    print(PAGE)
    return 0


def packages() -> list[str]:
    """Return the names of all packages that make up the environment."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    return [re.split(r"[=\[; ]", line)[0] for line in lines if line and not line.startswith(("#", "-"))]


def licence_of(package: str) -> str:
    """Return what a package says of its licence: expression, name or classifiers, else the first line of the text."""
    about = metadata.metadata(package)
    if about.get("License-Expression"):
        return about["License-Expression"]
    stated = (about.get("License") or "").strip()
    if stated and len(stated) <= MAX_CHARS and "\n" not in stated:
        return stated
    classifiers = [line for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    if classifiers:
        return "; ".join(line.split(" :: ")[-1] for line in classifiers)
    files = [file for file in metadata.files(package) or [] if file.name in about.get_all("License-File", [])]
    text = stated or "".join(file.read_text() for file in files[:1]).strip()
    return f"its text begins: {text.splitlines()[0].strip()}" if text else "not stated"


if __name__ == "__main__":
    sys.exit(main())
