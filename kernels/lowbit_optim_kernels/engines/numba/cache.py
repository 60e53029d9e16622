"""C functions that Numba compiles, and that `module_cache` keeps.

Numba's own disk cache unpickles what anybody may have written, a damaged file ends every later
process, a full disk ends the step that compiles, and to load a function it imports what its
compiler needs. So what is kept is machine code alone, as LLVM gave it for one function with all
that it calls: a process that finds it links it, and its compiler stays asleep. Each has a linker of
its own, in which names of two processes cannot meet. `module_cache` has checked the file before.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import config
from numba.core.codegen import initialize_llvm
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ...codegen import module_cache
from ...uninterrupted import uninterrupted
from .vector import host_features


class CFunction:
    """A C function `void f(int64)`.

    Attributes:
        address: where it is.
        ctypes: what calls it from Python, without the interpreter's lock.
    """

    def __init__(self, name: str, address: int, owner: object) -> None:
        self.__name__, self.address = name, address
        self.ctypes = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
        self._owner = owner  # of the memory that the function is in


@cache
def processor() -> str:
    """The target of machine code: LLVM's names of the system, the processor and its features."""
    name = vars(config)["CPU_NAME"] or llvm.get_host_cpu_name()
    return repr((llvm.get_process_triple(), name, host_features()))


_made: dict[str, CFunction] = {}

module_cache.hold_at_forks(global_compiler_lock)


def c_function(module: ModuleType, name: str) -> CFunction:
    """The C function of a generated module's function of an int64; loaded, or else compiled."""
    system = hashlib.sha256(processor().encode()).hexdigest()[:24]
    key = f"{module.__name__}.{name}.{system}"  # the module's name says all else
    return _made.get(key) or uninterrupted(_make, module, name, key)


@global_compiler_lock
def _make(module: ModuleType, name: str, key: str) -> CFunction:
    if key not in _made:
        kept = module_cache.load(key)
        found = None if kept is None else _linked(kept)
        _made[key] = CFunction(name, *(found or _compiled(getattr(module, name), key)))
    return _made[key]


def _linked(kept: bytes) -> tuple[int, object] | None:
    """The address of a function that was kept; None if it needs what this process has not."""
    head, _, code = kept.partition(b"\0")
    symbol, *needed = head.decode().split()
    if not all(llvm.address_of_symbol(one) for one in needed):
        return None
    initialize_llvm()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    by_llvmlite = vars(config)["USE_LLVMLITE_MEMORY_MANAGER"]
    linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=by_llvmlite)
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    return linker.get_function_address(symbol), linker


def _flags() -> Any:
    """Numba's settings: neither wrappers, which ask Python to report errors, nor code as yet."""
    flags: Any = Flags()
    flags.error_model, flags.nrt = "numpy", True
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    return flags


def _compiled(function: FunctionType, key: str) -> tuple[int, object]:
    """The address of a function that is compiled now, and kept."""
    typing, target = cpu_target.typing_context, cpu_target.target_context
    made: Any = compile_extra(typing, target, function, (types.int64,), types.void, _flags(), {})
    symbol = made.fndesc.llvm_cfunc_wrapper_name  # unlike any other of this process
    _add_entry(symbol, made.library, made.fndesc)
    address = made.library.get_pointer_to_function(symbol)
    _keep(key, symbol, made)
    return address, made


def _add_entry(symbol: str, library: Any, described: Any) -> None:
    """Add a C function that calls Numba's; functions of this engine end without errors."""
    context = cpu_target.target_context
    module = context.create_module("entry")
    function = context.declare_function(module, described)
    function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    entry = ir.Function(module, function_type, symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    context.call_conv.call_function(builder, function, types.void, (types.int64,), entry.args)
    builder.ret_void()
    library.add_ir_module(module)


def _keep(key: str, symbol: str, made: Any) -> None:
    # Code with addresses of this process in it; none of ours, unless a helper goes wrong.
    if made.library.has_dynamic_globals or made.reload_init:
        return
    code, _ = made.library.serialize_using_object_code()[2]
    functions = made.library._final_module.functions
    needed = [f.name for f in functions if f.is_declaration and not f.name.startswith("llvm.")]
    module_cache.store(key, " ".join([symbol, *needed]).encode() + b"\0" + code)
