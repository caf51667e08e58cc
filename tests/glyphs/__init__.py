"""Capital letters and digits as test data: how they are drawn, encoded, learnt by a small DiT, and read back.

alphabet      the 36 characters and their class numbers
drawing       class -> 64x64 image, with random variation
latents       image <-> the 16-channel latent the model works on
conditioning  text -> the tensors a text encoder would hand to the model
matching      image -> character, by plain template matching
outliers      outlier channels planted so that no result in bf16 changes
read.py       the script that reads images for the demo
train.py      the script that made tests/data/glyph_dit.safetensors
"""
