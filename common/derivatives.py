"""Functions with gradients of their own that can be differentiated forward, too: JAX has either for a function.

cpu.py and gpu.py write gradients, which `jax.grad` takes. `jax.jvp` needs none of them: within `forward_mode` it sees
the functions as they are.
"""

from collections.abc import Callable, Sequence
from functools import wraps

import jax

_forward = jax.make_user_context(False)  # of a thread, and part of what JAX finds its compiled programs by


def forward_mode():
    """`with forward_mode():` for what is traced in it, `custom_vjp` has no effect."""
    return _forward(True)


def custom_vjp(function: Callable, nondiff_argnums: Sequence[int] = ()) -> Callable:
    """`jax.custom_vjp`, but for what is traced in `forward_mode`."""
    with_gradient = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

    @wraps(function)
    def either(*args):
        return (function if _forward.value else with_gradient)(*args)

    either.defvjp = with_gradient.defvjp
    return either
