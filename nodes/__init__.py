"""What speaks to ComfyUI: the node classes, and the rooms that work on its models, files and samplers."""
