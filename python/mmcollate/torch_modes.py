"""Which of torch's global modes concern collation."""

from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def only_device_contexts() -> bool:
    """Whether every active function mode is the context of ``torch.device(…)`` or
    ``torch.set_default_device``. Those change factories that name no device, and nothing else."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(type(mode) is DeviceContext for mode in stack)
