"""docs/faults.md from the tests: `python tests/faults_page.py` writes its table from what docstrings say they cover.

The words for each kind stay as they are in the page; a new id gets a row with `?`, to be filled in.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"
HEAD = "| id | kind | test |\n| --- | --- | --- |\n"
_COVERS = re.compile(r"Covers: ((?:[A-H]\d+(?:, )?)+)")
_ROW = re.compile(r"^\| ([A-H]\d+) \| (.*?) \| .* \|$", re.MULTILINE)


def covered() -> dict[str, list[str]]:
    """Id -> the tests whose docstrings name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = _COVERS.search(ast.get_docstring(node) or "")
                for fault in said[1].split(", ") if said else []:
                    found[fault].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def page_with(found: dict[str, list[str]], page: str) -> str:
    """The page, its table made of these tests."""
    kinds = dict(_ROW.findall(page))
    order = sorted(found, key=lambda fault: (fault[0], int(fault[1:])))
    rows = [f"| {one} | {kinds.get(one, '?')} | {'<br>'.join(f'`{test}`' for test in found[one])} |\n" for one in order]
    before, _, after = page.partition(HEAD)
    return before + HEAD + "".join(rows) + after[after.index("\n\n") + 1 :]


if __name__ == "__main__":
    text = page_with(covered(), PAGE.read_text())
    PAGE.write_text(text)
    sys.stdout.write(f"{PAGE}: {text.count('<br>') + len(_ROW.findall(text))} tests\n")
