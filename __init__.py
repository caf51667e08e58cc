"""INT8 DiT: diffusion transformers on INT8 tensor cores, as a ComfyUI node pack."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Called by ComfyUI when it loads the pack; the nodes are imported only then, since they need ComfyUI."""
    from .nodes.host.comfy_kitchen_version import check_comfy_kitchen

    check_comfy_kitchen()
    from .nodes.extension import INT8DiTExtension

    return INT8DiTExtension()
