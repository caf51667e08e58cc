"""The one door to ComfyUI and comfy-kitchen: all of theirs that the pack relies on, and what is assumed of it.

The rest of the pack imports nothing of ComfyUI's but `comfy_api.latest`. What changes with ComfyUI changes here.
"""
