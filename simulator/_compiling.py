"""How kernels are compiled: by numba, with indices that count from the front of an array only.

numba takes an index of −1 for the last entry, as Python does, so it compares every signed index
with zero and adds the size of the axis where it is below. Kernels of the simulator and of the
search are made of look-ups and never count from the end; without the comparison, and with the
registers that the sizes held, they are 1.2 to 1.8 times as fast (`python -m benchmarks.indices`).
So types of indices are made unsigned before code is generated. As in C, an index below 0 is out of
bounds then: ``NUMBA_BOUNDSCHECK=1`` makes it an `IndexError`.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from numba import njit
from numba.core import ir, types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.typed_passes import NoPythonSupportedFeatureValidation

F = TypeVar("F", bound=Callable[..., Any])


@register_pass(mutates_CFG=False, analysis_only=False)  # type: ignore[no-untyped-call]
class CountFromFront(FunctionPass):
    """Look up by unsigned integers; nothing is compared where an index is constant."""

    _name = "count_from_front"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run_pass(self, state: Any) -> bool:
        """Change the types of all indices of arrays; return whether there are any."""
        found = False
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                look_up = statement.value if isinstance(statement, ir.Assign) else statement
                is_read = isinstance(look_up, ir.Expr) and look_up.op == "getitem"
                if not is_read and not isinstance(look_up, ir.SetItem):
                    continue
                signature = state.calltypes[look_up]
                if not isinstance(signature.args[0], types.Array):
                    continue
                array, index, *value = signature.args
                del state.calltypes[look_up]  # No entry of it can be replaced.
                state.calltypes[look_up] = signature.replace(args=(array, unsigned(index), *value))
                found = True
        return found


def unsigned(index: Any) -> Any:
    """The type of an index, or of a tuple of indices, with unsigned integers for signed ones."""
    if isinstance(index, types.BaseTuple):
        members: Any = index
        return types.Tuple([unsigned(each) for each in members])  # type: ignore[no-untyped-call]
    if isinstance(index, types.Integer) and not isinstance(index, types.Literal):
        return types.uintp
    return index


class KernelCompiler(CompilerBase):
    """numba's compiler with `CountFromFront`."""

    def define_pipelines(self) -> list[Any]:
        """The passes of numba, and ours when types are final."""
        manager: Any = DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        manager.add_pass_after(CountFromFront, NoPythonSupportedFeatureValidation)
        manager.finalize()
        return [manager]


def kernel(**options: Any) -> Callable[[F], F]:
    """`numba.njit` for kernels, which count from the front.

    With ``cache=True`` what was compiled is kept beside the source, or in the user's cache folder;
    where neither can be written to it is compiled anew in every process, with a warning.
    """

    def compiled(function: F) -> F:
        try:
            made: F = njit(pipeline_class=KernelCompiler, **options)(function)
        except RuntimeError as error:
            if not options.get("cache") or "cannot cache" not in str(error):
                raise
            _warn_not_kept()
            made = njit(pipeline_class=KernelCompiler, **{**options, "cache": False})(function)
        return made

    return compiled


def in_python(compiled: F) -> F:
    """The function that a kernel was compiled from, which Python runs."""
    function: F = compiled.py_func  # type: ignore[attr-defined]
    return function


@cache
def _warn_not_kept() -> None:
    """Once, though there are many kernels."""
    warnings.warn(
        "compiled kernels cannot be kept: neither the folder of this package nor the user's cache "
        "folder can be written to, so every process compiles them again (seconds to a minute); "
        "set NUMBA_CACHE_DIR to a folder that only you can write to",
        stacklevel=2,
    )


uncounted = partial(kernel, _nrt=False)
"""`kernel` without reference counts of arrays: for kernels that are given all of their memory.

A replay reads a few numbers of many arrays. Where numba fails to see that counting is of no use,
which a line more can bring about, it counts at every task, and takes two to four times as long.
"""


def hash_of_sources(*modules: ModuleType) -> int:
    """A number that changes with the source of any of the modules, or with this one.

    numba's cache does not see that a kernel in another file has changed, but it does see the
    values that a kernel closes over. So a kernel that is built on others closes over this.
    """
    every = (sys.modules[__name__], *modules)
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in every)
    return int.from_bytes(hashlib.sha256(sources).digest()[:6])
