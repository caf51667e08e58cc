"""What is changed of a loaded MODEL."""
