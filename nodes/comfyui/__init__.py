"""The door to what is private in ComfyUI and comfy-kitchen; the pack uses their public names as they are."""
