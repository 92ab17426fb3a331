"""`schedule`: a train step like the one given, with less alive at its peak."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem._checks import (
    check_bool,
    check_callable,
    check_choice,
    check_donated,
    check_options,
    check_static,
    wrong_type,
)
from jaxmem.memory import Target
from jaxmem.scheduling._options import (
    Options,
    check_seconds,
    host_room,
    room_and_target,
)
from jaxmem.scheduling._scheduled import Scheduled
from jaxmem.scheduling.plan.plan import Plan

Places = int | Sequence[int]
Names = str | Sequence[str]


def schedule(
    step: Callable,
    budget: int | str | None = None,
    *,
    target: str | Target | None = None,
    donate_argnums: Places | None = None,
    donate_argnames: Names | None = None,
    static_argnums: Places = (),
    static_argnames: Names = (),
    clip: str | None = None,
    offload: bool = False,
    host_budget: int | str | None = None,
    tile: bool = True,
    plan: Plan | None = None,
    compiler_options: dict[str, Any] | None = None,
    search_seconds: float | None = None,
    quick: bool = False,
    cache: bool = True,
    progress: bool = True,
    verify: bool = False,
    audit: bool = True,
) -> Scheduled:
    """A transformation like `jax.jit` that makes a train step take less memory.

    The step is traced unmodified, and its jaxpr is rewritten:

    - *Gradient release.* The optimizer's update of scanned layers is moved
      into the backward `scan`: each layer's parameters and moments are updated
      in place as soon as its gradient is computed, so that the stacked gradients are
      never live. The same holds for accumulators over micro-batches, in an outer
      `scan`. On TPU the forward scan also writes each parameter that it casts back as
      it was read: one more write of the parameters a step, for which the compiler no
      longer makes narrow copies of all layers at once.
    - *Residuals.* The forward scan saves the fewest bytes from which the rest can
      be recomputed by casts, moves and elementwise operations: no bf16
      copy of a weight, no activation in addition to its input, no output that is
      the next layer's input. No matmul, reduction or random bit is computed twice.
    - *A budget.* With `budget`, only as much of the forward pass is recomputed
      as needed to fit. Values are chosen by the bytes they take and the time they
      cost on `target`, and what the compiler for `target` reports decides. Below one
      input for each layer, whole segments of layers are recomputed (Chen et al. 2016).
    - *Tiles.* With `budget`, the working memory of a layer or a loss head is reduced:
      a region of operations runs in tiles along an axis that all of them
      share (the batch, the heads, the tokens), sums are carried from tile to tile in
      float32. It is priced like recomputation, in seconds on `target` (weights are
      read by each tile, sums are read and written), and the cheaper is used. A loss
      head runs over the vocabulary, its logits computed twice, if the compiled step
      then takes no longer (with a target that is looked at without a budget, too), if
      nothing else fits or everything else takes clearly longer. The whole step runs in
      micro-batches, up to its gradients, in the last two cases.
    - *Order.* Unrolled layers are updated right after their gradient: an optimization
      barrier keeps the compiler from moving all updates to the end.

    With a target, the original and the rewritten step are compiled, and among those
    with no larger peak the one with the least product of bytes and predicted seconds is
    used. Without one nothing is compiled to compare: then layers are reordered only if
    waiting gradients are more than half of the temporaries in the step's graph, and
    residuals are recomputed only if they take more than the largest array of a layer.
    The plan's notes say what was left out.

    The results are those of the step, to rounding: operations are moved, not changed,
    and a sum over layers may be taken in another order.

    Args:
      step: any function that `jax.jit` takes, already jitted or not; a jitted one
        brings its own donated arguments along. It should contain the gradient and the
        update.
      budget: the peak that the compiled step may have on one device, arguments
        included, in bytes or as text like "14GiB": the fastest compiled step
        that fits is used, by predicted seconds. By default something is
        recomputed only if that is free, or with a `target` makes the step faster.
        The first call with new shapes compiles the step a few times to find out.
      target: the chip of `jaxmem.targets()` that the step is for: the original and the
        scheduled step are compiled for it, and the better is used. By default
        nothing is compiled to compare, and a budget is for this process's first device.
      donate_argnums: positional arguments whose buffers the step may reuse: the
        parameters and the optimizer state, or nothing is updated in place and no
        gradient released. Inside another `jax.jit` or a scan, where nothing is named
        here, all arguments count as donated: name those that are, or `()`.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      clip: "two_pass" for a step whose update needs a number made of all gradients, as
        clipping by the global norm does: a first backward pass finds the number, a
        second updates. Costs one more backward pass through the scanned layers. By
        default such a step keeps its stacked gradients, and `plan` names the operation.
      offload: with a budget, residuals of the forward scans may also be offloaded to
        host memory (`pinned_host`), if the transfers, overlapped with the layers'
        computation, are predicted to be faster than recomputation, or where nothing
        else fits. It takes the link to the host, which the estimate has as 16 lanes of
        PCI Express.
      host_budget: with `offload`, the bytes of host memory that the residuals of one
        device may take, as `budget` is given; by default there is no limit.
      tile: with a budget, regions may be run in tiles, and with a target a loss head
        may. False where the sums of a gradient should not be split, or to see what the
        rest reaches.
      plan: the result of an earlier `plan(...)` of the same
        step, as `Plan.from_json` reads it: the search is skipped.
      compiler_options: as for `jax.jit`: of the step that is run, and of those that are
        compiled to find it. Inside another `jax.jit` that one's hold. For a GPU
        `xla_gpu_enable_dus_accumulator_zero_init_elimination` is set besides (say False
        to have it off), where no loop reads an array of which it has updated a part.
      search_seconds: after which a search takes the best that fits so far; by default
        it goes on until nothing better is likely. An interrupt (Ctrl-C) also ends the
        search with the best so far.
      quick: with a budget, only the candidate that is expected to fit is compiled, and
        used if it does: usually one compile. The step may be slower than what a
        search would find.
      cache: whether the outcome of an earlier search for this step, target, budget and
        options may be used, with this version of everything: it is stored with the
        results of `estimate`, and processes that search for the same step wait for one
        search.
      progress: show a progress bar during the search, with the best so far, where the
        output is a terminal.
      verify: at the first call with arrays, and again where their shapes are others,
        `jaxmem.check` runs both the scheduled step and the original step, on
        copies, and the call fails where a result differs by more than rounding does.
        That takes about ten times the step's own time and its compile once more, with
        its intermediate values off by roundings. Where the original step does not
        fit the device, both are run on a slice of the batch, which a log line
        tells; where there is no batch to slice, a warning says that nothing was
        verified. Inside another `jax.jit` nothing is.
      audit: of the modules that a search compiles, only those without a finding
        of `jaxmem.audit` are used. False allows the others, too: for a finding that
        has turned out to be wrong, by `verify` for instance.

    Returns:
      A `Scheduled` step: call it, give it to `jaxmem.estimate` or another `jax.jit`,
      lower it, or ask it for its `plan`.

    Raises:
      TypeError: `step` is not callable, or another argument not of its kind.
      ValueError: `clip` is another word, `budget` no size, `target` unknown,
        `search_seconds` not above 0, `host_budget` without `offload`. When the step is
        first called or planned: a budget that no choice reaches (`BudgetError`, which
        gives the lowest peak found and its largest buffers).
      TimeoutError: nothing that fits was found in `search_seconds`.
      VerifyError: with `verify`, at a call: a result differs. It names the result, the
        module and the pass, and has the report.
      RuntimeError: this installation cannot compile for the target, or `jaxmem.audit`
        finds of every choice that its values are wrong (the error tells why).

    Example::

      step = jaxmem.schedule(step, budget="14GiB", target="h100", donate_argnums=(0,))
      print(step.plan(state, batch, target="h100"))
      state, loss = step(state, batch)

    Source: gradient release as in LOMO (Lv et al. 2023, section 3.1), on the jaxpr of
    an unmodified step.
    """
    check_callable("step", step)
    check_choice("clip", clip, (None, "two_pass"))
    check_bool("offload", offload)
    check_bool("tile", tile)
    check_bool("quick", quick)
    check_bool("cache", cache)
    check_bool("progress", progress)
    check_bool("verify", verify)
    check_bool("audit", audit)
    compiler_options = check_options("compiler_options", compiler_options)
    donate = check_donated(donate_argnums, donate_argnames)
    # else `()` would say that nothing may be donated, though a jitted step says it
    # itself
    if donate_argnums is None and donate_argnames is None:
        donate = None
    static = check_static(static_argnums, static_argnames)
    if plan is not None and not isinstance(plan, Plan):
        raise wrong_type("plan", plan, "a Plan, of plan(...) or Plan.from_json(...)")
    if plan is not None and (budget is not None or target is not None):
        raise ValueError("plan: it has its budget and target already, give no others")
    room, name = room_and_target(budget, target)
    host = host_room(offload, host_budget, room)
    if quick and room is None:
        raise ValueError("quick=True: needs a budget; without one there is no search")
    check_seconds(search_seconds)
    if search_seconds is not None and name is None:
        raise ValueError(
            f"search_seconds={search_seconds!r}: without a budget or a target there is "
            "no search"
        )
    how = {"offload": offload, "host_budget": host}
    how |= {"compiler_options": compiler_options}
    how |= {"search_seconds": search_seconds, "tile": tile, "quick": quick}
    how |= {"cache": cache, "verify": verify, "audit": audit}
    options = Options(donate, static, clip, room, name, progress, plan, **how)
    return Scheduled(step, options)
