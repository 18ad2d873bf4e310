"""A `jax.custom_vjp` that can be switched off for forward-mode differentiation.

JAX refuses `jax.jvp` of a function with a custom_vjp rule. cpu.py, gpu.py and networks.py have such rules for speed and
memory only. Within `forward_mode()` they are left out, so that TRPO can take `jax.jvp` of the same networks.
"""

from collections.abc import Callable, Sequence
from functools import wraps

import jax

_forward = jax.make_user_context(False)  # of a thread, and part of the key of JAX's cache of compiled programs


def forward_mode():
    """A context manager: functions that are traced within it ignore their `custom_vjp` rules."""
    return _forward(True)


def custom_vjp(function: Callable, nondiff_argnums: Sequence[int] = ()) -> Callable:
    """`jax.custom_vjp`, without effect in `forward_mode`."""
    with_gradient = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

    @wraps(function)
    def either(*args):
        return (function if _forward.value else with_gradient)(*args)

    either.defvjp = with_gradient.defvjp
    return either
