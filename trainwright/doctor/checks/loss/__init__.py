"""Checks of the loss: the inputs of the loss function, its targets and its terms."""
