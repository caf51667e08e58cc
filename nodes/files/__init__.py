"""Files and the formats in them."""
