"""Files: what they hold, whoever wrote them."""
