"""A recipe and a device in, a forecast out: what a step holds and takes, and the layout to choose. Composition."""
