"""Primitives by what they do: element by element, or only moving or casting."""

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p
    log2 logistic lt lt_to max min mul ne neg nextafter not one_minus_square or
    polynomial population_count pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()
)

# Element by element too, but not so cheap that they are done where they are read.
SPECIAL = frozenset(
    """bessel_i0e bessel_i1e clz igamma igamma_grad_a igammac polygamma
    regularized_incomplete_beta zeta""".split()
)

# Inside `shard_map`: the same array, typed to differ between devices.
VARYING = frozenset({"pvary", "pcast"})

# Sums over devices, as versions and modes of JAX name them.
SUMS_OVER_DEVICES = frozenset({"psum", "psum2", "psum_invariant"})

# Operations on one array that move or cast it.
CHEAP = VARYING | frozenset(
    """convert_element_type reshape transpose broadcast_in_dim slice squeeze rev copy
    copy_p""".split()
)
