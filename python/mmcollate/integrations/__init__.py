"""Thin bindings to other libraries, one file each; importing this imports none of them."""
