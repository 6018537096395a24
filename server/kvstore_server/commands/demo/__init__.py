"""`kvstore demo`: a small model whose prefill, decode and next session are processes that share the store."""

from kvstore_server.commands.demo.scenes import run_demo

__all__ = ["run_demo"]
