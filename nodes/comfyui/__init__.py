"""The door to ComfyUI and comfy-kitchen: what is private there or differs between versions, and what is assumed.

The rest of the pack uses their public names as they are.
"""
