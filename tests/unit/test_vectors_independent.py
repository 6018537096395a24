"""The test vectors agree with docs/spec/identity.md, read by code that shares nothing with kvstore."""

import json
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

SPEC_DOCS = Path(__file__).parents[2] / "docs" / "spec"
VECTORS = json.loads((SPEC_DOCS / "vectors.json").read_text(encoding="utf-8"))
NODE = shutil.which("node")

TEXT, UINT, UINTS = 1, 2, 3
FIELDS = [
    (1, TEXT, "model"),
    (2, TEXT, "revision"),
    (3, TEXT, "dtype"),
    (4, UINT, "block_tokens"),
    (5, UINT, "layers"),
    (6, UINT, "ranks"),
    (7, UINTS, "part_bytes"),
    (8, TEXT, "layout"),
    (9, TEXT, "tenant"),
    (10, TEXT, "hash_scheme"),
    (11, TEXT, "adapter"),
    (12, TEXT, "adapter_revision"),
    (13, TEXT, "quantisation"),
    (14, TEXT, "salt"),
]


def integer(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def sized(data: bytes) -> bytes:
    return integer(len(data), 4) + data


def encode(spec: dict[str, Any]) -> bytes:
    encoding = b"kvstore/spec/v1\0"
    for number, kind, name in FIELDS:
        if name in spec:
            value = spec[name]
            if kind == TEXT:
                payload = value.encode("utf-8")
            else:
                payload = b"".join(integer(v, 8) for v in (value if kind == UINTS else [value]))
            encoding += integer(number, 2) + integer(kind, 1) + sized(payload)
    return encoding


def chain(root: bytes, vector: dict[str, Any]) -> list[bytes]:
    hashes: list[bytes] = []
    step, ids = vector["block_tokens"], vector["token_ids"]
    for start in range(0, len(ids) - step + 1, step):
        keys = vector["extra_keys"].get(str(len(hashes)), [])
        message = b"kvstore/block/v1\0" + (hashes[-1] if hashes else root) + integer(step, 4)
        message += b"".join(integer(token, 4) for token in ids[start : start + step]) + integer(len(keys), 4)
        for key in keys:
            message += sized(key["kind"].encode("utf-8")) + sized(bytes.fromhex(key["digest"]))
        hashes.append(sha256(message).digest())
    return hashes


@pytest.mark.parametrize("vector", VECTORS["specs"], ids=lambda vector: vector["name"])
def test_spec_vector_follows_from_the_document(vector: dict[str, Any]) -> None:
    """Covers: A9, G1."""
    encoding = encode(vector["spec"])
    assert encoding.hex() == vector["encoding"]
    assert sha256(encoding).hexdigest() == vector["namespace"]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["name"])
def test_chain_vector_follows_from_the_document(vector: dict[str, Any]) -> None:
    """Covers: A7, G1."""
    spec = next(spec for spec in VECTORS["specs"] if spec["name"] == vector["spec"])
    root = sha256(b"kvstore/root/v1\0" + bytes.fromhex(spec["namespace"])).digest()
    assert root.hex() == vector["root"]
    assert [digest.hex() for digest in chain(root, vector)] == vector["hashes"]


def test_vectors_of_different_specs_and_of_different_chains_never_meet() -> None:
    """Covers: A9, A12. A LoRA adapter and a salt of one name are among them."""
    namespaces = [vector["namespace"] for vector in VECTORS["specs"]]
    assert len(set(namespaces)) == len(namespaces) >= 6
    same_chain = {"one full block", "two full blocks and a rest"}  # both begin as the worked example does
    last = [v["hashes"][-1] for v in VECTORS["chains"] if v["hashes"] and v["name"] not in same_chain]
    assert len(set(last)) == len(last) >= 8


def test_worked_example_of_the_document_hashes_to_the_digests_it_states() -> None:
    text = (SPEC_DOCS / "identity.md").read_text(encoding="utf-8")
    example = text.partition("## 4. ")[2]
    stated = dict(re.findall(r"^(namespace|root|block 0|block 1) +([0-9a-f]{64})$", example, re.MULTILINE))
    blocks = [block for block in example.split("```")[1::2] if "kvstore/" in block]
    digests = [sha256(hex_dump(block)).hexdigest() for block in blocks]
    assert digests == [stated["namespace"], stated["block 0"], stated["block 1"]]
    assert sha256(b"kvstore/root/v1\0" + bytes.fromhex(stated["namespace"])).hexdigest() == stated["root"]
    assert VECTORS["chains"][0]["hashes"] == [stated["block 0"], stated["block 1"]]
    assert f"{len(hex_dump(blocks[0]))} bytes" in example


def hex_dump(block: str) -> bytes:
    """The bytes at the left of each line of a dump; comments stand two blanks to their right."""
    rows = re.findall(r"^((?:[0-9a-f]{2})+(?: (?:[0-9a-f]{2})+)*)(?=  )", block, re.MULTILINE)
    return bytes.fromhex("".join(rows))


@pytest.mark.skipif(NODE is None, reason="node is not on PATH: vectors checked in Python alone")
def test_vectors_agree_with_an_implementation_in_javascript() -> None:
    """Covers: G1."""
    assert run_checker(SPEC_DOCS / "vectors.json") == (0, "")


@pytest.mark.skipif(NODE is None, reason="node is not on PATH: its checker is not tested")
def test_checker_in_javascript_names_a_vector_that_is_wrong(tmp_path: Path) -> None:
    altered = json.loads(json.dumps(VECTORS))
    altered["chains"][3]["hashes"][0] = "00" * 32
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps(altered), encoding="utf-8")
    status, complaint = run_checker(path)
    assert status == 1
    assert complaint.startswith("chain 'one full block', hashes: the file has 0000")


def run_checker(vectors: Path) -> tuple[int, str]:
    assert NODE is not None
    command = [NODE, str(SPEC_DOCS / "check_vectors.mjs"), str(vectors)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.returncode, done.stderr
