"""How kernels are compiled: by numba, with indices that count from the front of an array only.

numba takes an index of −1 for the last entry, as Python does, so it compares every signed index
with zero and adds the size of the axis where it is below. Kernels of the simulator and of the
search are made of look-ups and never count from the end; without the comparison, and with the
registers that the sizes held, they are 1.2 to 1.8 times as fast (`python -m benchmarks.indices`).
So types of indices are made unsigned before code is generated. As in C, an index below 0 is out of
bounds then: ``NUMBA_BOUNDSCHECK=1`` makes it an `IndexError`.

Nothing is done twice that would be thrown away. A kernel that only kernels call is optimised, and
made machine code, as a part of those (`InnerLibrary`); numba does both for each by itself, too.
Where several processes need a kernel, one compiles it and the others wait (`KernelCache`). What
little is asked of a kernel before it is compiled, Python does (`PythonTier`).
"""

from __future__ import annotations

import hashlib
import pickle
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from numba import njit
from numba.core import ir, types
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.environment import lookup_environment
from numba.core.typed_passes import NoPythonSupportedFeatureValidation

Given = ParamSpec("Given")
Found = TypeVar("Found", covariant=True)


class CompiledKernel(Protocol[Given, Found]):
    """A compiled function; `py_func` is the one that it is made of."""

    py_func: Callable[..., Any]
    overloads: Any

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Run it."""


LONGEST_WAIT = 120.0
"""Seconds for another process to compile a kernel in: none takes half as long."""
PATIENCE = 0.2
"""Seconds that Python may spend on calls of a kernel, all together, before it is compiled."""
MOST_STEPS = 200_000
"""Of a call that Python does, at about half a microsecond each."""
UNREADABLE = AttributeError, ImportError, EOFError, pickle.UnpicklingError
"""What reading a kept kernel raises where it was written by code that named what is no more."""
ENVIRONMENT_OF, WRAPPER = "_ZN08NumbaEnv", "_ZN7cpython"
"""How names begin of what numba keeps for a function that raises or calls Python, and of the
function by which Python calls it."""
PACKAGE = __name__.partition(".")[0]
"""Modules of it are looked into where a kernel refers to what is in them."""


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


class KernelFlags(Flags):
    """numba's options of a compilation, compared by those that are set.

    It looks every called function up by them, and compares all 27 each time: their hash is one and
    the same. That was a seventh of the seconds that it took to compile what a search runs.
    """

    __slots__ = ()
    _HASH = hash(Flags())  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        return self._HASH

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flags):
            return NotImplemented
        ours, theirs = self._values, other._values
        return ours == theirs or all(
            getattr(self, name) == getattr(other, name) for name in ours.keys() | theirs.keys()
        )


class OuterLibrary(JITCodeLibrary):
    """The code of a kernel that Python calls, with that of all kernels in it.

    Each function is simplified by itself, as numba does it; then all of it is optimised once,
    together. What takes apart the arguments is long, runs once a call, and is left as it is.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
        for function in ll_module.functions:
            if not function.name.startswith(WRAPPER):
                passes, builder = self._codegen._function_pass_manager()  # type: ignore[no-untyped-call]
                passes.run(function, builder)

    def _finalize_specific(self) -> None:
        codegen: Any = self._codegen
        super()._finalize_specific()  # type: ignore[no-untyped-call]
        for each in self._final_module.global_variables:
            environment = None
            if each.name.startswith(ENVIRONMENT_OF):
                environment = lookup_environment(each.name)  # type: ignore[no-untyped-call]
            if environment is not None:
                codegen.set_env(each.name, environment)


class InnerLibrary(OuterLibrary):
    """The code of a kernel that only kernels call, which take it in as it is.

    No machine code is made of it, so it has no address.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._verify_declare_only_symbols()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0: there is none."""
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        return 0

    @property
    def codegen(self) -> Any:
        """For numba, which gives the kernel its environment: it is in its callers' code."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Leave it to `OuterLibrary`."""


class KernelCompiler(CompilerBase):
    """numba's compiler with `CountFromFront`, and libraries of our own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)  # type: ignore[no-untyped-call]
        self.state.flags = KernelFlags(self.state.flags)  # type: ignore[no-untyped-call]

    def define_pipelines(self) -> list[Any]:
        """The passes of numba, and ours when types are final."""
        state = self.state
        made: Any = InnerLibrary if state.flags.no_cpython_wrapper else OuterLibrary
        state.library = made(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        manager: Any = DefaultPassBuilder.define_nopython_pipeline(self.state)  # type: ignore[no-untyped-call]
        manager.add_pass_after(CountFromFront, NoPythonSupportedFeatureValidation)
        manager.finalize()
        return [manager]


class KernelCache(FunctionCache):
    """numba's cache of a kernel, under a key that says what it is made of.

    numba itself looks at the file of the kernel only, and would go on with the old one where a
    kernel that it calls, or a constant, has changed in another.

    Processes that need the same kernel at the same time wait for the first to compile it, instead
    of each taking the seconds, and a core, that it takes.
    """

    @cached_property
    def _turn(self) -> Any:
        """Held by who compiles. Most processes find all compiled, and need none."""
        from filelock import FileLock

        beside = Path(self.cache_path) / f"{self._impl.filename_base}.lock"
        return FileLock(beside, timeout=LONGEST_WAIT)

    @cached_property
    def fingerprint(self) -> str:
        """A short name for the kernel's code, and for all code and constants that it refers to."""
        parts = [Path(__file__).read_bytes()]
        _describe(self._py_func, set(), parts)
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    @property
    def is_kept(self) -> bool:
        """Whether something was compiled of the kernel as it is."""
        with suppress(OSError, *UNREADABLE):
            kept: Any = self._cache_file
            return any(self.fingerprint in key for key in kept._load_index())
        return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled; None where nothing was, or by code that named what is no more.

        numba reads its list of what was compiled before it sees that the source is another. Types
        of arguments stand in there, and a class that was renamed could not be found.
        """
        found = self._loaded(sig, target_context)
        if found is not None or self._turn.is_locked:
            return found
        with suppress(OSError):  # After the longest wait, or where none can be locked.
            self._turn.acquire()
            found = self._loaded(sig, target_context)
            if found is not None:
                self._turn.release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, and let other processes have it."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        finally:
            self._turn.release()

    def watched(self, compiling: Callable[..., Any]) -> Callable[..., Any]:
        """Compiling that lets others try where it fails, or is interrupted."""

        def compiled(*given: Any) -> Any:
            try:
                return compiling(*given)
            except BaseException:
                self._turn.release()
                raise

        return compiled

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except UNREADABLE:
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), self.fingerprint)  # type: ignore[no-untyped-call]


def _describe(value: Any, seen: set[int], parts: list[bytes]) -> None:
    """Add what a kernel, or something that one refers to, is made of."""
    function = getattr(value, "py_func", value)
    if not isinstance(function, FunctionType):
        fields = getattr(value, "_fields", None)
        parts.append(repr(fields if isinstance(value, type) and fields else value).encode())
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    names: set[str] = set()
    _describe_code(function.__code__, names, parts)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    for name in sorted(names & known.keys()):
        parts.append(name.encode())
        if not isinstance(known[name], ModuleType):
            _describe(known[name], seen, parts)
        elif known[name].__name__.startswith(PACKAGE):
            for inside in sorted(names & vars(known[name]).keys()):
                _describe(vars(known[name])[inside], seen, parts)


def _describe_code(code: CodeType, names: set[str], parts: list[bytes]) -> None:
    """Add code and its constants, with those of functions inside; collect the names it uses."""
    parts.append(code.co_code)
    names.update(code.co_names, code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _describe_code(constant, names, parts)
        else:
            parts.append(repr(constant).encode())


@cache
def _warn_not_kept() -> None:
    """Once, though there are many kernels."""
    warnings.warn(
        "compiled kernels cannot be kept: neither the folder of this package nor the user's cache "
        "folder can be written to, so every process compiles them again (seconds to a minute); "
        "set NUMBA_CACHE_DIR to a folder that only you can write to",
        stacklevel=2,
    )


def in_python(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """A kernel's function with the functions of all kernels that it calls, to run in Python.

    Example:
        >>> import numpy as np
        >>> int(in_python(lambda array, index: array[index])(np.array([3, 4]), 1))
        4
    """
    found: Callable[Given, Found] = _in_python(function, {})
    return found


def _in_python(function: Any, known: dict[int, Any]) -> Any:
    found = known.get(id(function))
    if found is None:
        within = dict(function.__globals__)
        named, given = function.__name__, function.__defaults__
        found = FunctionType(function.__code__, within, named, given, function.__closure__)
        known[id(function)] = found
        names: set[str] = set()
        _describe_code(function.__code__, names, [])
        for name in names & within.keys():
            if hasattr(within[name], "py_func"):
                within[name] = _in_python(within[name].py_func, known)
    return found


class PythonTier:
    """Lets Python do small calls of a kernel that nothing was compiled of, until they add up.

    numba asks an instance what to call where it has compiled nothing for the types of arguments.
    To compile what a prediction needs takes six seconds, and Python does it in a fifth of one.

    Args:
        made: the kernel.
        cache: knows whether it was compiled before.
        steps: about how many steps a call takes, given its arguments.
    """

    def __init__(self, made: Any, cache: KernelCache, steps: Callable[..., float]) -> None:
        self._compile, self._function = made._compile_for_args, made.py_func
        self._cache, self._steps = cache, steps
        self._spent = 0.0

    def __call__(self, *given: Any) -> Callable[..., Any]:
        """What to call with these arguments."""
        if self._spent > PATIENCE or self._steps(*given) > MOST_STEPS or self._cache.is_kept:
            compiled: Callable[..., Any] = self._compile(*given)
            return compiled
        return self._run

    @cached_property
    def _python(self) -> Callable[..., Any]:
        return in_python(self._function)

    def _run(self, *given: Any) -> Any:
        begun = time.perf_counter()
        with np.errstate(all="ignore"):  # As compiled code does.
            found = self._python(*given)
        self._spent += time.perf_counter() - begun
        return _plain(found)


def _plain(found: Any) -> Any:
    """What compiled code gives back: numbers of Python, also in tuples."""
    if isinstance(found, np.generic):
        return found.item()
    if isinstance(found, tuple):
        made = [_plain(each) for each in found]
        return type(found)(*made) if hasattr(found, "_fields") else tuple(made)
    return found


def kernel(
    *,
    cache: bool = False,
    inner: bool = False,
    steps: Callable[..., float] | None = None,
    **options: Any,
) -> Callable[[Callable[Given, Found]], CompiledKernel[Given, Found]]:
    """`numba.njit` for kernels, which count from the front.

    What was compiled is kept beside the source with ``cache=True``, or in the user's cache
    folder, see `KernelCache`; where neither can be written to it is compiled anew in every
    process, with a warning.

    Of an ``inner`` kernel, which only kernels call, nothing is made that Python could call: to
    take its arguments apart is a good part of what a kernel of many arrays takes to compile.
    Calling one from Python is a `TypeError`.

    Where it is said how many `steps` a call takes, given its arguments, few are done by Python
    while nothing was compiled and kept (with ``cache``), see `PythonTier`.

    Example:
        >>> import numpy as np
        >>> kernel()(lambda array, index: array[index])(np.array([3, 4]), 1)
        4
    """

    options |= {"no_cpython_wrapper": inner, "no_cfunc_wrapper": True}

    def compiled(function: Callable[Given, Found]) -> CompiledKernel[Given, Found]:
        made: Any = njit(pipeline_class=KernelCompiler, **options)(function)
        is_python = not hasattr(made, "overloads")  # as with NUMBA_DISABLE_JIT
        if inner and not is_python:
            _refuse_python(made)
        if cache and not is_python:
            try:
                made._cache = KernelCache(function)  # type: ignore[no-untyped-call]
                made._compiler.compile = made._cache.watched(made._compiler.compile)
                if steps is not None:
                    made._compile_for_args = PythonTier(made, made._cache, steps)
            except RuntimeError as error:
                if "cannot cache" not in str(error):
                    raise
                _warn_not_kept()
        wrapped: CompiledKernel[Given, Found] = made
        return wrapped

    return compiled


def is_compiled(of: CompiledKernel[Given, Found]) -> bool:
    """Whether a kernel was compiled, here or by another process; True if none is to keep it.

    Example:
        >>> is_compiled(kernel()(lambda array, index: array[index]))
        True
    """
    cache = getattr(of, "_cache", None)
    return not isinstance(cache, KernelCache) or bool(of.overloads) or cache.is_kept


def _refuse_python(made: Any) -> None:
    """Let a call from Python raise, which numba would go through with and end the process."""

    def keep(compiled: Any) -> None:
        made.overloads[tuple(compiled.signature.args)] = compiled

    def refuse(*_: Any, **__: Any) -> None:
        name = made.py_func.__name__
        raise TypeError(f"{name} is an inner kernel: call what calls it, or {name}.py_func")

    made.add_overload, made._compile_for_args = keep, refuse


uncounted = partial(kernel, _nrt=False)
"""`kernel` without reference counts of arrays: for kernels that are given all of their memory.

A replay reads a few numbers of many arrays. Where numba fails to see that counting is of no use,
which a line more can bring about, it counts at every task, and takes two to four times as long.
"""
