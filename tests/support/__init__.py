"""What tests and studies share: the environment, the server, the pack, small models. Nothing here asserts."""
