"""Images and latents of the word model: as those of glyphs/latents.py, in other sizes.

image   float [B, 64, 192] in [0, 1], ink on nothing
model   float [B, 16, 16, 48]
node    float [B, 16, 16, 48]
"""

from functools import partial

from glyphs import latents
from glyphs.latents import CHANNELS as CHANNELS
from glyphs.latents import node_to_model as node_to_model  # both models are of the SD3 family

ROWS, COLUMNS = 16, 48  # of latent pixels

# Mean and standard deviation of a drawn pixel, rounded to binary fractions.
_PIXELS = {"mean": 0.0625, "std": 0.25}

image_to_model = partial(latents.image_to_model, **_PIXELS)
model_to_image = partial(latents.model_to_image, **_PIXELS)
