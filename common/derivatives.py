"""`jax.custom_vjp` that `jax.jvp` can differentiate too, within `forward_mode`; JAX's own allows only one of them.

cpu.py, gpu.py and networks.py write gradients of their own, which `jax.jvp` does not need.
"""

from collections.abc import Callable, Sequence
from functools import wraps

import jax

_forward = jax.make_user_context(False)  # of a thread, and part of the key of JAX's cache of compiled programs


def forward_mode():
    """`with forward_mode():` for what is traced in it, `custom_vjp` has no effect."""
    return _forward(True)


def custom_vjp(function: Callable, nondiff_argnums: Sequence[int] = ()) -> Callable:
    """`jax.custom_vjp`, without effect in `forward_mode`."""
    with_gradient = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

    @wraps(function)
    def either(*args):
        return (function if _forward.value else with_gradient)(*args)

    either.defvjp = with_gradient.defvjp
    return either
