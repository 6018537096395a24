"""Finds the few functions that are written in C, where they were compiled (hatch_build.py, docs/adr/0007).

Each has a counterpart in Python beside it, so that kvstore works without a compiler, only slower.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(source: str, function: str, *arguments: Any) -> Callable[..., None] | None:
    """The function that `<source>.c` defines, with arguments of these ctypes; None, if it was not compiled.

    `source` is the path of the module beside it, without its extension. Calls hold no lock of the interpreter.
    """
    path = Path(source)
    try:
        found = getattr(ctypes.CDLL(str(path.with_name(f"_{path.stem}.so"))), function)
    except OSError:
        return None
    found.argtypes, found.restype = arguments, None
    return found  # type: ignore[no-any-return]
