"""`kvstore demo`: a small model whose prefill, decode and later sessions are processes that share a store."""

from kvstore_server.commands.demo.scenes import run_demo

__all__ = ["run_demo"]
