"""Octavo: an LLM inference engine built as a microkernel of asynchronous actors.

This file is the package `octavo` itself; its folders (`core`, `policies`, …) are mapped into it by
pyproject.toml. Every process imports it, so it must stay free: what it offers is loaded when it is
first asked for.
"""

from typing import TYPE_CHECKING, Any

if __name__ != "octavo":
    raise ImportError(f"this is the package `octavo`, not {__name__!r}: write `import octavo`")

if TYPE_CHECKING:
    from octavo.core.client.llm import LLM as LLM

    __version__: str

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from octavo.core.client.llm import LLM

        return LLM
    if name == "__version__":
        from importlib import metadata

        return metadata.version("octavo")
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
