"""Compiles the few files of C where there is a compiler; without one kvstore works as well, only slower."""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("kvstore/transport/memory.c", "server/kvstore_server/table.c")
FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


class CompileC(BuildHookInterface):  # type: ignore[type-arg] # the config is not read
    """Runs before a wheel, or an editable install, is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = shlex.split(os.environ.get("CC", "cc"))
        for source in SOURCES:
            library = Path(source).with_name(f"_{Path(source).stem}.so")
            try:
                subprocess.run([*compiler, *FLAGS, "-o", str(library), source], cwd=self.root, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                Path(self.root, library).unlink(missing_ok=True)
                self.app.display_warning(f"{source} was not compiled, so kvstore will be slower: {error}")
                continue
            build_data["artifacts"].append(str(library))
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
