"""Types and inputs that several nodes have."""

from comfy_api.latest import io

from ..kernels import KERNEL_CHOICES

CalibrationType = io.Custom("INT8_CALIBRATION")
RecordingType = io.Custom("INT8_RECORDING")


def kernel_input() -> io.Combo.Input:
    """The widget that chooses what INT8 linears compute with."""
    return io.Combo.Input(
        "kernel",
        options=list(KERNEL_CHOICES),
        default="auto",
        tooltip="auto: fused INT8 on consumer Ampere (RTX 30), bf16 with a warning on other cards. "
        "fused int8: the INT8 kernel on any card from Ampere on (on a CPU, its slow reference). bf16: never INT8.",
    )
