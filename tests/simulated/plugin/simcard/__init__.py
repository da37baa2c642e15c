"""A simulated accelerator, as a vendor's plug-in of torch would be: found by torch itself through its entry point.

Nothing of the workbench knows of it. Put its folder on PYTHONPATH, and every process that imports torch has two
devices "simcard", with memory of their own and collectives between them; see docs/operators.md.

    SIMCARD_MEMORY  bytes of each device (default 2 GiB)
    SIMCARD_GAPS    operators to leave out, send to the host or get wrong: "missing:topk,host:silu,wrong:exp"
"""

from __future__ import annotations

import os
from types import ModuleType

NAME, LINKS = "simcard", "simlink"
NUM_DEVICES = 2
DEFAULT_MEMORY = 2 << 30


def autoload() -> None:
    """Called by torch at the end of its own import."""
    import torch
    import torch.distributed as dist

    from simcard.build import load

    card = load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(card))
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=False)
    card.start(NUM_DEVICES, int(os.environ.get("SIMCARD_MEMORY", DEFAULT_MEMORY)), os.environ.get("SIMCARD_GAPS", ""))

    def join(options: dist.distributed_c10d._DistributedBackendOptions, _: object) -> object:
        host = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        return card.links(host)

    dist.Backend.register_backend(LINKS, join, extended_api=True, devices=[NAME])


def _device_module(card: ModuleType) -> ModuleType:
    """What `torch.simcard` offers."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: card.num_devices() > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = card.num_devices
    module.current_device = card.current_device
    module.set_device = card.set_device
    module.manual_seed_all = card.manual_seed_all
    module.get_device_name = lambda index=0: f"simulated accelerator {index}"
    return module
