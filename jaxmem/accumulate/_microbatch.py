"""`microbatch`: the step of a loss function, an optimizer and a number."""

from collections.abc import Callable
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxmem.accumulate._options import check_options
from jaxmem.accumulate._step import MicrobatchStep


def microbatch(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    n: int,
    *,
    has_aux: bool = False,
    has_model_state: bool = False,
    weight_fn: Callable[[Any], Any] | None = None,
    remat: bool | Callable[..., Any] = False,
    skip_nonfinite: bool | str = False,
    accumulator_dtype: Any = None,
    clip: str | None = None,
    tables: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    donate: bool = True,
) -> MicrobatchStep:
    """A train step over `n` micro-batches, without a gradient accumulator.

    The batch is split into n micro-batches. A `lax.scan` runs them one after another,
    with the activations of one at a time; then the parameters are updated once. With
    AdamA in `tx` (`jaxmem.optim.adama`, alone or in a chain) each gradient goes into
    the moments, which the scan carries, and `jaxmem.schedule` moves that into the
    backward pass over scanned layers. The bytes are then those of parameters, moments
    and one layer's gradient. So it is with any optimizer that implements
    `jaxmem.optim.accumulation`. All others work as on the whole batch: their gradients
    are summed in an accumulator of one more parameter tree (4 bytes a parameter in
    float32), which a line in the log "jaxmem" reports at level INFO. With n=1 there is
    neither, and the update of any elementwise optimizer moves into the backward pass.

    Args:
      loss_fn: `(params, batch, rng) -> loss`, the mean over the micro-batch: a floating
        scalar. With `has_aux` it returns `(loss, aux)`; with `has_model_state` it is
        `(params, model_state, batch, rng) -> (loss, model_state)`, and with both
        `(loss, (model_state, aux))`. For nnx it is `(model, batch, rng)`, and the
        model's other state is carried along.
      tx: an optax transformation; that of the TrainState or the nnx.Optimizer if the
        step is called with one. A `jaxmem.optim.MultiSteps(opt, k)` moves the
        parameters at every k-th step; with an AdamA in `opt` its mini-batch is of k n.
      n: the number of micro-batches, at least 1. It must divide the batch.
      has_aux: whether `loss_fn` returns an aux: arrays of any shapes, whose averages go
        into the metrics, under their names if aux is a dict, else as "aux".
      has_model_state: whether there is a state that the loss function updates
        (`batch_stats`). It goes from micro-batch to micro-batch, in their order.
      weight_fn: `(batch) -> scalar`, at least 0: the weight of a micro-batch, say its
        tokens. `loss_fn` gives the mean over these; gradient i counts w_i / sum(w).
        All weights are computed before the first gradient, under `vmap`. A micro-batch
        of weight 0 is skipped. Where one turns out to be negative, NaN or infinite as
        the step runs, nothing is updated, and the loss in the metrics is NaN. Without
        this function each counts 1/n.
      remat: True to keep nothing of the forward pass but its inputs, or a policy of
        `jax.checkpoint_policies`: `jax.checkpoint` of `loss_fn`. For layers that are
        scanned, `jax.checkpoint` of the layer is what saves bytes.
      skip_nonfinite: True or "loss" skips a micro-batch whose loss is not finite, which
        is known before its backward pass and costs nothing. "gradients" skips one with
        an infinity or a NaN in any gradient. This needs all gradients of the
        micro-batch before it uses the first: they are all kept, or, with
        clip="two_pass", computed twice. The metrics count the skipped ones as
        "skipped"; the others keep their shares. If all are skipped, the parameters and
        the state do not change, the counters included.
      accumulator_dtype: of the sum without AdamA, float32 or wider by default.
      clip: None, or "two_pass" for a `tx` with `optax.clip_by_global_norm` before
        AdamA: see `jaxmem.schedule`. With AdamA each micro-batch's gradient is clipped,
        with any other optimizer their mean.
      tables: which parameters are tables, as for `jaxmem.optim.value_and_row_grad`: a
        pattern of paths such as "embed/table", a function of (path, leaf), several of
        these, or a tree of bools. Their gradients are the ids and rows of all
        micro-batches, 4 bytes an id and a row of the accumulator's dtype, where an
        accumulator would be as large as the table. `tx` takes them: a rule for rows,
        `jaxmem.optim.rowwise`, `lazy_adam`, `rowwise_adagrad`, `rowwise_sgd`, and none
        that accumulates in its own state. With `axis_name` the rows of all devices are
        gathered once.
      axis_name: mesh axis, or axes, of a `jax.shard_map` (or `vmap`) around the step,
        over whose M devices the micro-batches are spread: see below.
      mesh: with `axis_name`, for a step under `jax.jit` alone: it maps itself over
        these axes of the mesh, and leaves the others (tensor parallelism, FSDP over
        another axis) to XLA.
      donate: whether the new parameters and the new state reuse the buffers of the old
        ones. If not, both are live while the step runs: a second copy, whose bytes the
        log reports. Inside an outer `jax.jit` (and so inside `shard_map`) this has no
        effect: there the outer one donates.

    Returns:
      `step(params, opt_state, batch, rng) -> (params, opt_state, metrics)`, with the
      model state between `opt_state` and the rest on both sides if there is one;
      `step(train_state, batch, rng) -> (train_state, metrics)`, whose `batch_stats` are
      the model state; `step(model, optimizer, batch, rng) -> metrics` for an nnx.Module
      and its nnx.Optimizer, updated in place. All arguments are positional. `batch`:
      any pytree of arrays [B, ...]. `rng`: a key, typed or raw, a pytree of keys, or
      None; it is split, a key a micro-batch (n=1 gets it as it is). `metrics`: "loss"
      and aux, averaged with the weights of the gradients over the micro-batches that
      count, in float32 or wider. The step is compiled, and has ``.lower``,
      ``.trace``, ``.eval_shape`` and ``.plan``; `jaxmem.estimate` takes it.

      Micro-batch i holds examples i, i + n, i + 2n, ...: so each device contributes its
      own examples to each micro-batch, if the batch is sharded and n times the number
      of devices divides it.

    **Examples that depend on each other.** The loss of the whole batch is the mean over
    micro-batches if it is a mean over examples. Where it is not, an operation in which
    examples meet is named with its line: a quotient of sums over them, for which there
    is `weight_fn`, in a UserWarning; batch norm and contrastive losses in a line of the
    log "jaxmem", or with `mesh` in a UserWarning too. A kernel or a callback is not
    looked into.

    **On many devices.** Under `jax.jit` with sharded arrays there is nothing to do.
    Gradients are then reduced once a micro-batch; with `axis_name` and `mesh`, or under
    a `jax.shard_map` with `axis_name`, once a step. What the loss computes over its
    batch is then over one device's part of a micro-batch: a mean inside of it (batch
    norm, a load-balancing loss) is a mean over fewer examples, and its sharding
    constraints hold for the other axes of the mesh. Parameters and optimizer state are
    replicated over these axes, in and out (`P()`), `batch` is per device
    (`P(axis_name)`), and an AdamA in `tx` has the same `axis_name`. The step is that of
    n M micro-batches on one device; with another optimizer, whose accumulator is
    reduced, that of the whole batch. With your own `shard_map`, `check_vma` may be True
    or False.

    - `rng`: the index of the device is folded into each key, for n=1 too. Keys in a
      model state (those of an nnx model) are the same on all devices.
    - Weights count against the sum over all devices, and all metrics are of all
      devices.
    - If a device skips a micro-batch, it contributes a zero gradient. If all devices
      skip all of theirs, parameters and state do not change. With AdamA skipping
      takes a scalar of all devices in every micro-batch and, at the end of the step,
      the bytes of the parameters once more.
    - A transformation before AdamA in its chain sees the gradients of its device, and
      must not keep a state that depends on them.
    - The model state goes through the micro-batches of each device and becomes the mean
      over the devices (of integers, the largest).

    Parameters that their gradient overwrites, the scales and histories of Flax's fp8
    layers, are taken as Flax's TrainState takes them: params are `{"params": ...,
    "_overwrite_with_gradient": ...}`, and `opt_state` is that of `params["params"]`.
    They go from micro-batch to micro-batch like a model state, so that a history is of
    micro-batches; on several devices the largest of each is taken. An nnx model with
    such state is an error.

    Raises:
      TypeError, ValueError: here for options. At the first call for a batch that n does
        not divide (naming the leaf), a loss that is not a scalar, a different structure
        than announced, or a state of other parameters; with an `axis_name` for a call
        outside of a map over it, for parameters or moments sharded over it, or for an
        AdamA without it. At any call
        for an AdamA state from elsewhere that was made with another n or is in the
        middle of a mini-batch.

    AdamA's second moment is the sum of the squares of the gradients over n, not the
    square of their mean: `jaxmem.optim.adama` describes the effect on a step.

    Source:
      Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations
      and Gradients for Large-scale DNN Training" (arXiv 2305.19982), algorithm 2.

    Example::

      tx = jaxmem.adama(3e-4)
      step = jaxmem.microbatch(loss_fn, tx, n=8)
      opt_state = tx.init(params)
      for batch in batches:
          rng, key = jax.random.split(rng)
          params, opt_state, metrics = step(params, opt_state, batch, key)

    On many devices, each with n micro-batches of its own, and one reduction::

      tx = jaxmem.adama(3e-4, axis_name="data")
      step = jaxmem.microbatch(loss_fn, tx, n=8, axis_name="data", mesh=mesh)

    The same with your own `shard_map`::

      tx = jaxmem.adama(3e-4, axis_name="data")
      step = jaxmem.microbatch(loss_fn, tx, n=8, axis_name="data")
      specs = (P(), P(), P("data"), P())
      step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
      step = jax.jit(step, donate_argnums=(0, 1))
    """
    options = check_options(
        loss_fn,
        tx,
        n,
        has_aux=has_aux,
        has_model_state=has_model_state,
        weight_fn=weight_fn,
        remat=remat,
        skip_nonfinite=skip_nonfinite,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        tables=tables,
        axis_name=axis_name,
        mesh=mesh,
        donate=donate,
    )
    return MicrobatchStep(loss_fn, tx, options)
