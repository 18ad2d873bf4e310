"""Functions with gradients of their own that can be differentiated forward, too: JAX has either for a function.

cpu.py and gpu.py write gradients, which `jax.grad` takes. `jax.jvp` needs none of them: within `forward_mode` it sees
the functions as they are.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps

import jax

_now = threading.local()


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """For what is traced in it, `custom_vjp` has no effect."""
    before, _now.forward = getattr(_now, "forward", False), True
    try:
        yield
    finally:
        _now.forward = before


def custom_vjp(function: Callable, nondiff_argnums: Sequence[int] = ()) -> Callable:
    """`jax.custom_vjp`, but for what is traced in `forward_mode`."""
    with_gradient = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

    @wraps(function)
    def either(*args):
        return (function if getattr(_now, "forward", False) else with_gradient)(*args)

    either.defvjp = with_gradient.defvjp
    return either
