"""Weights in forms of files, as ComfyUI's QuantizedTensors."""
