"""Errors of a model's code under capture, with the line, the module, and what to do instead."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tutti import compat
from tutti.ir.spec import Spec

JIT = "On one device tutti.jit(model) runs it unchanged, and its report() lists all such places"
# Operators that read values directly for `if`, `.item()`, `.tolist()` and x[mask].
VALUE_OPERATORS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
REPORTED = (".item()", "float(", ".tolist()", "print(", "int(")  # in a source line that takes a value out of PyTorch
CODE = (Path(torch.__file__).parent, Path(__file__).parents[1])  # torch's and ours


@contextmanager
def explained() -> Iterator[None]:
    """Re-raise errors of capture with the place in the model that caused them.

    ValueError for code that needs values of tensors; RuntimeError, with the module and the shapes, for an operator that
    does not take its operands. Errors that the model's own code raises pass through.
    """
    try:
        yield
    except compat.ValuesNeeded as error:
        raise branching(error) from error
    except TypeError as error:
        if "unsupported format string passed to FakeTensor" not in str(error):
            raise
        raise _taken_out(_place(error)) from error
    except RuntimeError as error:
        if ".numpy() is not supported for tensor subclasses" in str(error):
            raise ValueError(
                f"{_place(error)}the model takes the values of a tensor out of PyTorch (.numpy()), which cannot be "
                f"captured: compute with tensors, or decide it before the batch is made. {JIT}"
            ) from error
        call = getattr(error, "call", "")
        if type(error) is not RuntimeError or not call:
            raise
        raise RuntimeError(f"{_place(error)}{call}: {str(error).strip()}") from error


def branching(error: Exception) -> ValueError:
    """Return the error for a model that reads the values of a tensor, with the line and what to write instead."""
    where = _place(error)
    operator = getattr(error, "func", None)
    if operator not in VALUE_OPERATORS:
        return ValueError(
            f"{where}the operator {operator} looks at the values of a tensor, for a shape or a number that it needs. A "
            "step is captured once for all values: compute it before the batch is made, or write an operator around it "
            "that knows its shapes without (torch.library.custom_op with register_fake)"
        )
    if any(frame.filename.endswith("grad_scaler.py") for frame in traceback.extract_tb(error.__traceback__)):
        return ValueError(
            f"{where}torch.amp.GradScaler decides in Python whether gradients are finite, which cannot be captured. "
            "bfloat16 needs no scaling: leave the scaler out. Steps that are not finite are left out by "
            "tutti.parallelize(..., max_nonfinite_steps=10)"
        )
    if operator is VALUE_OPERATORS[0] and any(word in where for word in REPORTED):
        return _taken_out(where)
    experts = "; for experts: import tutti.models.experts, then model.set_experts_implementation('tutti')"
    return ValueError(
        f"{where}the model branches on the values of a tensor, or makes a shape of them ({error}). A step is captured "
        "once for all values: write torch.where or a mask for an if, a loop, .item() or x[mask], or decide it before "
        f"the batch is made. {JIT}{experts if 'expert' in where else ''}"
    )


def _taken_out(where: str) -> ValueError:
    return ValueError(
        f"{where}the value of a tensor is taken out to Python, but a step is captured once for all values. To report "
        "it, return the tensor: a loss returns `loss, {'name': tensor}`, and step.metrics has it; a function returns "
        f"it beside its result. To compute with it, keep it a tensor. {JIT}"
    )


def note_call(error: Exception, operator: Any, path: str, operands: Any) -> None:
    """Remember in an error which operator of which module raised it, first of all."""
    if not hasattr(error, "call"):
        shapes = ", ".join(str(Spec.of(x)) for x in operands if isinstance(x, torch.Tensor))
        error.call = f"{f'module {path!r}' if path else 'the step'}, {operator}({shapes})"  # pyright: ignore


def _place(error: Exception) -> str:
    """The last line of an error's traceback in user code, as a prefix of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(folder in Path(f.filename).parents for folder in CODE)]
    return f"{own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`: " if own else ""
