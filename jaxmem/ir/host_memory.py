"""The host's memory, `pinned_host`, as the devices of this process have it."""

import jax


def check_host_memory(who: str) -> None:
    """ValueError if the backend has no memory of the host's for arrays."""
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise ValueError(
            f"{who}: {device.platform} has the memories {', '.join(kinds)}; the "
            "host's, pinned_host, is needed"
        )
