"""What the pack uses of the ComfyUI around it: memory, progress, messages, the output folder."""
