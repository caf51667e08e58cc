"""INT8 DiT: diffusion transformers on INT8 tensor cores, as a ComfyUI node pack."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Called by ComfyUI when it loads the pack; the nodes are imported only then, since they need ComfyUI."""
    from .nodes.host.installed import check_comfy_kitchen, say_what_is_missing

    check_comfy_kitchen()
    say_what_is_missing()
    from .nodes.extension import INT8DiTExtension

    return INT8DiTExtension()
