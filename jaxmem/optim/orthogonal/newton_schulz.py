"""Newton-Schulz iterations: singular values of a matrix towards 1, by products alone.

Formulas are those of a wide matrix X [a, b], whose Gram matrix is X X^T, [a, a]. Of a
tall one they are transposed.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
Coefficients = tuple[float, float, float]

# Of three steps the Gram matrix's rounding grows by less than a hundred; of five, by
# more than ten thousand.
_BEFORE_RESTART = 3
_LEAST = 1e-8  # of what "aol" and "schatten" divide by, as in optax

STANDARD: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),)
DION: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class NewtonSchulz(NamedTuple):
    """The iteration f(X) = c0 X + c1 (X X^T) X + c2 (X X^T)^2 X.

    Attributes:
      coeffs: of each step.
      eps: added to the norm.
      preconditioning: what the matrix is divided by before the first step.
      gram: whether the steps are done on the Gram matrix.
    """

    coeffs: tuple[Coefficients, ...]
    eps: Any
    preconditioning: Preconditioning
    gram: bool

    def __call__(
        self, x: Float[Array, "m n"], wide: bool, axes: tuple[str, ...] = ()
    ) -> Float[Array, "m n"]:
        """The matrix after all steps.

        Args:
          x: the matrix, or this device's part of it along its larger side.
          wide: whether the larger side is the columns.
          axes: names of the mesh axes over which that side is sharded. The Gram matrix
            alone is exchanged, so `gram` must hold.
        """
        sides = Sides(wide, axes)
        x = self._scaled(x, sides)
        if self.gram:
            return _on_gram(x, self.coeffs, sides)

        def step(x, c):
            gram = sides.gram(x)
            return c[0] * x + sides.product(c[1] * gram + c[2] * (gram @ gram), x), None

        # a loop, so that of no two steps the products are there together
        return lax.scan(step, x, jnp.asarray(self.coeffs, x.dtype))[0]

    def _scaled(self, x, sides: "Sides"):
        if self.preconditioning == "frobenius":
            norm = jnp.sqrt(sides.summed(jnp.sum(jnp.square(x))))
            return x / (norm + self.eps).astype(x.dtype)
        gram = sides.gram(x)
        if self.preconditioning == "spectral":
            norm = jnp.sqrt(jnp.linalg.norm(gram, ord=2))
            return x / (norm + self.eps).astype(x.dtype)
        if self.preconditioning == "aol":
            size = jnp.sum(jnp.abs(gram), axis=-1)
            size = jnp.expand_dims(size, 1 if sides.wide else 0)
        else:
            size = jnp.linalg.norm(gram)
        return x * lax.rsqrt(jnp.maximum(size, _LEAST)).astype(x.dtype)


class Sides(NamedTuple):
    """Products with the smaller side; nothing is transposed, which XLA would copy."""

    wide: bool
    axes: tuple[str, ...]

    def summed(self, x: Any) -> Any:
        """The sum over the devices that share the larger side."""
        return lax.psum(x, self.axes) if self.axes else x

    def gram(self, x: Float[Array, "m n"]) -> Float[Array, "a a"]:
        """X X^T where X is wide, else X^T X."""
        return self.summed(x @ x.T if self.wide else x.T @ x)

    def product(
        self, q: Float[Array, "a a"], x: Float[Array, "m n"]
    ) -> Float[Array, "m n"]:
        """Q X where X is wide, else X Q."""
        return q @ x if self.wide else x @ q


def _on_gram(x, coeffs: tuple[Coefficients, ...], sides: Sides):
    """All steps as X <- Q X, with Q a polynomial of the Gram matrix.

    Every few steps X is made, and its Gram matrix anew: what rounding adds to the
    small eigenvalues would grow with them.
    """
    for first in range(0, len(coeffs), _BEFORE_RESTART):
        gram = sides.gram(x)
        q = eye = jnp.eye(gram.shape[0], dtype=x.dtype)
        several = coeffs[first : first + _BEFORE_RESTART]
        for k, c in enumerate(several, 1):
            p = c[0] * eye + c[1] * gram + c[2] * (gram @ gram)
            q = p if k == 1 else p @ q
            gram = p @ gram @ p if k < len(several) else gram
        x = sides.product(q, x)
    return x
