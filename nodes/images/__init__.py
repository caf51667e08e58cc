"""Images beside other images: how much they differ, and how sure that is."""
