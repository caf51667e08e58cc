"""What ComfyUI sees: the node classes and the code that speaks to its models, files and samplers."""

from comfy_api.latest import ComfyExtension, io

from .kernel_benchmark import INT8KernelBenchmark
from .load_int8_dit import LoadINT8DiT
from .quantize_to_int8 import QuantizeToINT8SmoothQuant
from .save_int8_dit import SaveINT8DiT


class INT8DiTExtension(ComfyExtension):
    """Lists the pack's nodes for ComfyUI."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LoadINT8DiT, QuantizeToINT8SmoothQuant, SaveINT8DiT, INT8KernelBenchmark]
