"""What jaxmem itself costs: its import, and an estimate of BERT-Large for an H100.

python -m benchmarks.overhead
"""

import os
import subprocess
import sys
import tempfile
import time

import jaxmem
from benchmarks._common import publish
from benchmarks.bert import gradient
from benchmarks.models.transformers import Bert, BertConfig

IMPORT = (
    "import time, jax, flax.linen, flax.nnx; t = time.perf_counter();"
    "import jaxmem; jaxmem.estimate, jaxmem.substitute, jaxmem.ops;"
    "print(time.perf_counter() - t)"
)


def import_seconds() -> float:
    run = lambda: subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return min(float(run().stdout) for _ in range(5))


def estimate_seconds(model) -> float:
    start = time.perf_counter()
    step, args = gradient(model)
    jaxmem.estimate(step, *args, target="h100")
    return time.perf_counter() - start


def main() -> None:
    rows = [("import jaxmem, beyond jax and flax", import_seconds(), 0.3)]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAXMEM_CACHE_DIR"] = cache
        plain = Bert(BertConfig())
        for name, model in (("plain", plain), ("lean", jaxmem.substitute(plain))):
            for call, threshold in (("first", 90.0), ("second", 1.0)):
                what = f"estimate BERT-Large for h100, {name}, {call} call"
                rows.append((what, estimate_seconds(model), threshold))
    rows = [(n, f"{s:.2f}", most, "yes" if s <= most else "no") for n, s, most in rows]
    publish("overhead", ("what", "seconds", "at most", "met"), rows)


if __name__ == "__main__":
    main()
