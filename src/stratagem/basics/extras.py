"""Optional packages: which `pip install` brings one that is missing."""

from __future__ import annotations

EXTRAS = {
    "cupy": "gpu",
    "transformers": "zoo",
    "ipykernel": "notebook",
    "nbclient": "notebook",
    "nbformat": "notebook",
}
"""The extra of this package that brings each optional module."""


def install_command(module: str) -> str:
    """The command that brings a module of `EXTRAS`.

    Example:
        >>> install_command("cupy")
        "pip install 'stratagem[gpu]'"
    """
    return f"pip install 'stratagem[{EXTRAS[module]}]'"


def install_hint(error: BaseException | None) -> str:
    """The command that brings what an error, or one behind it, says is not installed, if known."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, ImportError) and error.name:
            module = error.name.partition(".")[0]
            if module in EXTRAS:
                return f"{module} is not installed: {install_command(module)}"
        error = error.__cause__ or error.__context__
    return ""
