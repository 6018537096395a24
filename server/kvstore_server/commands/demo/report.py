"""The demo's report, for people and as JSON."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore_server.commands.demo.restart import Restart
    from kvstore_server.commands.demo.scenes import HandOver, Scene, Show

MIB: Final = 1 << 20
TIMELINE_LINES: Final = 6


def as_text(show: "Show") -> str:
    rows = [("scene", "processes", "prompt", "from the store", "first token", "speed-up", "text")]
    for scene in show.scenes:
        rows.append(
            (
                scene.name,
                scene.where,
                f"{scene.answer.num_tokens:,} tokens",
                _source(scene),
                f"{scene.first_token_s:.3f} s",
                "-" if scene.is_cold else f"{scene.cold_first_token_s / scene.first_token_s:.1f}x",
                "the same" if scene.answer.text == scene.reference.text else "DIFFERENT",
            )
        )
    return "\n".join(
        [
            *_table(rows),
            "",
            *_timeline(show.hand_over),
            "",
            *_restart(show.restart, show.after_kill),
            "",
            "Greedy texts",
            *(f"  {scene.name.strip()}: {scene.question} {scene.answer.text!r}" for scene in show.scenes),
            "",
            f"Bytes went by {show.way}.",
            f"In all {show.total_s:.0f} s.",
        ]
    )


def as_document(show: "Show") -> str:
    return json.dumps(
        {
            "scenes": [
                {
                    "name": scene.name.strip(),
                    "processes": scene.where,
                    "question": scene.question,
                    "prompt_tokens": scene.answer.num_tokens,
                    "loaded_tokens": scene.answer.num_loaded_tokens,
                    "loaded_blocks": scene.num_blocks,
                    "followed_blocks": scene.answer.num_followed_blocks,
                    "loaded_bytes": _loaded_bytes(scene),
                    "blocks_from_disk": scene.num_from_disk,
                    "first_token_s": round(scene.first_token_s, 4),
                    "cold_first_token_s": round(scene.cold_first_token_s, 4),
                    "text": scene.answer.text,
                    "same_text_as_cold": scene.answer.text == scene.reference.text,
                    "problem": scene.answer.problem,
                }
                for scene in show.scenes
            ],
            "hand_over": {
                "saved_s": [round(at, 4) for at in show.hand_over.saved_s],
                "loaded_s": [round(at, 4) for at in show.hand_over.loaded_s],
                "layers_loaded_before_the_last_was_saved": show.hand_over.num_early,
            },
            "restart": {
                "signal": "SIGKILL",
                "blocks_written": show.restart.num_written,
                "blocks_restored": show.restart.num_restored,
                "answered_after_s": round(show.restart.answered_after_s, 4),
                "disk_io": show.restart.disk_io,
            },
            "bytes_went_by": show.way,
            "total_s": round(show.total_s, 1),
        },
        indent=2,
    )


def _loaded_bytes(scene: "Scene") -> int:
    return scene.num_blocks * scene.answer.block_bytes


def _source(scene: "Scene") -> str:
    if not scene.num_blocks:
        return "-"
    shown = f"{scene.num_blocks} blocks, {_loaded_bytes(scene) / MIB:.1f} MiB"
    return f"{shown}, from disk" if scene.num_from_disk else shown


def _restart(restart: "Restart", after: "Scene") -> list[str]:
    found_mib = restart.num_restored * after.answer.block_bytes / MIB
    return [
        f"(d) the daemon was killed with kill -9 once all of its {restart.num_written} blocks were on disk",
        f"  started again on the same socket and directory, it answered {restart.answered_after_s:.2f} s later",
        f"  it had found {restart.num_restored} blocks on disk, {found_mib:.1f} MiB, "
        f"and read {after.num_from_disk} of them ({restart.disk_io}) for the new process",
    ]


def _timeline(times: "HandOver") -> list[str]:
    num_layers = len(times.saved_s)
    if len(times.loaded_s) != num_layers:
        return ["(b) no layers were followed"]
    step = max(1, (num_layers - 1) // (TIMELINE_LINES - 1))
    shown = sorted({*range(0, num_layers, step), num_layers - 1})
    rows = [("layer", "prefill handed over", "decode had it")]
    rows += [(str(n), f"{times.saved_s[n]:.3f} s", f"{times.loaded_s[n]:.3f} s") for n in shown]
    return [
        f"(b) by layer: decode had {times.num_early} of {num_layers} before prefill handed over its last",
        *_table(rows),
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["  " + line for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]]
