"""Words as test data: how they are laid out and drawn, encoded, learnt by a small DiT, and read back by OCR.

alphabet       the letters, and the texts that the model is asked for
bake_atlas.py  the script that draws all letters once, with the fonts that matplotlib ships, into atlas.npz
drawing        texts -> 64x192 images, letters pasted from the atlas
latents        image <-> the 16-channel latent the model works on
conditioning   text -> the tensors a text encoder would hand to the model
sampling       the model sampled by ComfyUI
reading        images -> text, by OCR, and how far that is from what was asked
train.py       the script that made tests/data/word_dit.safetensors
"""
