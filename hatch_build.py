"""Compiles kvstore/transport/memory.c where there is a C compiler; without one kvstore works as well, only slower."""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "kvstore/transport/memory.c"
LIBRARY = "kvstore/transport/_memory.so"


class NativeMemory(BuildHookInterface):  # type: ignore[type-arg] # the config is not read
    """Runs before a wheel, or an editable install, is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = shlex.split(os.environ.get("CC", "cc"))
        flags = ["-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        try:
            subprocess.run([*compiler, *flags, "-o", LIBRARY, SOURCE], cwd=self.root, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            Path(self.root, LIBRARY).unlink(missing_ok=True)
            self.app.display_warning(f"{SOURCE} was not compiled, so copies will be slower: {error}")
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
