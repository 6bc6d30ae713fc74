"""Products with parameters: any equation of the decoder, gradients in the dtypes that training wants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.models.product import einsum, product

EQUATIONS = {
    "rtd,df->rtf": ((2, 3, 8), (8, 5)),
    "rtd,dha->rtha": ((2, 3, 8), (8, 2, 4)),
    "rtha,had->rtd": ((2, 3, 2, 4), (2, 4, 8)),
    "rtd,vd->rtv": ((2, 3, 8), (7, 8)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_value_and_gradients_are_numpys(rng, equation):
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in EQUATIONS[equation])
    inputs, out = equation.split("->")
    a, b = inputs.split(",")
    y, pull = jax.vjp(lambda x, kernel: product(equation, x, kernel), x, kernel)
    given = rng.normal(size=y.shape).astype(np.float32)
    by_x, by_kernel = pull(given)
    np.testing.assert_allclose(y, np.einsum(equation, x, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_x, np.einsum(f"{out},{b}->{a}", given, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_kernel, np.einsum(f"{a},{out}->{b}", x, given), rtol=1e-5, atol=1e-5)


def test_a_kernel_in_f32_gets_its_gradient_unrounded(rng):
    """In bfloat16, 2^12 equal terms of 1 + 2^-7: a sum that is rounded on its way would be off by far more."""
    x, kernel = jnp.full((1, 4096, 1), 1 + 2**-7, jnp.bfloat16), jnp.ones((1, 1), jnp.float32)
    y, pull = jax.vjp(lambda x, kernel: product("rtd,df->rtf", x, kernel), x, kernel)
    by_x, by_kernel = pull(jnp.ones_like(y))
    assert (y.dtype, by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert float(by_kernel[0, 0]) == 4096 * (1 + 2**-7)


TRANSPOSED = {
    "cv,cd->vd": ((8, 6), (8, 5)),
    "rkqs,rkqa->rksa": ((2, 3, 4, 5), (2, 3, 4, 6)),
    "rtd,rtf->df": ((1, 6, 3), (1, 6, 4)),
    "qs,qa->sa": ((7, 3), (7, 2)),  # an odd sum
}


@pytest.mark.parametrize("equation", TRANSPOSED)
def test_sums_over_the_first_axis_are_numpys(rng, equation):
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in TRANSPOSED[equation])
    for dtype in (jnp.float32, jnp.bfloat16):
        found = jax.jit(einsum, static_argnums=(0, 3))(equation, a, b, dtype)
        exact = np.einsum(equation, np.asarray(a, np.float64), np.asarray(b, np.float64))
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=tolerance, atol=tolerance)


def test_products_of_bfloat16_stay_so():
    """No operand is widened before a product, forwards or backwards: that would be the slow kind on every device."""

    def loss(x, kernel):
        return jnp.sum(product("rtd,vd->rtv", x, kernel, jnp.float32) ** 2)

    made = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((1, 2, 4), jnp.bfloat16), jnp.ones((3, 4)))
    products = [e for e in jaxpr_equations(made.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 6  # three, each with a variant for CPUs
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype(jnp.bfloat16)}


def jaxpr_equations(jaxpr):
    """All equations, those of inner functions too."""
    for e in jaxpr.eqns:
        yield e
        for value in e.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from jaxpr_equations(inner.jaxpr)
