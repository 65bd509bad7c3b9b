"""vLLM's Mooncake connectors on a machine without accelerator: what they ask of one, answered.

vLLM loads this module inside its own process, by `kv_connector_module_path`; nothing of moonserve
does. The connectors ask which device is current (there is one: 0), and the store's asks for an
event of CUDA's to wait for (on a CPU what was computed is computed).
"""

from __future__ import annotations

import torch


class _Done:
    """An event that has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *args: object) -> None: ...

    def query(self) -> bool:
        return True


torch.accelerator.current_device_index = lambda: 0
torch.cuda.Event = _Done

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (  # noqa: E402
    MooncakeConnector as MooncakeConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (  # noqa: E402
    MooncakeStoreConnector as MooncakeStoreConnector,
)
