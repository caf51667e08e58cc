"""INT8 DiT: diffusion transformers on INT8 tensor cores, as a ComfyUI node pack."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Called by ComfyUI when it loads the pack; the nodes are imported only then, since they need ComfyUI."""
    from .nodes.host.installed import check_installed

    check_installed()
    from .nodes.extension import INT8DiTExtension

    return INT8DiTExtension()
