"""All uses of torch's private API, in one file, so that a torch release is checked by reading one file.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import sys
import sysconfig
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import signature
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._decomp.decompositions import native_batch_norm_decomposition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, autograd_would_have_decomposed

# Operators whose schema hides that they write an argument -> variants that declare it.
HONEST = {torch.ops.aten.native_batch_norm.default: native_batch_norm_decomposition}

# Raised if tracing needs the values of a tensor, for a Python number or a shape.
ValuesNeeded = (DataDependentOutputException, DynamicOutputShapeException)

# Renamed in 2.13, which warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # pyright: ignore


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of groups of rows of `a` with the matrices of `b`, or, if `b` is one matrix, of groups of columns of `a`
    with groups of its rows. ends: the end of each group, int32."""
    return _grouped(a, b, offs=ends)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and dtypes but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def decomposition(operator: Any, args: Sequence) -> Callable | None:
    """The decomposition that autograd would use, or None. In inference mode autograd is not asked."""
    if operator not in _composed:
        _composed[operator] = operator._can_decompose()
    composed = _composed[operator] and autograd_would_have_decomposed(operator, pytree.tree_leaves(args))
    return operator.decompose if composed else None


_composed: dict[Any, bool] = {}


@contextmanager
def computing_really() -> Iterator[None]:
    """Compute on real tensors, without gradients or casts, even while fake tensors are traced."""
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():  # pyright: ignore
        yield


@contextmanager
def apart() -> Iterator[None]:
    """The enclosing fake tensor mode, without the trace in progress."""
    mode = detect_fake_mode()
    assert mode is not None, "called outside of fake tensors"
    with _disable_current_modes(), mode:
        yield


def of_packed_sequences(name: str) -> Callable:
    """The function that `torch.nn.utils.rnn` calls."""
    return getattr(torch._C._VariableFunctions, name)  # pyright: ignore[reportAttributeAccessIssue]


def without_function_modes() -> Any:
    """Call functions of torch directly, ignoring function modes."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def eager_models() -> Iterator[None]:
    """Models and functions under `torch.compile` run as plain Python."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def checkpoint_regions(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Make `torch.utils.checkpoint` run its functions once, between `enter` and `leave`, without recomputation."""
    import torch.utils.checkpoint as checkpoint

    def without_reentrance(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    class Reentrant:
        @staticmethod
        def apply(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                leave()

    before = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = without_reentrance  # pyright: ignore
    checkpoint.CheckpointFunction = Reentrant  # pyright: ignore
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = before


def is_custom(grad_fn: Any) -> bool:
    """Whether an autograd node belongs to a `torch.autograd.Function`."""
    return isinstance(grad_fn, torch.autograd.function.BackwardCFunction)


def hooks_on(parameter: torch.Tensor) -> tuple[list[Callable], list[Callable]]:
    """The hooks on a tensor's gradient: those of `register_hook`, and of `register_post_accumulate_grad_hook`."""
    found = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # pyright: ignore
    before, after = (list(hooks.values()) if hooks else [] for hooks in found)
    return before, after


def autograd_clock() -> int:
    """The sequence number that the next autograd node will get."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def born_at(grad_fn) -> int:
    """The sequence number that `grad_fn` got when the forward pass made it."""
    return grad_fn._sequence_nr()


def in_backward_order(root) -> list:
    """All autograd nodes that the backward pass from `root` can reach, each once."""
    seen, stack = {root}, [root]
    while stack:
        for parent, _ in stack.pop().next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return list(seen)


def operators(namespace: str) -> list:
    """The overloads of all registered operators of a namespace."""
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), name, None) if space == namespace else None
        if packet is not None and (overload or "default") in packet.overloads():
            found.append(getattr(packet, overload or "default"))
    return found


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped, so that learning-rate schedulers do not warn."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Callable]]:
    """The hooks that `optimizer.step()` runs, each with the function that registered it.

    The hook of torch.profiler is left out: it only counts steps.
    """
    every = (
        ("register_optimizer_step_pre_hook", _global_optimizer_pre_hooks),
        ("register_optimizer_step_post_hook", _global_optimizer_post_hooks),
        ("register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("register_step_post_hook", optimizer._optimizer_step_post_hooks),
    )
    for registered_by, hooks in every:
        yield from ((registered_by, x) for x in hooks.values() if getattr(x, "__module__", "") != "torch.profiler")


def unhooked(method: Any) -> Any:
    """A step method without the wrapper that runs hooks, which torch installs in the class at its first instance."""
    return method.__wrapped__ if getattr(method, "__code__", None) is _RUNS_HOOKS else method


_RUNS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def counts_calls(method: Any, of: Any) -> bool:
    """Whether `method` is `of`, a method of an optimizer class, wrapped by a learning-rate scheduler."""
    return hasattr(method, "_wrapped_by_lr_sched") and unhooked(method.__wrapped__) is unhooked(of)


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


def tell_of_compilation(told: Callable[[bool], None]) -> None:
    """Call `told(True)` when torch starts to compile, and `told(False)` when it is done, until
    `torch.compiler.reset()`. Registers the function only once."""
    from torch._dynamo.callback import callback_handler  # slow to import

    begins, ends = _told_of_compilation.setdefault(told, (lambda args: told(True), lambda args: told(False)))
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

    _wait_for(INSTRUCTIONS)
    fake = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=True))  # without one, torch does not cache on disk
    wrapper = config.patch(cpp_wrapper=True) if modules else nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad(), tracing(TracingContext(fake)), wrapper:
        with fake:
            given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in args]
        return compile_fx(fx.GraphModule(dict(modules or {}), graph), given)  # pyright: ignore


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 (AVX-512 BF16, also implied by AMX), and the environment does not
    disable that for oneDNN."""
    return torch.cpu._is_avx512_bf16_supported() and not {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys()


def compile_cpp(source: str) -> ctypes.CDLL:
    """Compile a C++ library that may use torch's vectors and products. torch caches the result on disk."""
    from torch._inductor import codecache  # slow to import

    class WithHeader(codecache.CppCodeCache):
        """With Inductor's precompiled header: half the compile time."""

        _get_uncompiled_header = codecache.CppPythonBindingsCodeCache._get_uncompiled_header

    _wait_for(HEADER)
    return WithHeader.load(source)


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
        written[*argtypes, source_code] = made = files[-1].write(argtypes, source_code)
        if HEADER not in _getting_ready or not _getting_ready[HEADER].is_alive():
            compile_those_of(KERNELS)
        return made

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
                made = [getattr(k._load_library_inner(path, key), k.entry_function) for k in kernels]
                return SimpleNamespace(functions=made)

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


def job_store(prefix: str) -> Any:
    """A separate connection to the store of this job, so that threads do not block each other."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())  # pyright: ignore


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory, for asynchronous GPU copies, as long as this tensor lives.

    torch's own pinned memory is allocated in powers of two, which wastes up to half. Raises RuntimeError if the system
    refuses.
    """
    cuda: Any = torch.cuda.cudart()
    place = memory.data_ptr()
    error = cuda.cudaHostRegister(place, memory.nbytes, 0)
    if int(error):
        raise RuntimeError(f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {int(error)}): "
                           "store less on tier host, or raise the limit of locked memory (ulimit -l)")  # fmt: skip
    weakref.finalize(memory, cuda.cudaHostUnregister, place).atexit = False


# Settings of TorchDynamo that preserve the behaviour of plain Python.
AS_PYTHON: dict[str, Any] = {
    "suppress_errors": True,  # code that cannot be traced runs as plain Python
    "skip_nnmodule_hook_guards": False,  # hooks may change between calls
    "trace_numpy": False,  # keep numpy's numerics and random numbers
    "rewrite_assert_with_torch_assert": False,  # AssertionError, not RuntimeError
    "allow_unspec_int_on_nn_module": True,  # a module may have a counter
}

LIMIT = "recompile limit exceeded"  # in TorchDynamo's reason


@dataclass(frozen=True)
class GraphBreak:
    """Where TorchDynamo left the graph, in the innermost user frame. whole: it gave up the function."""

    reason: str
    file: str
    line: int
    function: str
    whole: bool = False


@dataclass(frozen=True)
class Recompiled:
    """A function that TorchDynamo compiled again, and the guard that failed. given_up: not compiled, as its limit of
    graphs is reached."""

    guard: str
    file: str
    line: int
    function: str
    given_up: bool


def split_by_dynamo(function: Callable, backend: Callable, dynamic: bool | None) -> Callable:
    """`torch.compile`, with graphs that other calls of it neither share nor count, if torch supports that."""
    alone: Any = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    return torch.compile(function, backend=backend, dynamic=dynamic, **alone)


def as_python() -> Any:
    """A context in which TorchDynamo compiles with AS_PYTHON."""
    from torch._dynamo import config

    return config.patch(AS_PYTHON)


def inductor(graph: fx.GraphModule, inputs: list) -> Callable:
    """Compile a TorchDynamo graph and its backward pass; random numbers equal eager mode's."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches={"fallback_random": True})  # pyright: ignore[reportReturnType]


def compilations() -> tuple[Any, int]:
    """The current position in TorchDynamo's log of compilations."""
    from torch._dynamo import output_graph, utils

    frames = utils._compilation_metrics
    return frames[-1] if frames else None, len(output_graph.graph_break_reasons)  # pyright: ignore


def compiled_since(place: tuple[Any, int]) -> tuple[list[GraphBreak], list[Recompiled]]:
    """The entries of that log since a position, without functions of torch and Python's library; at most 64."""
    from torch._dynamo import output_graph, utils

    last, count = place
    frames = list(takewhile(lambda frame: frame is not last, reversed(utils._compilation_metrics)))[::-1]
    reasons = output_graph.graph_break_reasons  # pyright: ignore
    stacks = [(broken, _innermost(broken.user_stack)) for broken in reasons[count if count <= len(reasons) else 0 :]]
    breaks = [GraphBreak(broken.reason, *place) for broken, place in stacks if place]
    again = []
    for frame in frames:
        given_up = LIMIT in (frame.fail_reason or "")
        file, line, name = _begin(frame)
        if _is_librarys(file):
            continue
        if frame.fail_type not in (None, "SkipFrame") and not given_up:
            at = frame.fail_user_frame_filename or file, frame.fail_user_frame_lineno or line
            at = (file, line) if _is_librarys(at[0]) else at
            breaks.append(GraphBreak(frame.fail_reason or str(frame.fail_type), *at, name, whole=True))
        if frame.recompile_reason:
            again.append(Recompiled(frame.recompile_reason, file, line, name, given_up))
    return breaks, again


def _begin(frame: Any) -> tuple[str, int, str]:
    """File, line and name of a function in the log. Functions that are given up have no name: use an earlier entry with
    the same id ("3/8": the eighth graph of function 3)."""
    from torch._dynamo import utils

    if frame.co_name is None:
        same = f"{(frame.compile_id or '').partition('/')[0]}/"
        named = (f for f in reversed(utils._compilation_metrics) if f.co_name and (f.compile_id or "").startswith(same))
        frame = next(named, frame)
    return frame.co_filename or "?", frame.co_firstlineno or 0, function_of(frame.co_name or "?")


def function_of(name: str) -> str:
    """The name of a function in the source, also for its continuation after a graph break."""
    return re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", name)


def _innermost(stack: list) -> tuple[str, int, str] | None:
    frame = next((frame for frame in reversed(stack) if not _is_librarys(frame.filename)), None)
    return (frame.filename, frame.lineno or 0, function_of(frame.name)) if frame else None


def _is_librarys(file: str) -> bool:
    """Whether a file is torch's or Python's: its breaks are reported at the line that calls it."""
    torchs, pythons = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")
    return file.startswith(torchs) or (file.startswith(pythons) and "site-packages" not in file)


@contextmanager
def no_warnings_of_compilation() -> Iterator[None]:
    """Suppress warnings of torch's compiler about itself, not those of user code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor|subclasses|functorch)")
        warnings.filterwarnings("ignore", message=r"\s*((Torch)?Dynamo|`torch.jit)")
        yield


def quiet_compiler(when: Callable[[], bool]) -> None:
    """Suppress log messages of torch's compiler while `when()`."""
    parts = ("torch._dynamo", "torch._inductor", "torch._subclasses", "torch.fx")
    importlib.import_module("torch._dynamo")  # makes the loggers

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or not record.name.startswith(parts) or not when()

    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                handler.addFilter(passes)
