"""What importing the client costs, and what it must not bring along."""

import json
import subprocess
import sys


def modules_after(statement: str) -> list[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names: list[str] = json.loads(done.stdout)
    return names


def test_importing_the_client_brings_neither_engine_nor_server() -> None:
    unwanted = {"cupy", "torch", "transformers", "vllm", "nixl", "nixl_cu12", "kvstore_server", "structlog", "click"}
    loaded = {name.partition(".")[0] for name in modules_after("import kvstore_client")}
    assert "kvstore_client" in loaded
    assert not loaded & unwanted


def test_grpc_is_imported_when_a_client_connects_and_not_before() -> None:
    assert "grpc" not in modules_after("import kvstore_client")


def test_importing_the_client_brings_no_adapter() -> None:
    assert not [name for name in modules_after("import kvstore_client") if "adapters" in name]


def test_every_public_name_is_there() -> None:
    import kvstore_client

    assert sorted(kvstore_client.__all__) == kvstore_client.__all__
    assert all(hasattr(kvstore_client, name) for name in kvstore_client.__all__)
