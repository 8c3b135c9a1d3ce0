"""How the public functions appear to torch.compile, torch.export and meta tensors: as torch custom ops.

A public function in eager mode runs its back-end directly. Where it is traced, or its tensors have no data, it calls
the custom op of its name instead, whose fake implementation knows the outputs' shapes and whose real one calls the
public function again when the compiled program runs. The pattern, followed by head_ops.py, policy_ops.py and
whoever adds an op:

    # the public function's module
    def _ops() -> ModuleType:
        from headway_kernels import head_ops
        return head_ops

    @traceable(_ops)
    def head_logp(x, weight, ...): ...

    # headway_kernels/head_ops.py
    @torch.library.custom_op("headway::head_logp", mutates_args=())
    def _head_logp(x: Tensor, weight: Tensor, ...) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(head_logp_of_the_module(x, weight, ...))

    @_head_logp.register_fake
    def _(x, weight, ...): return x.new_empty(...), ...

    def head_logp(x, weight, ...):          # same name and signature as the public function
        return HeadLogp(*_head_logp(x, weight, ...))

A custom op takes tensors, numbers and strings only (an Objective passes as text), names what it mutates, and returns
tensors that alias neither its inputs nor each other. tests/kernels/test_custom_ops.py runs torch.library.opcheck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")


def traceable(ops: Callable[[], ModuleType]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Where a public function is traced, call its namesake in the module that `ops` imports."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or _has_no_data(*args, *kwargs.values()):
                return getattr(ops(), name)(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return wrap


def _has_no_data(*values: Any) -> bool:
    return any(
        isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor)) for value in values
    )
