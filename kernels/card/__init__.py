"""What decides on a card: which it is, what `auto` chooses there, and what is kept of it."""
