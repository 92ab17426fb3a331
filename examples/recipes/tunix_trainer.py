"""tunix's trainer on a scheduled step, with moments in 8 bits.

    pip install google-tunix && python examples/recipes/tunix_trainer.py

The trainer keeps its loop: data, logs, checkpoints and evaluation. It jits the step in
one method, which a subclass replaces: the step is planned into a budget instead. Call
`train` with `skip_jit=True`, as the trainer asks its own jit for the size of its cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer

import jaxmem
from jaxmem.demo import data

BATCH, TOKENS, BUDGET = 8, 128, "12MiB"


class Trainer(peft_trainer.PeftTrainer):
    """Trains within BUDGET bytes of a device."""

    def jit_train_and_eval_step(self, skip_jit=False, cache_nnx_graph=False):
        del skip_jit, cache_nnx_graph  # both are about the trainer's own jit
        evaluate = nnx.jit(self.create_eval_step_fn())
        return (
            functools.partial(self.scheduled, self.model, self.optimizer),
            functools.partial(evaluate, self.model),
        )

    @functools.cached_property
    def scheduled(self):
        how = {"donate_argnums": (0, 1), "quick": True, "progress": False}
        return jaxmem.schedule(self.create_train_step_fn(), BUDGET, **how)


def make_model(seed=0):
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=256,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(params=seed))


def make_trainer(model, steps, kind=Trainer):
    config = peft_trainer.TrainingConfig(max_steps=steps, eval_every_n_steps=steps)
    trainer = kind(model, jaxmem.optim.adamw(1e-2, bits=8), config)
    return trainer.with_gen_model_input_fn(with_positions)


def with_positions(inputs):
    tokens = inputs.input_tokens
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    return {
        "input_tokens": tokens,
        "input_mask": inputs.input_mask,
        "positions": places,
        "attention_mask": jnp.broadcast_to(causal, (len(tokens), *causal.shape)),
    }


def batches(text, steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(len(text) - TOKENS, size=BATCH)
        tokens = np.stack([text[i : i + TOKENS] for i in starts]).astype(np.int32)
        mask = np.ones_like(tokens)
        yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=mask)


def main():
    text = data.standard_library().train
    model = jaxmem.substitute(make_model())
    trainer = make_trainer(model, steps=60)
    example = next(batches(text, 1))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
    plan = trainer.scheduled.plan(model, trainer.optimizer, shapes)
    print(f"peak: {plan.plain.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    trainer.train(batches(text, 60), skip_jit=True)
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
