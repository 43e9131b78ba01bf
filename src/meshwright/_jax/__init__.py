"""The only door to the parts of JAX that change between releases; every other package imports them from here."""
