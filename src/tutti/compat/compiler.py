"""Inductor: compiling graphs and C++."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

# Operators that Inductor caches only if it is told that it may: its key contains the code of their sub-graphs.
LOOPS = ("torch.ops.higher_order.scan", "torch.ops.higher_order.while_loop")
LARGE = 1500  # operators: g++ -O3 takes minutes for them, -O2 half a minute
INSTRUCTIONS, HEADER = "vector instructions", "header"
_getting_ready: dict[str, threading.Thread] = {}


def get_compiler_ready(device: torch.device) -> None:
    """Run Inductor's slow one-time setup in the background: detect vector instructions by compiling and running small
    programs and, for a CPU, compile the header of its kernels."""
    from torch._inductor import codecache, cpu_vec_isa  # imported here, not in two threads: slow to import

    def compile_header() -> None:
        _wait_for(INSTRUCTIONS)
        with suppress(Exception):  # a missing compiler is reported where one is needed
            codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], _NOTHING)

    todo = {INSTRUCTIONS: lambda: _find_vector_instructions(cpu_vec_isa), HEADER: compile_header}
    for name, work in todo.items():
        if name not in _getting_ready and not (name == HEADER and device.type != "cpu"):
            _getting_ready[name] = threading.Thread(target=work, name=f"tutti compiler: {name}", daemon=True)
            _getting_ready[name].start()


def use_compilers(count: int) -> None:
    """Run at most so many C++ or Triton compilers beside each other in this process."""
    from torch._inductor import config

    config.compile_threads = count


def _wait_for(name: str) -> None:
    if name in _getting_ready:
        _getting_ready[name].join()


def _find_vector_instructions(cpu_vec_isa: Any) -> None:
    """Inductor compiles a program for each instruction set of a processor, and takes the best. This tries the best
    first, and skips the others if it works."""
    from torch._inductor import config

    here = cpu_vec_isa.x86_isa_checker()
    sets = (x for x in cpu_vec_isa.supported_vec_isa_list if here and all(flag in here for flag in str(x).split()))
    best = next(sets, None)
    if best is not None and config.cpp.vec_isa_ok is None and best.check_build(best._avx_code):
        with config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()  # cached by torch
    cpu_vec_isa.pick_vec_isa()


_NOTHING = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'


def forget_compiled() -> None:
    """Make TorchDynamo compile functions again: those in progress at an error would raise it again."""
    import torch._dynamo
    from torch._dynamo.utils import CleanupManager

    for hooks in list(CleanupManager.instance.values.values()):  # each deletes a global variable, which may not exist
        for hook in hooks:
            hook.scope.setdefault(hook.name, None)
    torch._dynamo.reset_code_caches()


def tell_of_compilation(notify: Callable[[bool], None]) -> None:
    """Call `notify(True)` when torch starts to compile, and `notify(False)` when it is done, until
    `torch.compiler.reset()`. Registers the function only once."""
    from torch._dynamo.callback import callback_handler  # slow to import

    begins, ends = _told_of_compilation.setdefault(notify, (lambda args: notify(True), lambda args: notify(False)))
    if begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begins)
        callback_handler.register_end_callback(ends)


_told_of_compilation: dict[Callable[[bool], None], tuple[Callable, Callable]] = {}


def compile_graph(
    graph: fx.Graph, args: Sequence[torch.Tensor], modules: Mapping[str, torch.nn.Module] | None = None
) -> Callable:
    """Compile a functional ATen graph without gradients with Inductor, for arguments with the shapes, dtypes, strides
    and devices of these. torch caches the result on disk.

    modules: sub-graphs of higher-order operators, by name. If there are any, the wrapper that calls kernels is C++ too.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx  # slow to import

    while _lowerings:
        _lowerings.pop()()
    _wait_for(INSTRUCTIONS)
    fake = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=True))  # without one, torch does not cache on disk
    loops = {"cpp_wrapper": True, "unsafe_marked_cacheable_functions": dict.fromkeys(LOOPS, "1")}
    wrapper = config.patch(loops) if modules else nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    size = sum(len(each.nodes) for each in (graph, *_bodies(modules or {})))
    flags = _flags({"O3": "O2"}) if size > LARGE else nullcontext()
    with torch.no_grad(), tracing(TracingContext(fake)), wrapper, flags:
        with fake:
            examples = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in args]
        return compile_fx(fx.GraphModule(dict(modules or {}), graph), examples)  # pyright: ignore


def _bodies(modules: Mapping[str, torch.nn.Module]) -> Iterator[fx.Graph]:
    for module in modules.values():
        yield from (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))


@contextmanager
def _flags(instead: Mapping[str, str]) -> Iterator[None]:
    """Compile C++ with other optimization flags."""
    from torch._inductor import cpp_builder

    usual = cpp_builder._get_optimization_cflags

    def flags(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(lambda flag: instead.get(flag, flag), usual(*args, **kwargs))

    cpp_builder._get_optimization_cflags = flags
    try:
        yield
    finally:
        cpp_builder._get_optimization_cflags = usual


def lower_to_memory(operator: Any) -> None:
    """Make Inductor store the result of an operator that returns its operand."""

    def lowered(x: Any, number: int = 0) -> Any:
        x.realize()
        return clone(x)

    def register() -> None:
        nonlocal clone
        from torch._inductor import lowering  # slow to import

        clone = lowering.clone
        lowering.register_lowering(operator, type_promotion_kind=None)(lowered)

    clone: Any = None
    _lowerings.append(register)


_lowerings: list[Callable[[], None]] = []  # to register before the first compilation


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 (AVX-512 BF16, also implied by AMX), and the environment does not
    disable that for oneDNN."""
    return torch.cpu._is_avx512_bf16_supported() and not {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys()


def multiplies_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX), and the environment does not disable that."""
    return torch.cpu._is_amx_tile_supported() and multiplies_bfloat16()


def compile_cpp(source: str) -> ctypes.CDLL:
    """Compile a C++ library that may use torch's vectors and products. torch caches the result on disk."""
    from torch._inductor import codecache  # slow to import

    class WithHeader(codecache.CppCodeCache):
        """With Inductor's precompiled header: half the compile time."""

        _get_uncompiled_header = codecache.CppPythonBindingsCodeCache._get_uncompiled_header

    _wait_for(HEADER)
    return WithHeader.load(source)


def compile_operators(source: str, namespace: str = "tutti_compiled") -> Any:
    """Compile C++ that registers operators in a namespace, the macro NAMESPACE. They are called without ctypes, with a
    fifth of its time. Returns the namespace."""
    with _registering:  # a second library with the same operators, made with other options, could not be loaded
        if (namespace, source) not in _registered:
            compile_cpp(f"#define NAMESPACE {namespace}\n{source}")
            _registered.add((namespace, source))
    return getattr(torch.ops, namespace)


_registering, _registered = threading.Lock(), set()
_postponing = threading.Lock()
KERNELS = 4  # kernels per C++ file


@contextmanager
def compilers_beside_each_other() -> Iterator[None]:
    """Defer compilation: functions from `compile_graph` can be called after the block. Compilers run in parallel, one
    per core, and C++ kernels are compiled several to a file."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    here = threading.get_ident()
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    files, written = [_Kernels()], {}

    def postpone(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            waiting.append((self, scope))
        else:
            wait(self, scope)

    def write(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        if threading.get_ident() != here:
            return compile_one(self, argtypes, source_code)
        if (*argtypes, source_code) in written:
            return written[*argtypes, source_code]
        if len(files[-1].kernels) == KERNELS:
            files.append(_Kernels())
        written[*argtypes, source_code] = path = files[-1].write(argtypes, source_code)
        if HEADER not in _getting_ready or not _getting_ready[HEADER].is_alive():
            compile_those_of(KERNELS)
        return path

    def compile_those_of(kernels: int) -> None:
        for file in files:
            if file.library is None and len(file.kernels) >= kernels:
                file.compile()

    with _postponing:
        wait, AsyncCompile.wait = AsyncCompile.wait, postpone
        compile_one, AsyncCompile.cpp_pybinding = AsyncCompile.cpp_pybinding, write
        try:
            yield
        finally:
            AsyncCompile.wait, AsyncCompile.cpp_pybinding = wait, compile_one
    compile_those_of(1)
    for compilers, scope in waiting:
        compilers.wait(scope)
        scope.update({name: x.result() for name, x in scope.items() if isinstance(x, LambdaFuture)})  # in sequence


class _Kernels:
    """A file of Inductor's C++ kernels with their Python bindings, cached on disk. Three quarters of the compile time
    of a single kernel are spent on the header and on linking."""

    def __init__(self) -> None:
        self.kernels: list[tuple[list[str], str]] = []
        self.library: Callable[[], Any] | None = None
        self.alone: list[Callable[[], Callable]] = []

    def write(self, types: list[str], code: str) -> Any:
        """Add a kernel for arguments of these types. `result()` of what it returns is the function."""
        from torch._inductor.codecache import LambdaFuture

        number = len(self.kernels)
        self.kernels.append((types, code))
        return LambdaFuture(lambda: self._function(number))

    def compile(self) -> None:
        """Start the compilation."""
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        named = [self._named(number) for number in range(len(self.kernels))]

        class Library(CppPythonBindingsCodeCache):
            @classmethod
            def _load_library_inner(cls, path: str, key: str) -> Any:
                kernels = [kernel for kernel, _ in named]
                functions = [getattr(k._load_library_inner(path, key), k.entry_function) for k in kernels]
                return SimpleNamespace(functions=functions)

        lines = [line for _, code in named for line in code.splitlines()]
        includes = dict.fromkeys(line.strip() for line in lines if line.lstrip().startswith("#include"))
        rest = [line for line in lines if not line.lstrip().startswith("#include")]
        self.submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        self.library = Library.load_async("\n".join([*includes, *rest, ""]), submit_fn=self.submit)

    def _named(self, number: int) -> tuple[Any, str]:
        """A loader of one kernel from a file of several, and its code."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        name = f"kernel{number}"
        bindings: list[str] = []

        class Kernel(CppPythonBindingsCodeCache):
            entry_function = name
            call_entry_function = CppPythonBindingsCodeCache.call_entry_function.replace("kernel", name)

            @classmethod
            def load_async(cls, code: str, *args: Any, **kwargs: Any) -> Any:
                bindings.append(code)

        types, code = self.kernels[number]
        Kernel.load_pybinding_async(types, "")
        return Kernel, f"#define kernel {name}\n{code}\n#undef kernel\nnamespace of_{name} {{{bindings[0]}}}\n"

    def _function(self, number: int) -> Callable:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.exc import CppCompileError

        assert self.library is not None
        try:
            return self.library().functions[number]
        except CppCompileError:  # some kernels conflict with others in one file
            load = CppPythonBindingsCodeCache.load_pybinding_async
            self.alone = self.alone or [load(*kernel, submit_fn=self.submit) for kernel in self.kernels]
            return self.alone[number]()
